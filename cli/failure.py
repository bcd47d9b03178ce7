"""How an error is told: its words on stderr or as JSON, and the traceback of a bug in the log.

Does not know which command failed.
"""

from __future__ import annotations

from moeinf.cli.errors import INTERNAL, describe
from moeinf.cli.output import Output, OutputFailed
from moeinf.runtime.config import read_environment
from moeinf.runtime.crash_log import note_bug
from moeinf.runtime.invalid import InvalidValue


def tell(out: Output, error: BaseException) -> int:
    """Print what happened and what to type next, and return the exit code."""
    words = describe(error)
    hint = words.hint
    if isinstance(error, OutputFailed):
        out, hint = Output(), ""  # one line on stderr: nothing reaches stdout
    if words.code == INTERNAL and (path := _log(error)) is not None:
        hint = f"{hint[:-1]}, and so does {path}."
    out.error(words.code, words.message, hint)
    return words.exit_code


def _log(error: BaseException) -> str | None:
    """Write the traceback to the log, and return the log's path if that succeeded."""
    try:
        path = note_bug(read_environment(), error)
    except InvalidValue:  # an environment that cannot be read
        return None
    return None if path is None else str(path)
