"""Tell a panic of a native library like any other error.

Does not know which library. A panic of Rust is a BaseException, which passes `except Exception`.
"""

from __future__ import annotations


class Panic(RuntimeError):
    """A native library has panicked. This is a bug; the panic itself is the cause."""


def as_exception(error: BaseException) -> Exception:
    """Return what can be told to a client: the error itself, or a Panic that it has caused."""
    if isinstance(error, Exception):
        return error
    panic = Panic(f"{type(error).__name__}: {error}")
    panic.__cause__ = error
    return panic.with_traceback(error.__traceback__)
