"""Recognise what the system or `ulimit` refuses: memory, threads and processes.

Python, torch and C++ raise a builtin's error for it, some with nothing but a text.
"""

from __future__ import annotations

import errno
from types import ModuleType

resource: ModuleType | None
try:
    import resource
except ImportError:  # Windows
    resource = None

_MEMORY = (
    "cannot allocate memory",
    "can't allocate memory",  # torch
    "failed to map segment",  # a library of C++ that is loaded
    "std::bad_alloc",
    "not enough memory",
)
_THREADS = ("can't start new thread", "resource temporarily unavailable")


def lacks_memory(error: BaseException) -> bool:
    """Return True for an error that means: no memory is left, or no address space."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or _says(error, _MEMORY)


def lacks_threads(error: BaseException) -> bool:
    """Return True for an error that means: the user may start no more threads or processes."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.EAGAIN and error.filename is None
    return _says(error, _THREADS)


def memory_limit() -> str:
    """Return words about the limit of `ulimit -v`; empty without one."""
    limit = _limit("RLIMIT_AS")
    return "" if limit is None else f" (`ulimit -v` permits {limit >> 20} MiB)"


def thread_limit() -> str:
    """Return words about the limit of `ulimit -u`; empty without one."""
    limit = _limit("RLIMIT_NPROC")
    return "" if limit is None else f" (`ulimit -u` permits {limit} in all)"


def _says(error: BaseException, texts: tuple[str, ...]) -> bool:
    if not isinstance(error, (RuntimeError, ImportError, OSError)):
        return False
    words = str(error).lower()
    return any(text in words for text in texts)


def _limit(name: str) -> int | None:
    number = getattr(resource, name, None)
    if resource is None or number is None:
        return None
    limit: int = resource.getrlimit(number)[0]
    return None if limit in (resource.RLIM_INFINITY, -1) else limit
