"""Supply the files of a repository on the hub as a source for repacking.

Config, index and other small files are complete, with checked hashes, before they are read. Headers
of weights are read ahead by ranges, which no hash protects. So a file of weights is used only if
its hash is right and its header equals the one that was read ahead.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_token

from moeinf.models.families import family_of
from moeinf.runtime.checkpoints.checkpoint import (
    BIN,
    CONFIG,
    INDEX,
    QUANTISED,
    SAFETENSORS,
    SINGLE,
    BadCheckpoint,
    Checkpoint,
    SourceTensor,
    header_length,
    indexed_files,
    make_checkpoint,
    max_json_bytes,
    parse_header,
    parse_object,
    read_json,
    with_quantised,
)
from moeinf.runtime.checkpoints.quantised.fp8 import files_of
from moeinf.runtime.checkpoints.quantised.joining import joined
from moeinf.runtime.checkpoints.remote_torch_bin import check_table, read_remote_table
from moeinf.runtime.gguf.checkpoint import checkpoint_of
from moeinf.runtime.gguf.header import Header, Room
from moeinf.runtime.gguf.header import parse_header as parse_gguf
from moeinf.runtime.gguf.reader import join_parts, read_part
from moeinf.runtime.hub.download import (
    RANGE_BYTES,
    DownloadFailed,
    Fetcher,
    RemoteFile,
    fetch,
    fetch_bytes,
    fetch_small,
    has_promised_hash,
    is_promised,
)
from moeinf.runtime.hub.listing import Repository
from moeinf.runtime.hub.meter import Meter
from moeinf.runtime.hub.patience import Patience
from moeinf.runtime.library.sources import CONVERTED_FILES, KEPT_FILES, MAX_KEPT_BYTES, Base
from moeinf.runtime.library.staging import StagingFolder
from moeinf.runtime.sizes import Progress
from moeinf.runtime.text.tokenizer import TOKENIZER

WORKERS = 8  # ranges in flight


def small_files_of(repository: Repository) -> list[RemoteFile]:
    """Return the config, tokenizer and other files that a model keeps or converts."""
    converts = TOKENIZER not in repository.files
    wanted = {*KEPT_FILES, *(CONVERTED_FILES if converts else ())}
    return [
        file
        for name, file in sorted(repository.files.items())
        if name in wanted and file.size_bytes <= MAX_KEPT_BYTES
    ]


def fetcher_of(
    token: str | None, patience: Patience | None = None, stop: threading.Event | None = None
) -> Fetcher:
    """Return a Fetcher for the hub. Without `token` it uses the one of huggingface_hub."""
    return Fetcher(constants.ENDPOINT, token or get_token(), patience or Patience(), stop)


class HubSource:
    """A repository's checkpoint, fetched file by file into `folder`, a part of a staging folder.

    The constructor fetches config, index and headers, so that all checks precede the first weight.
    `snapshot` is a folder in the Hugging Face cache. A file there with the promised hash is used
    through a link in `folder`. Raises BadCheckpoint, DownloadFailed.
    """

    fetched = True

    def __init__(
        self,
        repository: Repository,
        folder: Path,
        token: str | None,
        workers: int = WORKERS,
        patience: Patience | None = None,
        stop: threading.Event | None = None,
        snapshot: Path | None = None,
        note: Callable[[str], None] = lambda _: None,
        quant: str | None = None,
    ) -> None:
        self._repository = repository
        self._folder, self._snapshot = folder, snapshot
        self._workers = workers
        self._note = note
        self.base: Base | None = None  # set after the headers of a GGUF file name it
        self.settled: str | None = None
        self._fetcher = fetcher_of(token, patience, stop)
        self.origin = f"hub:{repository.name}" + (f":{quant}" if quant is not None else "")
        self.revision: str | None = repository.commit
        self._tables: dict[str, dict[str, SourceTensor]] = {}  # tables of `.bin` files
        self._headers: dict[str, bytes] = {}  # SHA-256 of headers, with their lengths
        self._parts: dict[str, Header] = {}  # of GGUF files
        if quant is None:
            self._open_folder(repository)
        else:
            self.files = list(repository.files.values())
            self.checkpoint = self._open_parts(self._part)
            self.small: list[RemoteFile] = []
            self._identified = dict(repository.files)

    def _open_parts(self, read: Callable[[Path, Room], Header]) -> Checkpoint:
        paths = [self._folder / part.name for part in self.files]
        return checkpoint_of(join_parts(paths, read))

    def move_to(self, folder: Path) -> None:
        """Fetch the GGUF files into another folder. Only before the first of them is fetched."""
        self._folder = folder
        for name, header in self._parts.items():
            tensors = {n: replace(t, path=folder / name) for n, t in header.tensors.items()}
            self._parts[name] = replace(header, tensors=tensors)
        self.checkpoint = self._open_parts(lambda path, _: self._parts[path.name])

    def _open_folder(self, repository: Repository) -> None:
        """Read config, index and headers, as a checkpoint's folder has them."""
        packaging = SAFETENSORS if SAFETENSORS.given(self._has) else BIN
        if not packaging.given(self._has):
            raise BadCheckpoint(f"{repository.name} has neither {INDEX} nor {SINGLE}")
        index = self._json(packaging.index) if self._has(packaging.index) else None
        headers = self._header if packaging is SAFETENSORS else self._table
        beside = self._json(QUANTISED) if self._has(QUANTISED) else None
        config = with_quantised(self._json(CONFIG), beside)
        self.checkpoint = make_checkpoint(self._folder, config, index, headers, packaging)
        named = [packaging.single]
        if index is not None:
            named = indexed_files(self._folder, index["weight_map"], packaging)
        self.files = [repository.files[file] for file in named]
        self.small = small_files_of(repository)
        self._identified = {file.name: file for file in (*self.files, *self.small)}
        if index is not None:
            self._identified[packaging.index] = self._file(packaging.index)

    @property
    def unpromised(self) -> list[str]:
        """The files without a promised hash, which cannot be checked."""
        found = self._identified.values()
        return [file.name for file in found if not (file.sha256 or file.git_sha1)]

    @property
    def cached(self) -> list[str]:
        """The files of weights in the Hugging Face cache; their hashes are not checked yet."""
        return [file.name for file in self.files if self._in_cache(file) is not None]

    def identity(self) -> Mapping[str, object]:
        """Return the repository's name and one hash over the promises of all files in use.

        A commit that changes only other files gives the same identity.
        """
        commit = self._repository.commit  # replaces a hash that is not promised
        promises = {
            file.name: [file.size_bytes, file.sha256 or file.git_sha1 or commit]
            for file in self._identified.values()
        }
        text = json.dumps(promises, sort_keys=True).encode()
        return {"repository": self._repository.name, "files": hashlib.sha256(text).hexdigest()}

    def download_bytes(self) -> int:
        """Return the bytes of weights that a pull would fetch."""
        return sum(file.size_bytes for file in self.files if self._in_cache(file) is None)

    def space_bytes(self) -> int:
        """Return the peak disk space of source files, in bytes.

        It counts the files in repacking, the files that wait for others, and the prefetched one.
        """
        place = {file.name: number for number, file in enumerate(self.files)}
        last = list(range(len(self.files)))  # for each file, the file after which it is released
        family = family_of(self.checkpoint.config)
        config = family.parse(self.checkpoint.config)
        dense = joined(self.checkpoint, lambda name: family.ignores(name, config))
        for tensor in (*dense.values(), *self.checkpoint.experts.values()):
            places = [place[path.name] for path in files_of(tensor)]
            for number in places:
                last[number] = max(last[number], *places)
        sizes = [file.size_bytes if self._in_cache(file) is None else 0 for file in self.files]
        ends = [0] * len(sizes)  # bytes released after each file
        for number, size in zip(last, sizes, strict=True):
            ends[number] += size
        most = held = 0
        for now, size in enumerate(sizes):
            held += size
            most = max(most, held + sum(sizes[now + 1 : now + 2]))
            held -= ends[now]
        return most + sum(file.size_bytes for file in self.small if self._in_cache(file) is None)

    def small_files(self) -> Checkpoint:
        self._folder.mkdir(parents=True, exist_ok=True)
        for file in self.small:
            self._obtain(file, 1, lambda _: None)
        made = self.checkpoint.made is not None
        if not made and read_json(self._folder / CONFIG) != self.checkpoint.config:
            # Its hash was not promised.
            raise DownloadFailed(f"{CONFIG}: it is not the one that the hub sent before")
        if self.base is None:
            return self.checkpoint
        found, self.settled = self.base.settle(self.checkpoint, self._read)
        return found

    def _read(self, name: str, at: int, count: int) -> bytes:
        return fetch_bytes(self._fetcher, self._file(name), at, at + count)

    def bring(self, work: StagingFolder, progress: Progress) -> Iterator[Path]:
        """Yield each file once it is complete and checked, and prefetch the next one."""
        phase = "downloading" if self.download_bytes() else "checking"
        meter = Meter(progress, phase, sum(file.size_bytes for file in self.files))
        meter.add(sum(file.size_bytes for file in self.files if file.name in work.done))
        todo = [file for file in self.files if file.name not in work.done]
        with ThreadPoolExecutor(1) as ahead:

            def start(file: RemoteFile) -> Callable[[], Path]:
                job = ahead.submit(self._obtain, file, self._workers, meter.of(file))
                return job.result

            try:
                following = start(todo[0]) if todo else None
                for number in range(len(todo)):
                    assert following is not None
                    path = following()
                    following = start(todo[number + 1]) if number + 1 < len(todo) else None
                    self._check_table(path)
                    yield path
            finally:
                self._fetcher.stop.set()  # end at once; do not wait for the prefetch

    def is_here(self, path: Path) -> bool:
        return path.is_file()

    def release(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def bring_tensors(self, tensors: list[SourceTensor]) -> None:
        """Fetch only the bytes of these tensors, for a repair.

        They are written at their offsets in otherwise empty (sparse) files.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        for tensor in tensors:
            file = self._file(tensor.path.name)
            descriptor = os.open(tensor.path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                for start in range(0, tensor.size_bytes, RANGE_BYTES):
                    stop = min(start + RANGE_BYTES, tensor.size_bytes)
                    at = tensor.offset + start
                    data = fetch_bytes(self._fetcher, file, at, tensor.offset + stop)
                    os.pwrite(descriptor, data, at)
            finally:
                os.close(descriptor)

    def small_file(self, name: str) -> bytes:
        if self._parts:
            return self.checkpoint.need_small_file(name)
        file = self._file(name)
        if file.size_bytes > max_json_bytes(name):
            raise BadCheckpoint(f"{self._repository.name}: {name} is too large")
        cached = self._in_cache(file)
        if cached is not None:
            data = cached.read_bytes()
            if is_promised(data, file):
                return data
        return fetch_small(self._fetcher, file)

    def _json(self, name: str) -> dict[str, Any]:
        return parse_object(self.small_file(name), Path(self._repository.name) / name)

    def _header(self, name: str) -> dict[str, SourceTensor]:
        """Return the tensors of a remote safetensors file, from its first bytes."""
        file, path = self._file(name), self._folder / name
        start = fetch_bytes(self._fetcher, file, 0, min(8, file.size_bytes))
        length = header_length(path, file.size_bytes, start)
        text = fetch_bytes(self._fetcher, file, 8, 8 + length)
        self._headers[name] = hashlib.sha256(start + text).digest()
        return parse_header(path, file.size_bytes, text)

    def _table(self, name: str) -> dict[str, SourceTensor]:
        """Return the tensors of a remote `.bin` file."""
        file = self._file(name)
        read = partial(fetch_bytes, self._fetcher, file)
        self._tables[name] = read_remote_table(file.size_bytes, read, self._folder / name)
        return self._tables[name]

    def _part(self, path: Path, room: Room) -> Header:
        """Return the header of a remote GGUF file."""
        file = self._file(path.name)

        def read(at: int, count: int) -> bytes:
            return fetch_bytes(self._fetcher, file, at, at + count)

        self._parts[path.name] = parse_gguf(path, file.size_bytes, read, room)
        return self._parts[path.name]

    def _check_table(self, path: Path) -> None:
        """Compare the table of a complete file with the one that was read ahead.

        Raises BadCheckpoint or DownloadFailed if they differ.
        """
        if path.name in self._tables:
            check_table(path, self._tables[path.name])
            return
        if path.name in self._parts:
            same = read_part(path) == self._parts[path.name]
        else:
            with path.open("rb") as file:
                start = file.read(8)
                text = file.read(header_length(path, os.fstat(file.fileno()).st_size, start))
            same = hashlib.sha256(start + text).digest() == self._headers[path.name]
        if not same:
            raise DownloadFailed(
                f"{path.name}: its header is not the one that the hub sent before. "
                f"Try: moeinf pull {self._repository.name}"
            )

    def _obtain(self, file: RemoteFile, workers: int, count: Callable[[int], None]) -> Path:
        """Return the path of a checked file, from the cache or else from the hub."""
        path, cached = self._folder / file.name, self._in_cache(file)
        if cached is None or path.exists():
            return fetch(self._fetcher, file, self._folder, workers, count)
        done = 0

        def checked(more: int) -> None:
            nonlocal done
            if self._fetcher.stop.is_set():
                raise DownloadFailed(f"{file.name}: stopped")
            done += more
            count(more)

        if has_promised_hash(cached, file, checked):
            self._folder.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # a dangling link
            path.symlink_to(cached)
            return path
        self._note(f"{file.name} in the Hugging Face cache is damaged: it is downloaded again")
        count(-done)
        return fetch(self._fetcher, file, self._folder, workers, count)

    def _in_cache(self, file: RemoteFile) -> Path | None:
        """Return the file in the Hugging Face cache if it has the right size, or None."""
        if self._snapshot is None:
            return None
        path = (self._snapshot / (file.path or file.name)).resolve()
        fits = path.is_file() and path.stat().st_size == file.size_bytes
        return path if fits else None

    def _has(self, name: str) -> bool:
        return name in self._repository.files

    def _file(self, name: str) -> RemoteFile:
        file = self._repository.files.get(name)
        if file is None:
            raise BadCheckpoint(f"{self._repository.name} has no {name}")
        return file
