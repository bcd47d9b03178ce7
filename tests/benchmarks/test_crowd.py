"""The crowd's measurement, once on small inputs, with a real server."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.crowd import measure


@pytest.mark.linux("reads /proc")
def test_both_sides_stream_the_same_answers(demo_home: Path) -> None:
    options = argparse.Namespace(
        shape="demo", share="100%", threads=1, streams=2, idle=20, watchers=2, rounds=2, tasks=4,
        tokens=48,
    )  # fmt: skip
    found = measure(demo_home, "demo:bf16", options)
    assert found["tokens_of_a_side"] > 2 * 4
    assert found["looks_per_watcher_and_s"] > 0
    for name in ("tokens_per_s", "cpu_ms_per_token"):
        least, most = found[name]["range"]
        assert 0 < least <= found[name]["ratio"] <= most
        middle = found[name]["in_the_crowd"] / found[name]["alone"]
        assert found[name]["ratio"] == pytest.approx(middle, rel=0.5)
