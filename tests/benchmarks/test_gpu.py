"""The GPU benchmark on the fake libcuda: that it works and cleans up; no figure means anything."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import gpu as benchmark
from benchmarks import gpu_floor
from benchmarks.ending import Stages
from benchmarks.gpu import ROWS
from benchmarks.shapes import shape, tensors_of
from moeinf.models.moe import TorchMath
from moeinf.native import DeviceContext
from moeinf.offload.layout import ExpertLayout
from moeinf.offload.split import Contended
from moeinf.runtime import gpu as gpus
from moeinf.runtime.bus import measure_contended
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
    held: list[int] = []  # of the device, when its speeds are measured

    def contended(context: DeviceContext, layout: ExpertLayout, math: TorchMath) -> Contended:
        held.append(fake.count("allocated"))
        return measure_contended(context, layout, math)

    monkeypatch.setattr(gpu_floor, "measure_contended", contended)
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
    parts = found["floor_parts_ms"]
    assert found["floor_ms"] == pytest.approx(parts["dense"] + parts["experts"], abs=2e-4)
    assert parts["experts"] >= parts["experts_of_device"] > 0 == parts["disk"]
    assert held == [0]
    assert {"weights", "speeds", "second answer"} < set(found["seconds"])
    assert found["dense_weights_on"] == "device"
    assert 300 << 20 < found["device_held_bytes"] <= found["device_promised_bytes"] <= 664 << 20
    assert found["device_held_is_measured"]
    assert list(disk.iterdir()) == []


def test_a_row_without_time_says_what_it_was_at(
    fake: Fake,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    new_to_gpus: None,
) -> None:
    fake.reset("mode=eager,memory=2000000000")
    monkeypatch.setattr(gpus, "missing_for_kernels", lambda: None)
    monkeypatch.setattr(gpus, "torch_device", lambda: FakeDevice(fake))
    row = "deepseek-v2-lite-q4-2GiB"
    with pytest.raises(SystemExit) as ended:
        benchmark.main([row, "--disk", str(tmp_path), "--fake", fake.path, "--limit", "1.5"])
    assert ended.value.code == 1
    found = json.loads(capsys.readouterr().out)
    assert found["unfinished"] == "no time left after 1.5 s, at: noise and embedding"
    assert found["seconds"]["noise and embedding"] > 0
    assert list(tmp_path.iterdir()) == []


def test_no_gpu_is_said_before_anything_is_made(tmp_path: Path, new_to_gpus: None) -> None:
    asked = SimpleNamespace(row="deepseek-v2-lite-q4-2GiB", fake="/nowhere/libcuda.so")
    with pytest.raises(SystemExit, match=r"no GPU: .*nowhere"):
        benchmark.run(asked, tmp_path, Stages())
    assert list(tmp_path.iterdir()) == []


def test_rows_are_the_papers_setting_and_smaller_ones(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.main([])
    listed = capsys.readouterr().out.split()
    assert listed == list(ROWS)
    assert listed[0] == "deepseek-v2-lite-bf16-24GiB"
    weights = sum(rows * columns for name, (rows, columns) in (
        (name, sides) for name, sides in tensors_of(shape("mixtral-8x7b")) if len(sides) == 2
    ))  # fmt: skip
    assert weights == pytest.approx(46.7e9, rel=0.01)  # parameters, as published
