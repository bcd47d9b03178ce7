"""Who is running: every live engine has a locked file in $MOEINF_HOME/run.

Does not know what an engine does. A file whose lock can be taken belongs to a process that has
died; whoever notices removes it. What an engine holds lies beside it, in a `.figures` file that a
thread of the engine replaces once a second while it changes: a token costs nothing.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

_FIGURES_EVERY_S = 1.0


class NotStopped(RuntimeError):
    """An engine was asked to end and has not done so in time."""

    def __init__(self, pid: int, seconds: float) -> None:
        super().__init__(f"process {pid} was asked to end and is still there after {seconds:.0f} s")
        self.pid = pid


@dataclass(frozen=True)
class Figures:
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


class Registration:
    """An engine's entry; it lasts until `close`, or until the process ends in whatever way."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._closed = threading.Event()
        self._publisher: threading.Thread | None = None

    def publish(self, figures: Callable[[], Figures]) -> None:
        """Writes what `figures` says now, and once a second when it has changed.

        `figures` is called by a thread of ours. Figures that cannot be written are just not there.
        """
        self._write(figures())
        self._publisher = threading.Thread(target=self._keep, args=(figures,), daemon=True)
        self._publisher.start()

    def _keep(self, figures: Callable[[], Figures]) -> None:
        before = None
        while not self._closed.wait(_FIGURES_EVERY_S):
            now = figures()
            if now != before:
                self._write(now)
                before = now

    def _write(self, figures: Figures) -> None:
        target = _figures_path(self._path)
        partial = target.with_suffix(".partial")
        with suppress(OSError):
            partial.write_text(json.dumps(asdict(figures)))
            partial.replace(target)

    def close(self) -> None:
        if self._descriptor >= 0:
            self._closed.set()
            if self._publisher is not None:
                self._publisher.join()
            _figures_path(self._path).unlink(missing_ok=True)
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


class Registry:
    """The folder $MOEINF_HOME/run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def register(self, model: str, peak_bytes: Callable[[int], int | None]) -> Registration | None:
        """Enters this process, in one step with what that depends on.

        peak_bytes is asked with the bytes that all others have been promised and do not hold yet,
        and answers what this process will hold, or None when the model has gone meanwhile.
        """
        with self._locked():
            peak = peak_bytes(sum(engine.unfilled_bytes() for engine in self._engines()))
            if peak is None:
                return None
            path = self._folder / f"{os.getpid()}-{secrets.token_hex(4)}.json"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            registration = Registration(path, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                entry = LiveEngine(os.getpid(), model, peak, _started_ticks(os.getpid()))
                about = {k: v for k, v in asdict(entry).items() if k != "figures"}
                os.write(descriptor, json.dumps(about).encode())
            except BaseException:
                registration.close()
                raise
            return registration

    def engines(self) -> list[LiveEngine]:
        """Every live engine, this process's own included; none where nobody may write."""
        try:
            with self._locked():
                return self._engines()
        except OSError as error:
            if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
                return []
            raise

    @contextmanager
    def frozen(self) -> Iterator[list[LiveEngine]]:
        """The live engines, and the certainty that none appears before this ends."""
        with self._locked():
            yield self._engines()

    def stop(self, model: str, patience_s: float = 10.0) -> list[int]:
        """Asks every engine of `model` to end (SIGTERM) and waits for it; the processes' numbers.

        A number that the system has given to another process meanwhile is not signalled: the
        process is opened first, and only then is asked whether the entry's lock is still held and
        whether the process is as old as the entry says. Raises NotStopped.
        """
        with ExitStack() as opened:
            asked = []
            with self._locked():
                for engine in self._engines():
                    if engine.model != model:
                        continue
                    with suppress(ProcessLookupError):
                        process = os.pidfd_open(engine.pid)
                        opened.callback(os.close, process)
                        if _started_ticks(engine.pid) == engine.started_ticks:
                            asked.append((engine.pid, process))
                still = {engine.pid for engine in self._engines()}
                asked = [(pid, process) for pid, process in asked if pid in still]
                for _, process in asked:
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(process, signal.SIGTERM)
            for pid, process in asked:
                if not select.select([process], [], [], patience_s)[0]:  # readable once it is dead
                    raise NotStopped(pid, patience_s)
        return [pid for pid, _ in asked]

    def _engines(self) -> list[LiveEngine]:
        found = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)  # its process has died
                _figures_path(path).unlink(missing_ok=True)
            except BlockingIOError:
                with suppress(ValueError, TypeError):
                    about = json.loads(os.read(descriptor, 65536))
                    found.append(LiveEngine(**about, figures=_read_figures(path)))
            finally:
                os.close(descriptor)
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


def _figures_path(entry: Path) -> Path:
    return entry.with_suffix(".figures")


def _read_figures(entry: Path) -> Figures | None:
    with suppress(OSError, ValueError, TypeError):
        return Figures(**json.loads(_figures_path(entry).read_text()))
    return None


def _started_ticks(pid: int) -> int:
    """When a process began, in clock ticks since the machine's start; 0 where nobody says."""
    with suppress(OSError, ValueError, IndexError):
        about = Path(f"/proc/{pid}/stat").read_text()
        return int(about.rpartition(")")[2].split()[19])  # field 22; 2 is a name in parentheses
    return 0
