"""Convert a panic of a native library into an ordinary exception.

A panic of Rust is a BaseException, which passes `except Exception`.
"""

from __future__ import annotations


class Panic(RuntimeError):
    """A native library has panicked. This is a bug; the cause is the panic itself."""


def as_exception(error: BaseException) -> Exception:
    """Return the error itself, or a Panic with the error as its cause if it is not an Exception."""
    if isinstance(error, Exception):
        return error
    panic = Panic(f"{type(error).__name__}: {error}")
    panic.__cause__ = error
    return panic.with_traceback(error.__traceback__)
