"""Checks of peers without a stand-in: installed programs, sizes, processes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from benchmarks.models import RaceModel
from benchmarks.peers.gguf_sizes import layers_below
from benchmarks.shapes import shape
from benchmarks.worker import Worker
from tests.benchmarks.test_peers import command


def test_accelerate_itself(tmp_path: Path) -> None:
    """Where it is installed: offloaded weights give the logits of resident ones."""
    pytest.importorskip("accelerate")
    sizes = {"vocab_size": 512, "intermediate_size": 96, "moe_intermediate_size": 32}
    sizes |= {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    race = RaceModel(tmp_path, "tiny", {**shape("qwen3-30b-a3b", 4, 8), **sizes})
    more = ["--setting", "gpu", "--folder", str(tmp_path / "offload"), "--batch", "1"]
    found, placed = [], []
    for share in (4.0, 0.8):
        room = ["--device-bytes", str(round(2 * race.weights() * share))]
        with Worker(command("accelerate", str(race.huggingface()), *more, *room)) as worker:
            worker.ask("prefill", [1, 2, 3])
            worker.ask("decode", [4, 5])
            found.append(worker.ask("logits")["logits"])
            placed.append(worker.ask("about")["placed"])
    assert found[0] == found[1]
    assert "disk" not in placed[0]
    assert placed[1]["disk"] > 0 < placed[1]["cpu"]


def test_llama_cpps_layers_on_a_gpu() -> None:
    """Their sizes differ; the embedding always stays in RAM."""
    sizes = {"token_embd.weight": 1000, "output.weight": 50, "blk.0.attn_q.weight": 10}
    for layer, size in enumerate((40, 30, 20, 10)):
        sizes |= {f"blk.{layer}.ffn_{name}_exps.weight": size for name in ("up", "down", "gate")}
    for room, below in ((60, [0, 1, 2, 3]), (149, [0, 1, 2]), (150, [0, 1]), (359, [0]), (360, [])):
        assert layers_below(sizes, room) == below
    with pytest.raises(SystemExit, match="59 bytes have no room for 60 of dense weights"):
        layers_below(sizes, 59)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b"])
def test_a_gguf_file_of_a_row(name: str, tmp_path: Path) -> None:
    """Where its package is installed: every weight of the checkpoint is in the file."""
    gguf = pytest.importorskip("gguf")
    sizes = {"vocab_size": 512, "intermediate_size": 96, "moe_intermediate_size": 32}
    sizes |= {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    config = {**shape(name, 3, 8), **sizes}
    race = RaceModel(tmp_path, "tiny", config)
    reader = gguf.GGUFReader(race.peer("Q8_0", sys.executable))
    found = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
    assert sum(found.values()) == race.weights()
    assert layers_below(found, sum(found.values())) == []
    assert layers_below(found, sum(found.values()) - found["token_embd.weight"] - 1) == [0]


def test_a_worker_is_not_waited_for_when_all_is_to_end(tmp_path: Path) -> None:
    """The worker sleeps for a minute instead of answering; shutdown does not wait for it."""
    busy = tmp_path / "busy.py"
    busy.write_text("import time\nprint('{}', flush=True)\ntime.sleep(60)\n")
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), Worker([sys.executable, str(busy)]):
        raise KeyboardInterrupt
    assert time.monotonic() - start < 30
