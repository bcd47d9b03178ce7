"""Register live engines and servers: each has an entry in $MOEINF_HOME/run.

The figures of an engine are in a `.figures` file beside its entry. A thread of the engine replaces
it once a second if it changed, so decoding a token has no extra cost.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec import Struct

from moeinf.errors import Failure
from moeinf.runtime.files.atomic import make_folder_durably
from moeinf.runtime.files.regular import read_regular
from moeinf.runtime.library.process_entries import Entry, figures_path, live_entries, started_ticks
from moeinf.runtime.system import check_locks, has_locks, lock, open_process

_FIGURES_EVERY_S = 1.0
_MOST_FIGURES_BYTES = 65536
_ENGINE, _SERVER = ".json", ".server"  # suffixes of their entries
_UNWRITABLE = (
    errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EIO
)  # fmt: skip


class NotStopped(Failure, RuntimeError):
    """A process received SIGTERM and is still running."""

    code = "not_stopped"

    def __init__(self, pid: int, seconds: float) -> None:
        super().__init__(f"process {pid} still runs {seconds:.0f} s after SIGTERM")
        self.pid = pid
        self.hint = f"`kill -9 {pid}`"


class Figures(Struct, frozen=True, forbid_unknown_fields=True):
    """The figures of an engine: experts and bytes per tier, and its hit rate.

    hit_rate           `None` before the first decoded token
    digest             of the engine's manifest
    context            the longest conversation that fits, in tokens
    device_peak_bytes  the most GPU memory that the engine takes; 0 without a GPU
    peak_bytes         the RSS of its process once all is full; it changes with a move of memory
    """

    device_experts: int
    host_experts: int
    disk_experts: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    hit_rate: float | None
    digest: str
    context: int
    device: str = "cpu"  # the device that computes experts
    expires_at: int | None = None  # when a server unloads it if idle, in seconds since the epoch
    device_peak_bytes: int = 0
    peak_bytes: int = 0


class _EngineEntry(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The content of a LiveEngine's entry file."""

    pid: int
    model: str
    peak_bytes: int
    started_ticks: int = 0
    reads: str = ""


@dataclass(frozen=True)
class LiveEngine:
    """One live engine, as other processes see it.

    peak_bytes     the RSS of its process once all tiers and caches are full
    started_ticks  tells its process from another with the same pid: a later one, or one in another
                   pid namespace
    reads          another model whose files it reads, for copies of experts; "": none
    """

    pid: int
    model: str
    peak_bytes: int
    started_ticks: int = field(default=0, compare=False)
    figures: Figures | None = field(default=None, compare=False)
    reads: str = ""

    def unfilled_bytes(self) -> int:
        """Return the promised memory that the process does not hold yet, in bytes."""
        with suppress(OSError, ValueError, IndexError):
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
            return max(0, self.peak_bytes - pages * mmap.PAGESIZE)
        return self.peak_bytes


class LiveServer(Struct, frozen=True, forbid_unknown_fields=True):
    """One live server, as other processes see it. address: HOST:PORT, with a numeric HOST."""

    pid: int
    address: str
    started_ticks: int = 0


class Registration:
    """An engine's entry. It lasts until `close`, or until the process ends in any way."""

    def __init__(self, entry: Entry | None) -> None:
        self._entry = entry
        self._closed = threading.Event()
        self._publisher: threading.Thread | None = None

    def publish(self, figures: Callable[[], Figures]) -> None:
        """Write the result of `figures` now, and once a second if it has changed.

        A separate thread calls `figures`. Write errors are ignored.
        """
        if self._entry is None:
            return
        self._write(self._entry, figures())
        self._publisher = threading.Thread(
            target=self._keep, args=(self._entry, figures), daemon=True
        )
        self._publisher.start()

    @property
    def seen(self) -> bool:
        """True if other processes see this engine; False if its home is not writable."""
        return self._entry is not None

    def _keep(self, entry: Entry, figures: Callable[[], Figures]) -> None:
        before = None
        while not self._closed.wait(_FIGURES_EVERY_S):
            now = figures()
            if now != before:
                self._write(entry, now)
                before = now

    @staticmethod
    def _write(entry: Entry, figures: Figures) -> None:
        target = figures_path(entry.path)
        partial = target.with_suffix(".partial")
        with suppress(OSError):
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.truncate(0)
                file.write(msgspec.json.encode(figures))
            partial.replace(target)

    def close(self) -> None:
        self._closed.set()
        if self._publisher is not None:
            self._publisher.join()
        if self._entry is not None:
            figures_path(self._entry.path).unlink(missing_ok=True)
            self._entry.close()


class Registry:
    """The folder $MOEINF_HOME/run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def register(
        self, model: str, peak_bytes: Callable[[int], int | None], reads: str = ""
    ) -> Registration | None:
        """Plan the memory of this process and register it, under one lock.

        `peak_bytes` gets the bytes that other engines are promised but do not hold yet. It returns
        the peak of this process in bytes, or None if the model was removed. In that case this
        method also returns None. If the home is not writable or full, no entry is written, and the
        registration is not `seen`. reads: see LiveEngine.
        """
        with ExitStack() as locked:
            try:
                locked.enter_context(self._locked())
            except OSError as error:
                if error.errno not in _UNWRITABLE:
                    raise
                return None if peak_bytes(0) is None else Registration(None)
            peak = peak_bytes(sum(engine.unfilled_bytes() for engine in self._engines()))
            if peak is None:
                return None
            about = _EngineEntry(os.getpid(), model, peak, started_ticks(os.getpid()), reads)
            try:
                return Registration(Entry(self._folder, _ENGINE, about))
            except OSError as error:
                if error.errno not in _UNWRITABLE:
                    raise
                return Registration(None)

    def register_server(self, address: str) -> Entry:
        """Enter this process as the server that listens at `address`. Raises OSError."""
        about = LiveServer(os.getpid(), address, started_ticks(os.getpid()))
        with self._locked():
            return Entry(self._folder, _SERVER, about)

    def servers(self) -> list[LiveServer]:
        """Return every live server of this home; an empty list if run/ is not writable."""
        if not has_locks():  # so none can register
            return []
        try:
            with self._locked():
                return self._servers()
        except OSError as error:
            if error.errno in _UNWRITABLE:
                return []
            raise

    def engines(self) -> list[LiveEngine]:
        """Return every live engine, with those of this process.

        The list is empty if run/ is not writable, and on a system where none can register.
        """
        if not has_locks():
            return []
        try:
            with self._locked():
                return self._engines()
        except OSError as error:
            if error.errno in _UNWRITABLE:
                return []
            raise

    @contextmanager
    def frozen(self) -> Iterator[list[LiveEngine]]:
        """Yield the live engines and hold the lock, so that no other engine can register."""
        with self._locked():
            yield self._engines()

    def stop(self, model: str | None = None, patience_s: float = 15.0) -> list[int]:
        """Send SIGTERM to processes, wait for their end, and return their pids.

        With `model`, stop the processes that run it, except servers, which may run other models.
        Without it, stop all engines and servers. Raises NotStopped after `patience_s` seconds.

        A reused pid is never signalled. The process is opened first. It is signalled only if its
        start time then matches the entry and the entry's lock is still held.
        """
        with ExitStack() as opened:
            asked = []
            with self._locked():
                for pid, ticks in sorted(self._processes(model)):
                    with suppress(ProcessLookupError):
                        process = open_process(pid)
                        opened.callback(os.close, process)
                        if started_ticks(pid) == ticks:
                            asked.append((pid, process))
                still = {pid for pid, _ in self._processes(model)}
                asked = [(pid, process) for pid, process in asked if pid in still]
                for _, process in asked:
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(process, signal.SIGTERM)
            for pid, process in asked:
                if not select.select([process], [], [], patience_s)[0]:  # readable at its end
                    raise NotStopped(pid, patience_s)
        return [pid for pid, _ in asked]

    def _processes(self, model: str | None) -> set[tuple[int, int]]:
        """Return (pid, started_ticks) of the processes that `stop` ends."""
        servers = {(server.pid, server.started_ticks) for server in self._servers()}
        engines = {
            (engine.pid, engine.started_ticks)
            for engine in self._engines()
            if model is None or engine.model == model
        }
        return engines | servers if model is None else engines - servers

    def _engines(self) -> list[LiveEngine]:
        found = []
        for path, data in live_entries(self._folder, _ENGINE):
            with suppress(ValueError, RecursionError):
                e = _ENGINE_ENTRY.decode(data)
                figures = _read_figures(path)
                peak = e.peak_bytes if figures is None else figures.peak_bytes or e.peak_bytes
                found.append(LiveEngine(e.pid, e.model, peak, e.started_ticks, figures, e.reads))
        return found

    def _servers(self) -> list[LiveServer]:
        found = []
        for _, data in live_entries(self._folder, _SERVER):
            with suppress(ValueError, RecursionError):
                found.append(_LIVE_SERVER.decode(data))
        return found

    @contextmanager
    def _locked(self) -> Iterator[None]:
        check_locks()
        make_folder_durably(self._folder)
        descriptor = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            lock(descriptor)
            yield
        finally:
            os.close(descriptor)


def _read_figures(entry: Path) -> Figures | None:
    with suppress(OSError, ValueError, RecursionError):
        data = read_regular(figures_path(entry), _MOST_FIGURES_BYTES)
        return _FIGURES.decode(data)
    return None


# Made here, not at the first use: msgspec builds the tables of a type without a lock.
_ENGINE_ENTRY = msgspec.json.Decoder(_EngineEntry)
_LIVE_SERVER = msgspec.json.Decoder(LiveServer)
_FIGURES = msgspec.json.Decoder(Figures)
