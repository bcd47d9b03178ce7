"""Append the tracebacks of our own bugs to $MOEINF_HOME/logs/moeinf.log, mode 0600.

A log larger than _MOST_BYTES is renamed to moeinf.log.1, which replaces the previous one.
"""

from __future__ import annotations

import datetime
import os
import traceback
from pathlib import Path

from moeinf.runtime.config import Settings
from moeinf.runtime.files.regular import open_regular
from moeinf.runtime.visible import visible

_MOST_BYTES = 1 << 20


def note_bug(settings: Settings, error: BaseException) -> Path | None:
    """Append the traceback of `error`; return the log file, or None when it cannot be written."""
    text = visible("".join(traceback.format_exception(error)))
    if error.__traceback__ is None:  # see errors.forget_frames
        text = f"Traceback, in the note below:\n{text}"
    path = settings.logs / "moeinf.log"
    try:
        for folder in (settings.home, settings.logs):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.exists() and path.stat().st_size > _MOST_BYTES:
            path.replace(path.with_name("moeinf.log.1"))
        descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as out:
            moment = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            out.write(f"{moment} process {os.getpid()}\n{text}\n")
    except OSError:
        return None
    return path
