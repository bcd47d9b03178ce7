"""Remembers how fast a model has answered here: $MOEINF_HOME/state/<name>/<tag>/speeds.json.

Does not know plans or engines. Only the last measurement of each cache size is kept.
"""

from __future__ import annotations

import datetime
import json
from contextlib import suppress
from pathlib import Path

from moeinf.runtime.atomic_files import write_text_durably
from moeinf.runtime.config import Settings
from moeinf.runtime.names import ModelName
from moeinf.runtime.regular_files import read_regular

_LEAST_STEPS = 16  # fewer decoded tokens say little
_MOST_ENTRIES = 32


def remember_speed(
    settings: Settings, model: ModelName, slots: int, steps: int, seconds: float
) -> None:
    """Notes tokens per second of decoding with `slots` slots; a failure to write is no failure."""
    if steps < _LEAST_STEPS or seconds <= 0:
        return
    path = _path(settings, model)
    speeds = _read(path)
    speeds.pop(str(slots), None)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    speeds[str(slots)] = {"tokens_per_s": round(steps / seconds, 3), "measured_at": now}
    kept = dict(list(speeds.items())[-_MOST_ENTRIES:])
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_text_durably(path, json.dumps(kept, indent=1), mode=0o600)


def remembered_speed(settings: Settings, model: ModelName, slots: int) -> tuple[float, str] | None:
    """(tokens per second, when it was measured) for exactly this many slots, if there is one."""
    entry = _read(_path(settings, model)).get(str(slots))
    with suppress(KeyError, TypeError, ValueError):
        return (float(str(entry["tokens_per_s"])), str(entry["measured_at"])) if entry else None
    return None


def _read(path: Path) -> dict[str, dict[str, object]]:
    with suppress(OSError, ValueError):
        found = json.loads(read_regular(path))
        if isinstance(found, dict):
            return found
    return {}


def _path(settings: Settings, model: ModelName) -> Path:
    return settings.state_of(model) / "speeds.json"
