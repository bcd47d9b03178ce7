"""The GPU benchmark on the fake libcuda: that it works and cleans up; no figure means anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu as benchmark
from benchmarks.gpu import ROWS
from benchmarks.shapes import shape, tensors_of
from moeinf.runtime import gpu as gpus
from tests.fake_device import FakeDevice
from tests.native.fake_cuda import Fake

_TINY = {
    "deepseek-v2-lite-q4-2GiB": {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
        "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 512,
        "n_routed_experts": 8, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16, "v_head_dim": 16,
    },
    "mixtral-8x7b-q4-8GiB": {
        "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 512, "head_dim": 32,
    },
}  # fmt: skip


@pytest.mark.parametrize("row", sorted(_TINY))
def test_a_row(
    row: str,
    fake: Fake,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    new_to_gpus: None,
) -> None:
    fake.reset("mode=deferred,seed=3,memory=2000000000,context=314572800,nvml=processes")
    monkeypatch.setattr(gpus, "missing_for_kernels", lambda: None)  # and, afterwards, undone
    monkeypatch.setattr(gpus, "torch_device", lambda: FakeDevice(fake))
    disk = tmp_path / "disk"
    disk.mkdir()
    tiny = ["--layers", "3", "--config", json.dumps(_TINY[row]), "--prompt", "20", "--tokens", "4"]
    where = ["--disk", str(disk), "--device-memory", "664MiB", "--fake", fake.path]
    benchmark.main([row, *tiny, *where, "--miss", "compute"])
    found = json.loads(capsys.readouterr().out)
    assert (found["row"], found["gpu"]) == (row, "Fake GPU")
    assert 0 < found["device_hit_rate"] <= 1
    assert found["device_hit_rate"] + found["cpu_share"] == pytest.approx(1, abs=1e-3)
    assert found["tpot_ms"] > 0 < found["floor_ms"]
    assert found["over_floor"] > 1
    assert found["dense_weights_on"] == "device"
    assert 300 << 20 < found["device_held_bytes"] <= found["device_promised_bytes"] <= 664 << 20
    assert found["device_held_is_measured"]
    assert list(disk.iterdir()) == []


def test_rows_are_the_papers_setting_and_smaller_ones(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.main([])
    listed = capsys.readouterr().out.split()
    assert listed == list(ROWS)
    assert listed[0] == "deepseek-v2-lite-bf16-24GiB"
    weights = sum(rows * columns for name, (rows, columns) in (
        (name, sides) for name, sides in tensors_of(shape("mixtral-8x7b")) if len(sides) == 2
    ))  # fmt: skip
    assert weights == pytest.approx(46.7e9, rel=0.01)  # parameters, as published
