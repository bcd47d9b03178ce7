"""Remember how fast a model decodes and reads prompts: state/<name>/<tag>/speeds.json of the home.

    { "<slots>":         { "tokens_per_s", "measured_at" },
      "<slots> prefill": { "tokens_per_s", "measured_at", "tokens": of the prompt } }

Only the last measurement of each cache size is kept.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from moeinf.runtime.config import Settings
from moeinf.runtime.files.state import entry_of, read_entries, write_entries
from moeinf.runtime.names import ModelName

_LEAST_STEPS = 16  # fewer decoded tokens give no useful figure
_LEAST_PROMPT = 64  # tokens; a shorter prompt says little about a long one
_MOST_ENTRIES = 32
_ALIKE = 0.05  # cache sizes that differ by less than this share have about the same speed
_PREFILL = " prefill"
_MOST_DIGITS = 15


class _Speed(Struct):
    tokens_per_s: Annotated[float, Meta(gt=0)]
    measured_at: str
    tokens: int = 0


@dataclass(frozen=True)
class MeasuredSpeed:
    """A measured speed. slots: of that run. tokens: the length of the prompt, for a prefill."""

    tokens_per_s: float
    measured_at: str
    slots: int
    tokens: int = 0


def remember_speed(
    settings: Settings, model: ModelName, slots: int, steps: int, seconds: float
) -> None:
    """Store tokens per second of decoding with `slots` slots. A failure to write is ignored."""
    if steps >= _LEAST_STEPS and seconds > 0:
        _remember(settings, model, str(slots), _Speed(round(steps / seconds, 3), _now()))


def remember_prefill(
    settings: Settings, model: ModelName, slots: int, tokens: int, seconds: float
) -> None:
    """Store tokens per second of reading a prompt of `tokens` tokens, as `remember_speed` does."""
    if tokens >= _LEAST_PROMPT and seconds > 0:
        speed = _Speed(round(tokens / seconds, 3), _now(), tokens)
        _remember(settings, model, f"{slots}{_PREFILL}", speed)


def remembered_speed(settings: Settings, model: ModelName, slots: int) -> MeasuredSpeed | None:
    """Return the measured speed of decoding with about `slots` slots, the nearest; or None."""
    return _nearest(settings, model, slots, "")


def remembered_prefill(settings: Settings, model: ModelName, slots: int) -> MeasuredSpeed | None:
    """Return the measured speed of a prefill with about `slots` slots, the nearest; or None."""
    return _nearest(settings, model, slots, _PREFILL)


def _remember(settings: Settings, model: ModelName, key: str, speed: _Speed) -> None:
    path = _path(settings, model)
    speeds = read_entries(path)
    speeds.pop(key, None)
    speeds[key] = speed
    write_entries(path, dict(list(speeds.items())[-_MOST_ENTRIES:]))


def _nearest(settings: Settings, model: ModelName, slots: int, suffix: str) -> MeasuredSpeed | None:
    entries = read_entries(_path(settings, model))
    names = (key.removesuffix(suffix) for key in entries if key.endswith(suffix))
    counts = [int(n) for n in names if n.isascii() and n.isdigit() and len(n) <= _MOST_DIGITS]
    for count in sorted(counts, key=lambda count: abs(count - slots)):
        if abs(count - slots) > _ALIKE * slots:
            break
        found = entry_of(entries, f"{count}{suffix}", _SPEED)
        if found is not None:
            return MeasuredSpeed(found.tokens_per_s, found.measured_at, count, found.tokens)
    return None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _path(settings: Settings, model: ModelName) -> Path:
    return settings.state_of(model) / "speeds.json"


# Made here, not at the first use: msgspec builds the tables of a type without a lock.
_SPEED = msgspec.json.Decoder(_Speed)
