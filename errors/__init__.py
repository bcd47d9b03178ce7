"""The root and the branches of the one tree of errors, and the builtin exceptions that join it.

    MoeinfError
    ├── InvalidInput     wrong usage: a value, an option, a field   exit 2, HTTP 400
    ├── UnusableInput    a file, a text or a model cannot be used   exit 1, HTTP 400
    │   └── ContextExceeded
    ├── NotFound         nothing has the name that was given        exit 1, HTTP 404
    ├── Conflict         another process or model is in the way     exit 1, HTTP 409
    ├── Unavailable      memory, a device or a server is missing    exit 1, HTTP 503
    │   ├── OutOfMemory, OutOfThreads
    └── Failure          a read, a computation or this program      exit 1, HTTP 500

A leaf is defined next to the code that raises it. docs/errors.md lists all of them. This package
imports no other of moeinf. cli/errors.py and server/api/answers.py show the errors.
"""

from __future__ import annotations

import errno
import os
import re
from traceback import format_tb
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
_MOST_CHARACTERS = 4000  # of an error's text
_THREADS = ("can't start new thread", "resource temporarily unavailable")


class MoeinfError(Exception):
    """An error that is shown to the user. Its text says what happened, its attributes what to do.

    A long text is cut: a file or a client may have written it.

    code: stable, for scripts and tests. hint: completes "Try: …"; an instance may set its own.
    serve_hint: an action for the operator of a server, shown in its answers.
    """

    code: str = ""
    hint: str = ""
    serve_hint: str = ""
    exit_code: int = 1
    http_status: int = 500

    def __init__(self, *given: object) -> None:
        super().__init__(*(_cut(part) if isinstance(part, str) else part for part in given))


def _cut(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[: _MOST_CHARACTERS - 200]} … {text[-200:]}"


class InvalidInput(MoeinfError):
    """A value on the command line, in the environment or in a request is invalid."""

    exit_code, http_status = 2, 400
    hint = "`moeinf COMMAND --help`"


class UnusableInput(MoeinfError):
    """A file, a text or a model was found and cannot be used."""

    http_status = 400


class ContextExceeded(UnusableInput, ValueError):
    """A text has more tokens than the context takes."""


class NotFound(MoeinfError):
    """Nothing has the name that was given."""

    http_status = 404


class Conflict(MoeinfError):
    """Another process or model is in the way."""

    http_status = 409


class Unavailable(MoeinfError):
    """Memory, a device or a server is missing or busy."""

    http_status = 503


class Failure(MoeinfError):
    """A read, a write or a computation failed."""


class InternalError(Failure):
    """An unexpected exception: a bug in moeinf."""

    code = "internal"
    hint = "MOEINF_DEBUG=1, which shows where it happened"


class OutOfMemory(Unavailable, MemoryError):
    """The system has no memory left."""

    code = "out_of_memory"
    hint = "less --memory, or a smaller --ctx"


class OutOfThreads(Unavailable):
    """The system starts no more threads or processes for this user."""

    code = "out_of_threads"
    hint = "the same command after you end other programs"


class FileError(Failure, OSError):
    """The operating system cannot read or write a file."""

    code = "io_error"
    hint = "MOEINF_DEBUG=1, which shows where it happened"


class DiskFull(FileError):
    """A file cannot be written: its disk is full."""

    code = "disk_full"
    hint = "the same command after you free some disk space"


class DeviceError(Unavailable, RuntimeError):
    """A CUDA driver call failed, or work that was queued before it. Raised by native."""

    code = "device_failed"
    hint = "--device cpu"
    serve_hint = (
        "if this persists, restart `moeinf serve`: a process cannot use a GPU after a fault"
    )
    name: str  # the driver's own: CUDA_ERROR_ILLEGAL_ADDRESS
    call: str  # cuMemcpyHtoDAsync


class OutOfDeviceMemory(DeviceError):
    """CUDA_ERROR_OUT_OF_MEMORY, for device or page-locked memory. Raised by native."""

    code = "out_of_device_memory"
    hint = "less --device-memory, --device cpu, or the same command after you free device memory"
    serve_hint = "give `moeinf serve` less --device-memory, or free device memory"


def as_moeinf(error: BaseException) -> MoeinfError:
    """Return the error in the tree: itself, the match of a builtin, or InternalError."""
    if isinstance(error, MoeinfError):
        return error
    if lacks_memory(error):
        return _out_of_memory(error)
    if lacks_threads(error):
        return _out_of_threads()
    if isinstance(error, OSError):
        return _file_error(error)
    return InternalError(f"this is a bug in moeinf: {type(error).__name__}: {error}")


def _out_of_memory(error: BaseException) -> OutOfMemory:
    own = isinstance(error, MemoryError) and str(error) not in ("", "std::bad_alloc")
    found = OutOfMemory(f"not enough memory{memory_limit()}{f': {error}' if own else ''}")
    if memory_limit():
        found.hint = "`ulimit -v unlimited`, then the same command"
    return found


def _out_of_threads() -> OutOfThreads:
    found = OutOfThreads(f"the system starts no more threads or processes{thread_limit()}")
    if thread_limit():
        found.hint = "`ulimit -u 4096`, then the same command, or end other programs"
    return found


def forget_frames(error: BaseException) -> None:
    """Remove the tracebacks of an error and its causes; that of a bug becomes a note of its text.

    A traceback keeps the frames of all its callers, and with them what their variables hold. An
    error that is stored, or raised again, would keep the memory of an engine.
    """
    if error.__traceback__ is not None and isinstance(as_moeinf(error), InternalError):
        error.add_note("".join(("It was raised here:\n", *format_tb(error.__traceback__))))
    left, seen = [error], set[int]()
    while left:
        one = left.pop()
        seen.add(id(one))
        one.__traceback__ = None
        causes = (one.__cause__, one.__context__)
        left += [cause for cause in causes if cause is not None and id(cause) not in seen]


def reason(error: BaseException) -> str:
    """Return the message of a builtin's or a library's error, without the errno.

    An error of the system names its file first, then says in plain words what happened.
    """
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        words = problem(error)
        return f"{_shown(error.filename)}: {words}" if error.filename else words
    return re.sub(r"\[Errno -?\d+\] | \(os error \d+\)", "", str(error)) or type(error).__name__


def problem(error: OSError) -> str:
    """Return what the system says, in plain words and without the file's name."""
    number, words = error.errno, error.strerror
    if number is None or words != os.strerror(number):  # our own words, or a library's
        return words or reason(error)
    return _PROBLEMS.get(number, words[:1].lower() + words[1:])


_PROBLEMS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file is larger than the system permits",
    errno.EROFS: "the file system is read-only",
    errno.ENOENT: "no such file or folder",
    errno.ENOTDIR: "a part of the path is not a folder",
    errno.EISDIR: "it is a folder",
    errno.EIO: "the drive cannot read or write it",
}
_HINTS = {
    errno.EIO: "`dmesg`, which shows if the drive fails",
    errno.EMFILE: "`ulimit -n 4096`, then the same command",
    errno.ENOENT: "the same command with a path that exists",
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS),
        "another owner or mode of it, or another folder in MOEINF_HOME",
    ),
}
# A hidden folder in which a model is made, deleted or repaired; a message names its parent.
_WORKPLACE = re.compile(r"/\.[^/]+\.(?:partial|old|repair)(?:/.*+)?$", re.DOTALL)


def _shown(path: object) -> str:
    return _WORKPLACE.sub("", os.fsdecode(path) if isinstance(path, bytes) else str(path))


def _file_error(error: OSError) -> FileError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(reason(error))
    found = FileError(reason(error))
    found.hint = _HINTS.get(error.errno or 0, FileError.hint)
    return found


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
