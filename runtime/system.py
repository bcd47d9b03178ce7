"""Name what some systems lack: locks of files, limits of processes, flags of open().

Linux has all of it. macOS has no handle of a process (pidfd). Windows has nothing of it: moeinf
lists and plans there. Whatever would change files or run a model raises Unsupported.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from types import ModuleType

from moeinf.errors import Unavailable

fcntl: ModuleType | None
resource: ModuleType | None
try:
    import fcntl
    import resource
except ImportError:  # Windows
    fcntl = resource = None

_MOST_DESCRIPTORS = 1 << 16  # some programs look at every possible one
_OTHER_DESCRIPTORS = 1024  # where the system does not tell
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # for FIFOs, which Windows has not


class Unsupported(Unavailable):
    """This system lacks something that a command needs."""

    code = "unsupported_system"
    hint = "the same command on Linux"


def raise_descriptor_limit() -> int:
    """Raise this process's limit of descriptors as far as the system permits; return it."""
    if resource is None:
        return _OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if 0 <= soft < most:
        with suppress(OSError, ValueError):  # macOS has a limit below an infinite one
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            return most
    return int(soft) if soft >= 0 else _MOST_DESCRIPTORS


def lock(descriptor: int, *, wait: bool = True) -> None:
    """Lock an open file for this process alone, until it is closed.

    Raises BlockingIOError without `wait` if another process has locked it, and Unsupported.
    """
    check_locks()
    assert fcntl is not None
    fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def has_locks() -> bool:
    """Return True where processes can lock files against each other."""
    return fcntl is not None


def check_locks() -> None:
    """Raise Unsupported where files cannot be locked; call it before a file is created."""
    if fcntl is None:
        raise Unsupported(f"this needs file locks, which moeinf lacks on {sys.platform}")


def open_folder(folder: os.PathLike[str]) -> int:
    """Return a descriptor of a folder, to sync or lock it. Raises OSError, Unsupported."""
    check_locks()
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)


def drop_cached(descriptor: int) -> bool:
    """Drop a file's clean pages from the page cache; return False on a system that cannot."""
    if not hasattr(os, "posix_fadvise"):
        return False
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def read_at(descriptor: int, into: memoryview | bytearray, offset: int) -> int:
    """Read into a buffer from `offset`; return the number of bytes. Raises OSError, Unsupported."""
    if not hasattr(os, "preadv"):
        raise Unsupported(f"moeinf cannot read parts of files on {sys.platform}")
    return os.preadv(descriptor, [into], offset)


def check_limits() -> None:
    """Raise Unsupported where a child process cannot be given little memory."""
    if resource is None:
        raise Unsupported(f"untrusted files cannot be read safely by moeinf on {sys.platform}")


def open_process(pid: int) -> int:
    """Return a handle of a process, which a later process with the same pid does not have.

    Raises ProcessLookupError, OSError, Unsupported.
    """
    if not hasattr(os, "pidfd_open"):
        raise Unsupported(f"this command needs handles of processes, which {sys.platform} lacks")
    return os.pidfd_open(pid)


def physical_bytes() -> int:
    """Return the machine's physical memory in bytes."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kib = ctypes.c_ulonglong()
    windows = ctypes.windll  # type: ignore[attr-defined]
    if not windows.kernel32.GetPhysicallyInstalledSystemMemory(ctypes.byref(kib)):
        raise Unsupported("the size of this machine's memory is unknown")
    return kib.value * 1024


def peak_rss_bytes() -> int:
    """Return this process's peak resident bytes; 0 where the system does not count them."""
    if resource is None:
        return 0
    peak: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
