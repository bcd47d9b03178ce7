"""The cost of a token for growing sizes, on thin shapes: each curve has its sizes and a plot."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import scaling
from benchmarks.suite.models import THIN


@pytest.fixture(autouse=True)
def thin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "MIDDLE", {k: v for k, v in THIN.items() if "layers" not in k})
    monkeypatch.setattr(scaling, "LAYERS", (1, 2))
    monkeypatch.setattr(scaling, "EXPERTS", (8, 16))
    monkeypatch.setattr(scaling, "LENGTHS", (16, 512))
    monkeypatch.setattr(scaling, "ENTRIES", (1, 200))
    monkeypatch.setattr(scaling, "SHARES", (30, 100))


@pytest.mark.full
def test_every_curve(tmp_path: Path) -> None:
    options = argparse.Namespace(rounds=1, slice=4, threads=1)
    found = {name: curve(tmp_path, options) for name, curve in scaling.CURVES.items()}
    sizes = {name: list(curve) for name, curve in found.items()}
    assert sizes == {
        "context": [16, 512],
        "layers": [1, 2],
        "experts": [8, 16],
        "eamc": [1, 200],
        "budget": [30, 100],
    }
    for name in ("context", "layers", "experts", "budget"):
        for point in found[name].values():
            assert point["ms"] > 0
            assert point["floor_ms"] > 0
    assert found["eamc"][200]["matching_us"] > 0
    assert found["budget"][30]["bytes_per_token"] > 0
    assert found["budget"][100]["hit_rate"] > found["budget"][30]["hit_rate"]
    curves = {name: {str(n): point for n, point in c.items()} for name, c in found.items()}
    lines = scaling.table(curves).splitlines()
    assert len(lines) == 2 + 10
    assert len({line.count("|") for line in lines}) == 1
    scaling.draw(curves, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 5_000
