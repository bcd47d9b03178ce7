"""The harness on tiny shapes; llama.cpp's side where its Python package is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import shapes
from benchmarks.models import RaceModel, bits_per_weight, check_space
from benchmarks.noise import GROUP, ONES, TILE, cut, span_of, tile, write_noise
from benchmarks.worker import Worker, WorkerFailed

# Every width is a multiple of 32, so that GGUF types with groups of 32 can hold it.
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_MLA = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
_HAS_PEER = all(importlib.util.find_spec(name) for name in ("llama_cpp", "gguf"))
_PROMPT = [(37 * i + 5) % 256 for i in range(24)]


def tiny(cache: Path, name: str) -> RaceModel:
    config = {**shapes.shape(name, experts=8), **_TINY}
    config |= _MLA if name.startswith("deepseek") else {}
    config |= {"head_dim": 32} if name.startswith("qwen") else {}
    return RaceModel(cache, f"tiny-{name}", config)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(
    ("name", "billions"),
    [("olmoe", 6.919), ("deepseek-v2-lite", 15.706), ("qwen3-30b-a3b", 30.532)],
)
def test_shapes_have_the_published_sizes(name: str, billions: float) -> None:
    model = RaceModel(Path(), name, shapes.shape(name))
    assert model.weights() / 1e9 == pytest.approx(billions, abs=5e-4)
    names = [tensor for tensor, _ in shapes.tensors_of(model.config)]
    assert len(names) == len(set(names))


def test_spans_lie_in_the_file(tmp_path: Path) -> None:
    write_noise(tmp_path / "noise", 3 * GROUP)
    bits = np.fromfile(tmp_path / "noise", np.uint16)
    assert len(bits) == ONES + TILE + 3 * GROUP
    np.testing.assert_array_equal(bits[:ONES], 0x3F80)
    span = span_of("model.layers.0.mlp.gate.weight", 3 * GROUP)
    assert span.start % GROUP == 0
    found = bits[span.item : span.item + span.count]
    np.testing.assert_array_equal(found, cut(tile(), span.start, span.count))
    assert span_of("model.norm.weight", 64).item == 0
    np.testing.assert_array_equal(cut(np.arange(5), 3, 9), [3, 4, 0, 1, 2, 3, 4, 0, 1])


def ours(model: RaceModel, context: int = 64) -> list[str]:
    where = [os.fspath(model.settings.home), f"{model.name}:bf16"]
    sizes = ["--threads", "1", "--context", str(context)]
    return [sys.executable, "-m", "benchmarks.ours", *where, *sizes]


@pytest.mark.first
@pytest.mark.parametrize("name", list(shapes.SHAPES))
def test_our_worker(cache: Path, name: str) -> None:
    model = tiny(cache, name)
    manifest = model.ours("bf16")
    assert bits_per_weight(model.folder("bf16"), model.weights()) > 16
    with Worker(ours(model)) as worker:
        assert worker.started_at < worker.greeting["imported_at"] < worker.greeting["ready_at"]
        assert worker.ask("prefill", _PROMPT)["seconds"] > 0
        assert len(worker.ask("decode", _PROMPT[:3])["seconds"]) == 3
        whole = worker.ask("logits")["logits"]
        about = worker.ask("about")
        worker.ask("reset")
        worker.ask("prefill", _PROMPT + _PROMPT[:3])
        again = worker.ask("logits")["logits"]
    assert about["loads"] == about["resident"] <= manifest.layers * manifest.experts
    assert about["token_bytes"] > manifest.layers * manifest.top_k * about["expert_bytes"]
    assert np.isfinite(whole).all()
    assert 0.02 < np.std(whole) < 1  # 0.02 · sqrt(64) for a normalised vector
    np.testing.assert_allclose(whole, again, atol=0.05)


@pytest.mark.skipif(
    not _HAS_PEER, reason="the Python packages llama_cpp and gguf are not installed"
)
@pytest.mark.parametrize("name", list(shapes.SHAPES))
def test_llama_cpp_computes_the_same(cache: Path, name: str) -> None:
    """Both have the same weights, so the race is fair; this also checks our families."""
    model, found = tiny(cache, name), []
    model.ours("bf16")
    path = model.peer("BF16", sys.executable)
    sizes = ["--threads", "1", "--context", "64"]
    theirs = [sys.executable, "-m", "benchmarks.peers.llama_cpp", str(path), *sizes]
    for command in (ours(model), theirs):
        with Worker(command) as worker:
            worker.ask("prefill", _PROMPT)
            worker.ask("decode", _PROMPT[:3])
            found.append(worker.ask("logits")["logits"])
    assert np.corrcoef(*found)[0, 1] > 0.995


@pytest.mark.full
def test_a_race_alone(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The whole command, on a shape of two thin layers, without a peer."""
    script = (
        "import benchmarks.shapes as s, runpy, json, os\n"
        "s.SHAPES['olmoe'].update(json.loads(os.environ['TINY']))\n"
        "runpy.run_module('benchmarks', run_name='__main__')\n"
    )
    short = ["--prompt", "16", "--slice", "4", "--decodes", "2", "--cold-starts", "1"]
    out = tmp_path / "out.json"
    command = [sys.executable, "-c", script, "olmoe", "--no-peers", "--threads", "1", *short]
    command += ["--cache", str(tmp_path / "cache"), "--out", str(out), "--cold-prompt", "8"]
    environment = {**os.environ, "TINY": json.dumps({**_TINY, "num_experts": 8})}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(out.read_text())
    assert result["alone"]["ours_over_floor"]["least"] > 1
    assert len(result["alone"]["ours_ms"]) == 2
    assert result["cold"]["ours"]["read_once"] > 0
    assert done.stdout == out.with_suffix(".md").read_text()
    assert "÷ floor" in done.stdout
    assert "no peer: left out" in done.stderr


def test_failures_have_words(cache: Path) -> None:
    with pytest.raises(WorkerFailed, match="exit code 3"):
        Worker([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(OSError, match="the disk has"):
        check_space(cache, 1 << 60)
