"""Remember how fast a model decodes here: $MOEINF_HOME/state/<name>/<tag>/speeds.json.

Only the last measurement of each cache size is kept.
"""

from __future__ import annotations

import datetime
from pathlib import Path

from msgspec import Struct

from moeinf.runtime.config import Settings
from moeinf.runtime.names import ModelName
from moeinf.runtime.state_files import entry_of, read_entries, write_entries

_LEAST_STEPS = 16  # fewer decoded tokens give no useful figure
_MOST_ENTRIES = 32


class _Speed(Struct):
    tokens_per_s: float
    measured_at: str


def remember_speed(
    settings: Settings, model: ModelName, slots: int, steps: int, seconds: float
) -> None:
    """Store tokens per second of decoding with `slots` slots. A failure to write is ignored."""
    if steps < _LEAST_STEPS or seconds <= 0:
        return
    path = _path(settings, model)
    speeds = read_entries(path)
    speeds.pop(str(slots), None)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    speeds[str(slots)] = _Speed(round(steps / seconds, 3), now)
    write_entries(path, dict(list(speeds.items())[-_MOST_ENTRIES:]))


def remembered_speed(settings: Settings, model: ModelName, slots: int) -> tuple[float, str] | None:
    """Return (tokens per second, time of measurement) for exactly `slots` slots, or None."""
    found = entry_of(read_entries(_path(settings, model)), str(slots), _Speed)
    return None if found is None else (found.tokens_per_s, found.measured_at)


def _path(settings: Settings, model: ModelName) -> Path:
    return settings.state_of(model) / "speeds.json"
