"""The GPU benchmark on the fake libcuda: it works and cleans up; its figures mean nothing."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from benchmarks import gpu as benchmark
from benchmarks import gpu_floor, gpu_peers
from benchmarks.ending import Stages
from benchmarks.gpu import ROWS
from benchmarks.models import RaceModel
from benchmarks.peers.table import Peer
from benchmarks.shapes import shape, tensors_of
from moeinf.models.layers.moe import TorchMath
from moeinf.native import DeviceContext
from moeinf.offload.format.layout import ExpertLayout
from moeinf.offload.gpu_tier.miss_split import Contended
from moeinf.runtime.checkpoints.checkpoint import Checkpoint, SourceTensor
from moeinf.runtime.library.repacking.repack import prospects
from moeinf.runtime.library.sources import LocalSource
from moeinf.runtime.machine import gpu as gpus
from moeinf.runtime.machine.bus_bench import measure_contended
from moeinf.runtime.machine.gpu import Gpu
from moeinf.runtime.names import ModelName
from moeinf.runtime.placement.gpu_plan import CONTEXT_BYTES, DeviceBudget
from moeinf.runtime.sizes import parse_memory
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


@pytest.fixture(autouse=True)
def real_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what --fake replaces for the rest of a process."""
    for name in ("missing_for_kernels", "torch_device"):
        monkeypatch.setattr(gpus, name, getattr(gpus, name))


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
    monkeypatch.setattr(gpus, "missing_for_kernels", lambda: None)
    monkeypatch.setattr(gpus, "torch_device", lambda *_: FakeDevice(fake))
    held: list[int] = []  # device bytes during the speed measurement

    def contended(context: DeviceContext, layout: ExpertLayout, math: TorchMath) -> Contended:
        held.append(fake.count("allocated"))
        return measure_contended(context, layout, math)

    monkeypatch.setattr(gpu_floor, "measure_contended", contended)
    monkeypatch.setattr(gpu_floor, "_BYTES", 8 << 20)  # the CPU adds them in the GPU's place
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
    assert found["program"] == "moeinf"
    assert {"date", "command", "driver", "machine", "version"} < set(found)
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
    monkeypatch.setattr(gpus, "torch_device", lambda *_: FakeDevice(fake))
    row = "deepseek-v2-lite-q4-2GiB"
    with pytest.raises(SystemExit) as ended:
        benchmark.main([row, "--disk", str(tmp_path), "--fake", fake.path, "--limit", "1.5"])
    assert ended.value.code == 1
    found = json.loads(capsys.readouterr().out)
    assert found["unfinished"] == "no time left after 1.5 s, at: noise and embedding"
    assert found["seconds"]["noise and embedding"] > 0
    assert list(tmp_path.iterdir()) == []


_MOE_INFINITY = """
import time
import torch

torch.cuda.mem_get_info = lambda: (0, 2_000_000_000)

class MoE:
    def __init__(self, model_name_or_path, config):
        room = config["device_memory_ratio"] * 2_000_000_000
        assert 0 < room < 500_000_000, room

    def generate(self, input_ids, *, streamer, max_new_tokens, **_):
        assert input_ids.shape == (1, 20) and max_new_tokens in (3, 7)
        streamer.put(input_ids)
        for _ in range(max_new_tokens):
            time.sleep(0.002)
            streamer.put(input_ids[:, -1])
        return torch.cat([input_ids, input_ids[:, :max_new_tokens]], 1)
"""


def test_another_program_has_the_same_weights_text_and_bytes(
    fake: Fake,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    new_to_gpus: None,
) -> None:
    fake.reset("memory=2000000000,nvml=processes")
    place = tmp_path / "installed"
    for name, text in (
        ("moe_infinity/__init__.py", _MOE_INFINITY),
        ("moe_infinity-2.0.dist-info/METADATA", "Name: moe-infinity\nVersion: 2.0\n"),
    ):
        (place / name).parent.mkdir(parents=True)
        (place / name).write_text(text)
    paths = os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", paths)
    row, disk = "deepseek-v2-lite-q4-2GiB", tmp_path / "disk"
    disk.mkdir()
    tiny = ["--layers", "3", "--config", json.dumps(_TINY[row]), "--prompt", "20", "--tokens", "6"]
    where = ["--disk", str(disk), "--device-memory", "900MiB", "--fake", fake.path]
    held = iter((0, 700_000_000, 600_000_000))
    monkeypatch.setattr(gpu_peers.HeldMemory, "now_bytes", lambda _: next(held, 0))
    monkeypatch.setattr(gpu_peers, "_EVERY_S", 0.001)
    benchmark.main([row, *tiny, *where, "--program", "moe-infinity"])
    found = json.loads(capsys.readouterr().out)
    assert (found["row"], found["program"]) == (row, "moe-infinity")
    assert (found["gpu"], found["version"]) == ("Fake GPU", "moe-infinity 2.0")
    assert found["weights"] == "BF16"
    assert not found["forced"]
    assert found["decoded_tokens"] == 6
    assert found["ttft_ms"] >= 2 <= found["tpot_ms"]
    assert found["device_budget_bytes"] == 900 << 20
    assert 0 < found["device_weight_bytes"] < (900 << 20) - CONTEXT_BYTES
    assert (found["device_held_bytes"], found["device_held_is_measured"]) == (700_000_000, True)
    assert {"date", "command", "driver", "machine"} < set(found)
    assert list(disk.iterdir()) == []


class _SlowWorker:
    """A worker of a program that decodes two tokens before its time limit.

    asked: its turns; command: its start command.
    """

    asked: ClassVar[list[tuple[int, float]]] = []
    command: ClassVar[list[str]] = []

    def __init__(self, command: list[str]) -> None:
        self.command[:] = command

    def __enter__(self) -> _SlowWorker:
        return self

    def __exit__(self, *_: object) -> None: ...

    def ask(self, do: str, **given: Any) -> dict[str, Any]:
        if do == "turn":
            self.asked.append((len(given["answers"][0]), given["limit_s"]))
        turn = {"first": 1.0, "steps": [2.0, 4.0], "forced": True, "peak_bytes": 5}
        return turn | {"version": "slow 1.0"}


def test_a_slow_program_is_measured_by_what_it_has_decoded_in_time(
    fake: Fake, tmp_path: Path, new_to_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first answer, the warm-up, is short."""
    fake.reset("memory=2000000000")
    monkeypatch.setattr(gpu_peers, "Worker", _SlowWorker)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    monkeypatch.setattr(Peer, "problem", lambda *_, **__: None)
    row = ROWS["deepseek-v2-lite-q4-2GiB"]
    config = {**shape(row.shape, 2), **_TINY[row.name]}
    model, memory = RaceModel(tmp_path, "tiny", config), parse_memory("1GiB")
    text, end_at = list(range(24)), time.monotonic() + 500
    asked = gpu_peers.Asked(
        "accelerate", "python", "q4", memory, text[:20], text[20:], 1, end_at, fake.path
    )
    found = gpu_peers.run(asked, model, Stages())
    assert (found["decoded_tokens"], found["tpot_ms"], found["ttft_ms"]) == (2, 3000.0, 1000.0)
    (first, _), (second, limit_s) = _SlowWorker.asked
    assert (first, second) == (2, 4)
    assert 300 < limit_s < 490
    assert _SlowWorker.command[:3] == ["env", "CUDA_VISIBLE_DEVICES=1", "python"]
    less = replace(asked, device_memory=parse_memory("512MiB"))
    with pytest.raises(SystemExit, match="leave none for weights"):
        gpu_peers.run(less, model, Stages())


def test_a_program_that_is_not_here(
    fake: Fake, tmp_path: Path, new_to_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.reset("memory=2000000000")
    monkeypatch.setattr(Peer, "problem", lambda *_, **__: "not installed: pip install it")
    row = "deepseek-v2-lite-q4-2GiB"
    tiny = ["--layers", "2", "--config", json.dumps(_TINY[row]), "--disk", str(tmp_path)]
    with pytest.raises(SystemExit, match=r"llama.cpp is not installed: pip install it"):
        benchmark.main([row, *tiny, "--program", "llama.cpp", "--fake", fake.path])
    assert list(tmp_path.iterdir()) == []


def test_what_weights_may_take_is_what_ours_may() -> None:
    """Dense weights and KV cache are on the device, and CUDA's own memory is not measured."""
    model = RaceModel(Path("/nowhere"), "x", shape("deepseek-v2-lite"))
    inventory = Checkpoint(Path(), model.config, sources(model))
    manifest = prospects(LocalSource(inventory, "x"), ModelName("x", "q4"))["q4"]
    kv, budget = manifest.kv_bytes(544), parse_memory("4GiB")
    gpu = Gpu("a GPU", 8 << 30, 8 << 30, 12080, "libcuda.so.1")
    placed = DeviceBudget(manifest, budget, gpu).place(544, kv)
    assert placed.inside
    ours = placed.dense_bytes + placed.arena_bytes
    theirs = gpu_peers.weight_bytes(manifest, 4 << 30, 544)
    assert 0 <= theirs - ours < placed.slot_bytes


def sources(model: RaceModel) -> dict[str, SourceTensor]:
    """Return the tensor headers of a checkpoint that does not exist."""
    return {
        name: SourceTensor(name, "BF16", sides, Path("/nowhere/file"), 0, 2 * math.prod(sides))
        for name, sides in tensors_of(model.config)
    }


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
