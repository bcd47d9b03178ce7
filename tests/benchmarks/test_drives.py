"""The benchmark of two drives, once on a tiny model, from its options to its report."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import drives
from tests.benchmarks.tiny_shapes import tiny_olmoe

_TINY = tiny_olmoe(2)


def test_both_engines_decode_the_same_and_one_reads_both_drives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    second = tmp_path / "second"
    second.mkdir()
    monkeypatch.setattr(drives, "shape", lambda *_: _TINY)
    options = ["olmoe", "--cache", str(tmp_path / "cache"), "--second", str(second)]
    options += ["--tag", "bf16", "--policy", "lru", "--tokens", "12", "--every", "4"]
    monkeypatch.setattr(sys, "argv", ["drives", *options])
    drives.main()
    found = json.loads(capsys.readouterr().out)
    one, two = found["one"], found["two"]
    assert 0 < one["hit_rate"] < 1
    assert (two["hit_rate"], two["mb_per_token"]) == (one["hit_rate"], one["mb_per_token"])
    assert one["mb_per_token"] > 0
    ratio = one["ms_per_token"] / two["ms_per_token"]
    assert found["times_as_fast"] == pytest.approx(ratio, abs=0.01)
    shards = list((second / "shards").rglob("*.safetensors"))
    assert len(shards) == 64  # of 2 layers of 64 experts
