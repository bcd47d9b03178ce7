"""What is running: every live engine and every server has an entry in $MOEINF_HOME/run.

Does not know what an engine does. What it holds lies beside its entry, in a `.figures` file that a
thread of the engine replaces once a second while it changes: a token costs nothing.
"""

from __future__ import annotations

import errno
import fcntl
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
from moeinf.runtime.library.process_entries import Entry, figures_path, live_entries, started_ticks
from moeinf.runtime.regular_files import read_regular

_FIGURES_EVERY_S = 1.0
_MOST_FIGURES_BYTES = 65536
_ENGINE, _SERVER = ".json", ".server"  # ends of their entries
_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)


class NotStopped(Failure, RuntimeError):
    """An engine was asked to end and still runs."""

    code = "not_stopped"

    def __init__(self, pid: int, seconds: float) -> None:
        super().__init__(f"process {pid} was asked to end and is still there after {seconds:.0f} s")
        self.pid = pid
        self.hint = f"`kill -9 {pid}`"


class Figures(Struct, frozen=True, forbid_unknown_fields=True):
    """What an engine holds: experts and bytes per tier; hit_rate is None before it has decoded.

    device_peak_bytes: of a GPU's memory, the most that all of it takes.

    digest is that of its manifest, context what it can remember of a conversation, in tokens.
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
    device: str = "cpu"  # that computes experts
    expires_at: int | None = None  # seconds since the epoch, when a server unloads it unasked
    device_peak_bytes: int = 0


class _EngineEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """The file of a LiveEngine."""

    pid: int
    model: str
    peak_bytes: int
    started_ticks: int = 0


@dataclass(frozen=True)
class LiveEngine:
    """What an engine tells others. peak_bytes: the RSS of its process once everything is full.

    started_ticks tells its process from a later one of the same number, or of another namespace.
    """

    pid: int
    model: str
    peak_bytes: int
    started_ticks: int = field(default=0, compare=False)
    figures: Figures | None = field(default=None, compare=False)

    def unfilled_bytes(self) -> int:
        """Memory that it has been promised and does not hold yet."""
        with suppress(OSError, ValueError, IndexError):
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
            return max(0, self.peak_bytes - pages * os.sysconf("SC_PAGE_SIZE"))
        return self.peak_bytes


class LiveServer(Struct, frozen=True, forbid_unknown_fields=True):
    """What a server tells others. address: HOST:PORT that it listens at, HOST in digits."""

    pid: int
    address: str
    started_ticks: int = 0


class Registration:
    """An engine's entry; it lasts until `close`, or until the process ends in whatever way."""

    def __init__(self, entry: Entry | None) -> None:
        self._entry = entry
        self._closed = threading.Event()
        self._publisher: threading.Thread | None = None

    def publish(self, figures: Callable[[], Figures]) -> None:
        """Writes what `figures` says now, and once a second when it has changed.

        `figures` is called by a thread of ours. Figures that cannot be written are just not there.
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
        """Whether other processes see this engine: not in a home that cannot be written."""
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
            partial.write_bytes(msgspec.json.encode(figures))
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

    def register(self, model: str, peak_bytes: Callable[[int], int | None]) -> Registration | None:
        """Enters this process, in one step with what that depends on.

        peak_bytes is asked with the bytes that all others have been promised and do not hold yet,
        and answers what this process will hold, or None when the model has gone meanwhile. In a
        home that cannot be written nothing is entered: then the registration is not `seen`.
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
            about = _EngineEntry(os.getpid(), model, peak, started_ticks(os.getpid()))
            return Registration(Entry(self._folder, _ENGINE, about))

    def register_server(self, address: str) -> Entry:
        """Enter this process as the server that listens at `address`. Raises OSError."""
        about = LiveServer(os.getpid(), address, started_ticks(os.getpid()))
        with self._locked():
            return Entry(self._folder, _SERVER, about)

    def servers(self) -> list[LiveServer]:
        """Return every live server of this home; none where run/ cannot be written."""
        try:
            with self._locked():
                return self._servers()
        except OSError as error:
            if error.errno in _UNWRITABLE:
                return []
            raise

    def engines(self) -> list[LiveEngine]:
        """Every live engine, this process's own included; none where nobody may write."""
        try:
            with self._locked():
                return self._engines()
        except OSError as error:
            if error.errno in _UNWRITABLE:
                return []
            raise

    @contextmanager
    def frozen(self) -> Iterator[list[LiveEngine]]:
        """The live engines, and the certainty that none appears before this ends."""
        with self._locked():
            yield self._engines()

    def stop(self, model: str | None = None, patience_s: float = 15.0) -> list[int]:
        """Ask processes to end (SIGTERM) and wait for it; return their numbers.

        With a model, those that run it and are no servers: a server may run other models, too.
        Without, all of them. A number that the system has given to another process meanwhile is
        not signalled: the process is opened first, and only then is asked whether the entry's lock
        is still held and whether the process is as old as the entry says. Raises NotStopped.
        """
        with ExitStack() as opened:
            asked = []
            with self._locked():
                for pid, ticks in sorted(self._processes(model)):
                    with suppress(ProcessLookupError):
                        process = os.pidfd_open(pid)
                        opened.callback(os.close, process)
                        if started_ticks(pid) == ticks:
                            asked.append((pid, process))
                still = {pid for pid, _ in self._processes(model)}
                asked = [(pid, process) for pid, process in asked if pid in still]
                for _, process in asked:
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(process, signal.SIGTERM)
            for pid, process in asked:
                if not select.select([process], [], [], patience_s)[0]:  # readable once it is dead
                    raise NotStopped(pid, patience_s)
        return [pid for pid, _ in asked]

    def _processes(self, model: str | None) -> set[tuple[int, int]]:
        """Return (number, started_ticks) of the processes that `stop` is to end."""
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
                e = msgspec.json.decode(data, type=_EngineEntry)
                figures = _read_figures(path)
                found.append(LiveEngine(e.pid, e.model, e.peak_bytes, e.started_ticks, figures))
        return found

    def _servers(self) -> list[LiveServer]:
        found = []
        for _, data in live_entries(self._folder, _SERVER):
            with suppress(ValueError, RecursionError):
                found.append(msgspec.json.decode(data, type=LiveServer))
        return found

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _read_figures(entry: Path) -> Figures | None:
    with suppress(OSError, ValueError, RecursionError):
        data = read_regular(figures_path(entry), _MOST_FIGURES_BYTES)
        return msgspec.json.decode(data, type=Figures)
    return None
