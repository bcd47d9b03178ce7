"""Test that a server remembers how fast it answered, for `moeinf plan`."""

from __future__ import annotations

from pathlib import Path

import httpx

from moeinf.runtime.config import Settings
from moeinf.runtime.names import parse_name
from moeinf.runtime.placement.decode_speed import remembered_speed
from tests.server.conftest import serving

SLOTS = 192  # all experts of the demo


def test_the_first_answer_is_remembered(tmp_path: Path, demo_home: Path) -> None:
    (tmp_path / "models").symlink_to(demo_home / "models")
    model, settings = parse_name("demo:bf16"), Settings(tmp_path)
    with serving(tmp_path, trace=True) as address:
        asked = {"model": "demo", "prompt": "4091 in words", "stream": False}
        options = {"temperature": 0}
        done = httpx.post(
            f"{address}/api/generate", json={**asked, "options": options}, timeout=60
        ).json()
    seen = remembered_speed(settings, model, SLOTS)
    assert seen is not None
    assert seen.slots == SLOTS
    assert done["eval_count"] > 16
    own = (done["eval_count"] - 1) / done["eval_duration"] * 1e9
    assert abs(seen.tokens_per_s - own) < 0.002
