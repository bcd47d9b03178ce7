"""Show an error of the command line: as text, or as a JSON document.

The traceback of a bug goes to the log.
"""

from __future__ import annotations

from moeinf.cli.output import Output, OutputFailed
from moeinf.errors import InternalError, InvalidInput, as_moeinf
from moeinf.runtime.config import read_environment
from moeinf.runtime.crash_log import note_bug
from moeinf.runtime.invalid import InvalidValue


class Usage(InvalidInput, ValueError):
    """The command line combines options or arguments in an invalid way."""

    code = "usage"
    hint = "`moeinf --help`"


def tell(out: Output, error: BaseException) -> int:
    """Print what happened and what to type next, and return the exit code."""
    told = as_moeinf(error)
    hint = told.hint
    if isinstance(told, OutputFailed):
        out, hint = Output(), ""  # one line on stderr: nothing reaches stdout
    if isinstance(told, InternalError) and (path := _log(error)) is not None:
        hint = f"{hint}, as {path} does"
    out.error(told.code, str(told), hint)
    return told.exit_code


def _log(error: BaseException) -> str | None:
    """Write the traceback to the log, and return the log's path if that succeeded."""
    try:
        path = note_bug(read_environment(), error)
    except InvalidValue:  # the environment cannot be read
        return None
    return None if path is None else str(path)
