"""Measured speeds are found again for about the same memory, and for no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeinf.runtime.config import Settings
from moeinf.runtime.names import ModelName
from moeinf.runtime.placement.decode_speed import (
    remember_prefill,
    remember_speed,
    remembered_prefill,
    remembered_speed,
)

MODEL = ModelName("demo", "bf16")


@pytest.mark.parametrize(
    ("slots", "found"), [(100, 100), (102, 100), (103, 105), (95, None), (110, 105), (111, None)]
)
def test_the_nearest_cache_size_within_five_percent(
    tmp_path: Path, slots: int, found: int | None
) -> None:
    settings = Settings(tmp_path)
    remember_speed(settings, MODEL, 100, 100, 4.0)
    remember_speed(settings, MODEL, 105, 100, 2.0)
    seen = remembered_speed(settings, MODEL, slots)
    assert (None if seen is None else seen.slots) == found


def test_a_prefill_is_remembered_beside_decoding(tmp_path: Path) -> None:
    settings = Settings(tmp_path)
    remember_speed(settings, MODEL, 8, 100, 4.0)
    remember_prefill(settings, MODEL, 8, 63, 1.0)  # too short
    assert remembered_prefill(settings, MODEL, 8) is None
    remember_prefill(settings, MODEL, 8, 128, 2.0)
    seen, decoded = remembered_prefill(settings, MODEL, 8), remembered_speed(settings, MODEL, 8)
    assert seen is not None
    assert decoded is not None
    assert (seen.tokens_per_s, seen.tokens) == (64.0, 128)
    assert (decoded.tokens_per_s, decoded.tokens) == (25.0, 0)


def test_absurd_entries_are_not_speeds(tmp_path: Path) -> None:
    settings = Settings(tmp_path)
    remember_speed(settings, MODEL, 8, 100, 4.0)
    (path,) = tmp_path.rglob("speeds.json")
    entry = json.loads(path.read_text())["8"]
    absurd = {"8": {**entry, "tokens_per_s": 0}, "9" * 5000: entry, "²": entry, "-8": entry}
    path.write_text(json.dumps(absurd))
    assert remembered_speed(settings, MODEL, 8) is None
