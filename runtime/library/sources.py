"""Define the source of a model: a checkpoint whose files are local, or are fetched on request."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from moeinf.runtime.checkpoints.checkpoint import (
    BIN_INDEX,
    CONFIG,
    INDEX,
    QUANTISED,
    BadCheckpoint,
    Checkpoint,
    explained,
    read_exactly,
)
from moeinf.runtime.library.staging import StagingFolder
from moeinf.runtime.sizes import Progress
from moeinf.runtime.text.tokenizer import TOKENIZER
from moeinf.runtime.text.tokenizer_trial import CONVERTED

KEPT_FILES = (
    CONFIG,
    "generation_config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
CONVERTED_FILES = CONVERTED  # read only without a tokenizer.json
MAX_KEPT_BYTES = 64 << 20


class Base(Protocol):
    """The repository that a GGUF file was made from, asked for its tokenizer and a few rows."""

    def settle(
        self, checkpoint: Checkpoint, read: Callable[[str, int, int], bytes]
    ) -> tuple[Checkpoint, str | None]:
        """Return the checkpoint with the files of the repository, and `ORG/NAME@COMMIT`.

        read: (file name, offset, count) -> bytes of the GGUF file. If the repository cannot be used
        the checkpoint stays as it is, and there is no second result.
        """
        ...


class Source(Protocol):
    """A checkpoint whose files are local, or are fetched on request."""

    checkpoint: Checkpoint  # headers are complete, the tensors' bytes may not be local yet
    origin: str
    revision: str | None  # of the files: the hub's commit, or a hash
    fetched: bool  # over a network: keep the files of a model that is refused
    settled: str | None  # the ORG/NAME@COMMIT whose tokenizer small_files() has, in a GGUF's place

    def identity(self) -> Mapping[str, object]:
        """Return the values that must match to continue an unfinished model."""
        ...

    def download_bytes(self) -> int:
        """Return the bytes of weights that a pull would fetch."""
        ...

    def space_bytes(self) -> int:
        """Return the most disk space that source files take in the staging folder, in bytes."""
        ...

    def small_files(self) -> Checkpoint:
        """Fetch config, tokenizer and other small files, and return the checkpoint with them."""
        ...

    def bring(self, work: StagingFolder, progress: Progress) -> Iterable[Path]:
        """Yield each source file that `work` still needs, once it is local and checked."""
        ...

    def is_here(self, path: Path) -> bool:
        """Return whether a source file can be read now."""
        ...

    def release(self, path: Path) -> None:
        """Release a file that is not needed again."""
        ...


@dataclass
class LocalSource:
    """A checkpoint folder of the user, which is read in place and never changed.

    Raises BadCheckpoint if the files change between the constructor and the end of `bring`.
    """

    checkpoint: Checkpoint
    origin: str
    revision: str | None = None
    fetched: bool = False
    base: Base | None = None
    settled: str | None = field(init=False, default=None)
    _files: dict[str, list[int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._files = self._look()

    @classmethod
    def watched(cls, checkpoint: Checkpoint, origin: str) -> LocalSource:
        """Return a source whose revision changes with any of its files."""
        source = cls(checkpoint, origin)
        source.revision = source._fingerprint()
        return source

    def identity(self) -> Mapping[str, object]:
        return {"files": self._fingerprint()}

    def download_bytes(self) -> int:
        return 0

    def space_bytes(self) -> int:
        return 0

    def small_files(self) -> Checkpoint:
        if self.base is None:
            return self.checkpoint
        found, self.settled = self.base.settle(self.checkpoint, self._read)
        return found

    def _read(self, name: str, at: int, count: int) -> bytes:
        path, data = self.checkpoint.folder / name, bytearray(count)
        with explained(path), path.open("rb") as file:
            read_exactly(file.fileno(), memoryview(data), at, path)
        return bytes(data)

    def bring(self, work: StagingFolder, progress: Progress) -> Iterator[Path]:
        yield from (path for path in self._paths() if path.name not in work.done)
        for name, about in self._look().items():
            if self._files.get(name) != about:
                error = BadCheckpoint(f"{self.checkpoint.folder / name} changed during the pull")
                error.hint = "the same command when the files no longer change"
                raise error

    def is_here(self, path: Path) -> bool:
        return True

    def release(self, path: Path) -> None:
        """Do nothing: the user owns the file."""

    def _paths(self) -> list[Path]:
        return sorted({tensor.path for tensor in self.checkpoint.all_stored()})

    def _look(self) -> dict[str, list[int]]:
        """Return size and times of every file that a model is made from."""
        folder, found = self.checkpoint.folder, {}
        beside = (*KEPT_FILES, *CONVERTED_FILES, INDEX, BIN_INDEX, QUANTISED)
        small = beside if self.checkpoint.made is None else ()
        for path in (*self._paths(), *(folder / name for name in small)):
            with suppress(OSError):  # absent, or refused when it is read
                about = path.stat()
                found[path.name] = [about.st_size, about.st_mtime_ns, about.st_ctime_ns]
        return found

    def _fingerprint(self) -> str:
        """Return one hash over the folder's path, its files' sizes and times, and all headers."""
        tensors = self.checkpoint.all_stored()
        headers = [[t.name, t.dtype, t.shape, t.path.name, t.offset] for t in tensors]
        about = [str(self.checkpoint.folder), self._files, headers]
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
