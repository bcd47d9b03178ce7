"""Fetch one file by parallel ranges, resume after a kill, and check its hash.

The hub's library neither resumes across processes nor checks hashes (docs/decisions/0007).

The download of a file `x` uses two more files:

    x.incomplete   the bytes, each at its final offset (a sparse file)
    x.pieces       a line per piece that is there: start, length, CRC-32C; appended after its bytes

A rerun keeps each piece whose bytes still have the checksum, and fetches the rest. The file is
renamed to `x` once it has the hash that the hub promised.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of its HTTP client

from moeinf.errors import Unavailable
from moeinf.errors import reason as why
from moeinf.native import crc32c
from moeinf.runtime.hub.http import BadAnswer, get
from moeinf.runtime.hub.patience import Patience, RetryLater, TooSlow, retry_after

PIECE_BYTES = 1 << 20  # a kill loses at most this much of each range in flight
RANGE_BYTES = 32 << 20  # the most bytes of one request
_PROGRESS_BYTES = 64 << 10  # an attempt that brings less, and not the rest, counts as failed
_WINDOW_BYTES = 4 << 10  # the least in each `stall_seconds`
_REFUSED = {401, 403, 404, 410, 416, 451}


class DownloadFailed(Unavailable, OSError):
    """A file could not be fetched. The message gives its name and the reason."""

    code = "download_failed"
    hint = "the same command again: downloaded data is kept"


@dataclass(frozen=True)
class RemoteFile:
    """One file of a repository at a fixed commit, with the hash that the hub promises."""

    name: str
    size_bytes: int
    url: str
    sha256: str | None  # for files in large storage
    git_sha1: str | None  # for other files: git's hash of the blob
    path: str = ""  # in the repository, if it is not `name`


class Fetcher:
    """The access to remote files of one pull. A fetch that fails stops all others.

    The token is sent only to the endpoint's own host.
    """

    def __init__(
        self,
        endpoint: str,
        token: str | None,
        patience: Patience,
        stop: threading.Event | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._token = token
        self.patience = patience
        self.stop = stop or threading.Event()  # once set, every fetch raises DownloadFailed

    @contextmanager
    def range(self, file: RemoteFile, start: int, stop: int) -> Iterator[Iterator[bytes]]:
        """Yield the bytes start … stop-1, in blocks.

        Raises DownloadFailed for a permanent error, HTTPError or RetryLater for a temporary one.
        """
        headers = {"Range": f"bytes={start}-{stop - 1}"}
        seconds = self.patience.stall_seconds
        try:
            with get(file.url, headers, self._endpoint, self._token, seconds) as response:
                _check_answer(file, response, start, stop)
                yield response.iter_raw()  # unbuffered: keeps all bytes before a broken connection
        except BadAnswer as error:
            raise DownloadFailed(f"{file.name}: {error}") from error


def _check_answer(file: RemoteFile, response: Any, start: int, stop: int) -> None:
    status: int = response.status_code
    if status in _REFUSED:
        raise DownloadFailed(f"{file.name}: the server answers {status}")
    if status == 429 or status >= 500:
        raise RetryLater(status, retry_after(response.headers.get("retry-after")))
    whole = status == 200 and start == 0 and stop == file.size_bytes
    expected = f"bytes {start}-{stop - 1}/{file.size_bytes}"
    if not whole and (status != 206 or response.headers.get("content-range") != expected):
        answer = response.headers.get("content-range", "no range")
        raise DownloadFailed(f"{file.name}: expected {expected}, got status {status}, {answer}")


def fetch(
    fetcher: Fetcher,
    file: RemoteFile,
    folder: Path,
    workers: int,
    progress: Callable[[int], None],
) -> Path:
    """Download `file` into `folder` and return its path.

    `progress` gets numbers of bytes. Raises DownloadFailed, or OSError (a full disk). Received
    pieces stay for the next attempt.
    """

    def goes_on(_: int) -> None:
        _check_goes_on(fetcher, file)

    path = folder / file.name
    if path.is_file():
        if has_promised_hash(
            path, file, goes_on
        ):  # from an earlier attempt: its bytes may have changed
            progress(file.size_bytes)
            return path
        path.unlink()
    for attempt in (1, 2):
        partial = _Partial(folder, file, progress)
        try:
            partial.fill(fetcher, workers)
            if has_promised_hash(partial.path, file, goes_on):
                partial.finish(path)
                return path
        finally:
            partial.close()
        partial.discard()  # the transfer was intact, so the server sent wrong bytes
        if attempt == 1:
            progress(-file.size_bytes)
    raise _wrong_hash(file)


def fetch_bytes(fetcher: Fetcher, file: RemoteFile, start: int, stop: int) -> bytes:
    """Return the bytes start … stop-1 of a file. Raises DownloadFailed."""
    data = bytearray()
    _receive(fetcher, file, start, stop, lambda _, piece: data.extend(piece))
    return bytes(data)


def fetch_small(fetcher: Fetcher, file: RemoteFile) -> bytes:
    """Return a whole file after a check of its promised hash. Raises DownloadFailed."""
    for _ in (1, 2):
        data = fetch_bytes(fetcher, file, 0, file.size_bytes)
        if is_promised(data, file):
            return data
    raise _wrong_hash(file)


def _wrong_hash(file: RemoteFile) -> DownloadFailed:
    return DownloadFailed(
        f"{file.name}: the received data does not have the hash that the hub gives"
    )


def _receive(
    fetcher: Fetcher,
    file: RemoteFile,
    start: int,
    stop: int,
    keep: Callable[[int, bytes], None],
) -> None:
    """Fetch one range and give each piece to `keep`, with its offset in the file.

    A connection that delivers _PROGRESS_BYTES resets the count of failed attempts. Raises
    DownloadFailed.
    """
    fruitless = 0
    while start < stop:
        before, wait = start, None
        try:
            _check_goes_on(fetcher, file)
            with fetcher.range(file, start, stop) as blocks:
                watched = _watched(blocks, fetcher, file)
                for piece in _pieces(watched, stop - start):
                    keep(start, piece)
                    start += len(piece)
            reason = "the connection ended early"
        except HTTPError as error:
            reason = why(error)
        except TooSlow as error:
            reason = str(error)
        except RetryLater as error:
            reason, wait = str(error), error.seconds
        if start == stop:
            return
        fruitless = 0 if start - before >= _PROGRESS_BYTES else fruitless + 1
        if fruitless >= fetcher.patience.attempts:
            raise DownloadFailed(f"{file.name}: {reason}, {fruitless} times in a row")
        fetcher.patience.pause(fetcher.stop, fruitless, wait)


def _watched(blocks: Iterator[bytes], fetcher: Fetcher, file: RemoteFile) -> Iterator[bytes]:
    """Yield the blocks and check for a stop at each one, since a piece can take minutes.

    Raises TooSlow if bytes only drip.
    """
    seconds = fetcher.patience.stall_seconds
    count, until = 0, time.monotonic() + seconds
    for block in blocks:
        _check_goes_on(fetcher, file)
        count += len(block)
        if time.monotonic() > until:
            if count < _WINDOW_BYTES:
                raise TooSlow(f"only {count} bytes have come in {seconds:g} s")
            count, until = 0, time.monotonic() + seconds
        yield block


def _check_goes_on(fetcher: Fetcher, file: RemoteFile) -> None:
    if fetcher.stop.is_set():
        raise DownloadFailed(f"{file.name}: stopped")


class _Partial:
    """A file in transfer: its finished pieces, and the threads that fetch the rest."""

    def __init__(self, folder: Path, file: RemoteFile, progress: Callable[[int], None]) -> None:
        self.path = folder / f"{file.name}.incomplete"
        self._journal_path = folder / f"{file.name}.pieces"
        self._file = file
        self._progress = progress
        self._lock = threading.Lock()
        self._data = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        self._journal = os.open(self._journal_path, flags, 0o644)
        self._missing = self._ranges(self._kept())

    def fill(self, fetcher: Fetcher, workers: int) -> None:
        """Fetch every missing byte. Raises DownloadFailed or OSError."""
        with futures.ThreadPoolExecutor(max(1, min(workers, len(self._missing)))) as pool:
            jobs = [
                pool.submit(_receive, fetcher, self._file, *span, self._keep)
                for span in self._missing
            ]
            try:
                done, _ = futures.wait(jobs, return_when=futures.FIRST_EXCEPTION)
                for job in done:
                    job.result()
            except BaseException:
                fetcher.stop.set()
                for job in jobs:
                    job.cancel()
                raise

    def finish(self, path: Path) -> None:
        os.fsync(self._data)
        self.path.rename(path)
        self._journal_path.unlink()

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        self._journal_path.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._data)
        os.close(self._journal)

    def _kept(self) -> list[tuple[int, int]]:
        """Return the pieces of an earlier attempt that still match, as sorted (start, stop)."""
        text = os.pread(self._journal, os.fstat(self._journal).st_size, 0)
        kept = []
        for line in text.decode("ascii", errors="replace").split("\n"):
            with suppress(ValueError):
                start, size, crc = (int(word) for word in line.split(" "))
                if start >= 0 and 0 < size <= PIECE_BYTES and start + size <= self._file.size_bytes:
                    data = os.pread(self._data, size, start)
                    if len(data) == size and crc32c(data) == crc:
                        kept.append((start, start + size))
        os.ftruncate(self._data, self._file.size_bytes)
        return sorted(set(kept))

    def _ranges(self, kept: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the missing ranges, one per request, and report the bytes that are here."""
        gaps, at = [], 0
        for start, stop in [*kept, (self._file.size_bytes, self._file.size_bytes)]:
            if start > at:
                gaps.append((at, start))
            at = max(at, stop)
        missing = sum(stop - start for start, stop in gaps)
        self._progress(self._file.size_bytes - missing)
        return [
            (at, min(at + RANGE_BYTES, stop))
            for start, stop in gaps
            for at in range(start, stop, RANGE_BYTES)
        ]

    def _keep(self, start: int, piece: bytes) -> None:
        """Write the bytes of a piece, then its journal line."""
        view = memoryview(piece)
        while view:
            view = view[os.pwrite(self._data, view, start + len(piece) - len(view)) :]
        line = f"{start} {len(piece)} {crc32c(piece)}\n".encode()
        with self._lock:
            os.write(self._journal, line)
            self._progress(len(piece))


def _pieces(blocks: Iterator[bytes], wanted: int) -> Iterator[bytes]:
    """Join network blocks into pieces. The last piece has what a broken connection delivered."""
    held = bytearray()
    try:
        for block in blocks:
            held += block[: wanted - len(held)]
            while len(held) >= PIECE_BYTES:
                yield bytes(held[:PIECE_BYTES])
                wanted -= PIECE_BYTES
                del held[:PIECE_BYTES]
            if len(held) == wanted:  # the server may send more than was requested
                break
    except HTTPError:
        if held:
            yield bytes(held)
        raise
    if held:
        yield bytes(held)


def has_promised_hash(path: Path, file: RemoteFile, progress: Callable[[int], None]) -> bool:
    """Return whether a file has the size and the promised hash, if the hub promised one.

    `progress` gets the number of bytes of each block that is read.
    """
    with path.open("rb") as data:
        if os.fstat(data.fileno()).st_size != file.size_bytes:
            return False
        checked = _Promise(file)
        while block := data.read(PIECE_BYTES):
            checked.update(block)
            progress(len(block))
    return checked.kept()


def is_promised(data: bytes, file: RemoteFile) -> bool:
    """Return whether these bytes have the promised hash of `file`, if the hub promised one."""
    promise = _Promise(file)
    promise.update(data)
    return promise.kept()


class _Promise:
    """The running hash of a file, of the kind that the hub promised."""

    def __init__(self, file: RemoteFile) -> None:
        self._promised = file.sha256 or file.git_sha1
        if file.sha256 is not None:
            self._hash = hashlib.sha256()
        else:
            start = f"blob {file.size_bytes}\0".encode()
            self._hash = hashlib.sha1(start, usedforsecurity=False)

    def update(self, block: bytes) -> None:
        self._hash.update(block)

    def kept(self) -> bool:
        return self._promised is None or self._hash.hexdigest() == self._promised.lower()
