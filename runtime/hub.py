"""Repositories on the hub: what they hold, and their files as a source for repacking.

Does not know how files travel (download.py) or what becomes of them (repack.py). Metadata,
credentials are huggingface_hub's; nothing in a repository is ever executed.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import HfApi, constants, get_token, hf_hub_url
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError of its client
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoSibling

from moeinf.runtime.checkpoint import (
    BIN,
    CONFIG,
    INDEX,
    QUANTISED,
    SAFETENSORS,
    SINGLE,
    BadCheckpoint,
    SourceTensor,
    header_length,
    indexed_files,
    make_checkpoint,
    parse_header,
    parse_object,
    with_quantised,
)
from moeinf.runtime.download import RANGE_BYTES, Fetcher, Patience, RemoteFile, fetch, fetch_bytes
from moeinf.runtime.fp8 import files_of, join_scales
from moeinf.runtime.picked import join_blocks
from moeinf.runtime.remote_torch_file import check_table, read_remote_table
from moeinf.runtime.repack import CONVERTED_FILES, KEPT_FILES, MAX_KEPT_BYTES
from moeinf.runtime.sizes import Progress
from moeinf.runtime.tokenizer import TOKENIZER
from moeinf.runtime.workplace import Workplace

constants.HF_HUB_DISABLE_TELEMETRY = True  # nothing about this machine leaves it
WORKERS = 8  # ranges in flight
_MAX_JSON_BYTES = 256 << 20
_COMMIT = re.compile(r"[0-9A-Za-z]{40}")


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids asking the hub."""
    return bool(constants.is_offline_mode())


class RepositoryError(ConnectionError):
    """The hub does not give what was asked for. The message says why and what to do."""


@dataclass(frozen=True)
class Repository:
    """A model repository at one commit: its files by name."""

    name: str  # org/name
    commit: str
    files: Mapping[str, RemoteFile]


def look_up(name: str, revision: str | None, token: str | None) -> Repository:
    """Asks the hub for a repository's commit and files. Raises RepositoryError."""
    token = token or get_token()
    at = f"{name} at revision {revision}" if revision else name
    try:
        with explained(name, revision, token):
            info = HfApi(endpoint=constants.ENDPOINT, token=token or False).model_info(
                name, revision=revision, files_metadata=True, timeout=30
            )
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise RepositoryError(f"the hub describes {at} in no way we know: {error}") from error
    commit = info.sha
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise RepositoryError(f"the hub names no commit for {at}")
    files = {}
    for entry in info.siblings or []:
        path = PurePosixPath(str(entry.rfilename))
        if type(entry.size) is not int or not 0 <= entry.size < 1 << 48:
            continue
        if len(path.parts) != 1 or path.name in ("", "..") or str(path) != entry.rfilename:
            continue  # folders hold other formats: original/, metal/, …
        url = hf_hub_url(name, entry.rfilename, revision=commit, endpoint=constants.ENDPOINT)
        files[path.name] = remote_file(entry, entry.size, url)
    return Repository(name, commit, files)


def remote_file(entry: RepoSibling, size_bytes: int, url: str) -> RemoteFile:
    """A file as the hub lists it, under its last name, with the hash that it promises."""
    name = PurePosixPath(entry.rfilename).name
    if entry.lfs is not None:
        return RemoteFile(name, size_bytes, url, entry.lfs.sha256, None)
    return RemoteFile(name, size_bytes, url, None, entry.blob_id)


@contextmanager
def explained(name: str, revision: str | None, token: str | None) -> Iterator[None]:
    """Turns what goes wrong while the hub is asked about `name` into a RepositoryError."""
    at = f"{name} at revision {revision}" if revision else name
    try:
        yield
    except GatedRepoError as error:
        raise RepositoryError(
            f"{name} is gated: accept its terms on the hub and set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise RepositoryError(f"{name} has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        hint = "" if token else "; if it is private, set HF_TOKEN"
        raise RepositoryError(f"the hub has no repository {name}{hint}") from error
    except OfflineModeIsEnabled as error:
        raise RepositoryError(
            f"HF_HUB_OFFLINE is set and {at} is not in the Hugging Face cache"
        ) from error
    except HfHubHTTPError as error:
        raise RepositoryError(f"the hub refuses {at}: {error}") from error
    except (HTTPError, OSError) as error:
        raise RepositoryError(f"the hub cannot be reached for {at}: {error}") from error


def small_files_of(repository: Repository) -> list[RemoteFile]:
    """Config, tokenizer and the like: what a model keeps, or what its tokenizer is made of."""
    converts = TOKENIZER not in repository.files
    wanted = {*KEPT_FILES, *(CONVERTED_FILES if converts else ())}
    return [
        file
        for name, file in sorted(repository.files.items())
        if name in wanted and file.size_bytes <= MAX_KEPT_BYTES
    ]


def bring_small(fetcher: Fetcher, files: Iterable[RemoteFile], folder: Path) -> Path:
    """Brings small files into `folder`, which it returns. Raises DownloadFailed."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        fetch(fetcher, file, folder, 1, lambda _: None)
    return folder


def fetcher_of(token: str | None, patience: Patience | None = None) -> Fetcher:
    """From the hub, with the token that huggingface_hub knows unless another is given."""
    return Fetcher(constants.ENDPOINT, token or get_token(), patience or Patience())


class HubSource:
    """A repository's checkpoint, brought file by file into `folder`, a part of a workplace.

    Construction fetches config, index and headers, so that everything can be checked before the
    first weight is. Raises BadCheckpoint, DownloadFailed.
    """

    keeps_progress = True

    def __init__(
        self,
        repository: Repository,
        folder: Path,
        token: str | None,
        workers: int = WORKERS,
        patience: Patience | None = None,
    ) -> None:
        self._repository = repository
        self._folder = folder
        self._workers = workers
        self._fetcher = fetcher_of(token, patience)
        self.origin = f"hub:{repository.name}"
        self.revision: str | None = repository.commit
        packaging = SAFETENSORS if SAFETENSORS.given(self._has) else BIN
        if not packaging.given(self._has):
            raise BadCheckpoint(f"{repository.name} has neither {INDEX} nor {SINGLE}")
        index = self._json(packaging.index) if self._has(packaging.index) else None
        self._tables: dict[str, dict[str, SourceTensor]] = {}  # of `.bin` files
        headers = self._header if packaging is SAFETENSORS else self._table
        beside = self._json(QUANTISED) if self._has(QUANTISED) else None
        config = with_quantised(self._json(CONFIG), beside)
        self.checkpoint = make_checkpoint(self._folder, config, index, headers, packaging)
        named = [packaging.single]
        if index is not None:
            named = indexed_files(self._folder, index["weight_map"], packaging)
        self.files = [repository.files[file] for file in named]
        self.small = small_files_of(repository)

    def identity(self) -> Mapping[str, object]:
        return {"repository": self._repository.name, "commit": self._repository.commit}

    def space_bytes(self) -> int:
        """At the worst moment: files being repacked or waiting for others, and the next one."""
        place = {file.name: number for number, file in enumerate(self.files)}
        last = list(range(len(self.files)))  # with which file each is done
        for tensor in join_blocks(self.checkpoint, join_scales(self.checkpoint)).values():
            places = [place[path.name] for path in files_of(tensor)]
            for number in places:
                last[number] = max(last[number], *places)
        sizes = [file.size_bytes for file in self.files]
        held = (
            sum(sizes[n] for n in range(now + 1) if last[n] >= now) + sum(sizes[now + 1 : now + 2])
            for now in range(len(sizes))
        )
        return max(held, default=0) + sum(file.size_bytes for file in self.small)

    def small_files(self) -> Path:
        return bring_small(self._fetcher, self.small, self._folder)

    def bring(self, work: Workplace, progress: Progress) -> Iterator[Path]:
        """Each file as it is whole and has its hash; the next one is fetched meanwhile."""
        meter = _Meter(progress, sum(file.size_bytes for file in self.files))
        meter.add(sum(file.size_bytes for file in self.files if file.name in work.done))
        todo = [file for file in self.files if file.name not in work.done]
        with ThreadPoolExecutor(1) as ahead:

            def start(file: RemoteFile) -> Callable[[], Path]:
                count = meter.of(file)
                job = ahead.submit(fetch, self._fetcher, file, self._folder, self._workers, count)
                return job.result

            try:
                following = start(todo[0]) if todo else None
                for number in range(len(todo)):
                    assert following is not None
                    path = following()
                    following = start(todo[number + 1]) if number + 1 < len(todo) else None
                    if path.name in self._tables:
                        check_table(path, self._tables[path.name])
                    yield path
            finally:
                self._fetcher.stop.set()  # whoever leaves early does not wait for gigabytes

    def is_here(self, path: Path) -> bool:
        return path.is_file()

    def release(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def bring_tensors(self, tensors: list[SourceTensor]) -> None:
        """For repairs: only their bytes, at their places in otherwise empty files."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for tensor in tensors:
            file = self._file(tensor.path.name)
            descriptor = os.open(tensor.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                for start in range(0, tensor.size_bytes, RANGE_BYTES):
                    stop = min(start + RANGE_BYTES, tensor.size_bytes)
                    at = tensor.offset + start
                    data = fetch_bytes(self._fetcher, file, at, tensor.offset + stop)
                    os.pwrite(descriptor, data, at)
            finally:
                os.close(descriptor)

    def small_file(self, name: str) -> bytes:
        file = self._file(name)
        return fetch_bytes(self._fetcher, file, 0, file.size_bytes)

    def _json(self, name: str) -> dict[str, Any]:
        file = self._file(name)
        if file.size_bytes > _MAX_JSON_BYTES:
            raise BadCheckpoint(f"{self._repository.name}: {name} is too large")
        data = fetch_bytes(self._fetcher, file, 0, file.size_bytes)
        return parse_object(data, Path(self._repository.name) / name)

    def _header(self, name: str) -> dict[str, SourceTensor]:
        """The tensors of a remote file, from its first bytes."""
        file, path = self._file(name), self._folder / name
        start = fetch_bytes(self._fetcher, file, 0, min(8, file.size_bytes))
        length = header_length(path, file.size_bytes, start)
        return parse_header(path, file.size_bytes, fetch_bytes(self._fetcher, file, 8, 8 + length))

    def _table(self, name: str) -> dict[str, SourceTensor]:
        """The tensors of a remote `.bin` file."""
        file = self._file(name)
        read = partial(fetch_bytes, self._fetcher, file)
        self._tables[name] = read_remote_table(file.size_bytes, read, self._folder / name)
        return self._tables[name]

    def _has(self, name: str) -> bool:
        return name in self._repository.files

    def _file(self, name: str) -> RemoteFile:
        file = self._repository.files.get(name)
        if file is None:
            raise BadCheckpoint(f"{self._repository.name} has no {name}")
        return file


class _Meter:
    """Adds up what arrives on several threads and tells the progress bar."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total = progress, total
        self._done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Bytes of whatever file."""
        with self._lock:
            self._done += count
            self._progress("downloading", self._done, self._total)

    def of(self, file: RemoteFile) -> Callable[[int], None]:
        """Counts the bytes of one file, which has a bar of its own."""
        done = 0

        def add(count: int) -> None:
            nonlocal done
            self.add(count)
            done += count
            self._progress(file.name, done, file.size_bytes)

        return add
