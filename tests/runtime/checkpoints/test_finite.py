"""NaN and infinity: `pull` names the tensor, and a run raises an error instead of a token."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moeinf.runtime.checkpoints.checkpoint import open_checkpoint
from moeinf.runtime.checkpoints.finite import NotFiniteLogits, NotFiniteWeights, check_logits
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.jobs.evaluate import evaluate
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.library.repacking.repack import repack
from moeinf.runtime.library.sources import LocalSource
from moeinf.runtime.library.staging import StagingFolder
from moeinf.runtime.names import parse_name
from moeinf.runtime.sampling.sampler import SamplingOptions
from scripts.make_checkpoint import byte_tokenizer
from tests.conftest import ignore
from tests.generating import answering
from tests.runtime.checkpoints.quantised.test_fp8 import save_fp8
from tests.tiny import save_tiny
from tests.tiny_mxfp4 import save_mxfp4

EXPERT = "model.layers.0.mlp.experts.3.down_proj.weight"
# changes tensors; returns the name that the error must contain
Spoil = Callable[[dict[str, Tensor]], str]


def demo(folder: Path, spoil: Spoil, dtype: torch.dtype = torch.bfloat16) -> str:
    """Write the demo's checkpoint in a format with a bad value; return the bad tensor's name."""
    folder.mkdir()
    for path in DEMO_CHECKPOINT.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    found = load_file(folder / "model.safetensors")
    tensors = {name: tensor.to(dtype) for name, tensor in found.items()}
    name = spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    return name


def one(name: str, value: float, at: int = -1) -> Spoil:
    def spoil(tensors: dict[str, Tensor]) -> str:
        tensors[name].view(-1)[at] = value
        return name

    return spoil


def added(folder: Path, name: str, allow_nan: bool = False) -> list[str]:
    """Pull a folder; return the notes."""
    notes: list[str] = []
    source = LocalSource(open_checkpoint(folder), str(folder))
    library = Library(Settings(folder.parent / "home"))
    repack(source, library, parse_name(name), ignore, notes.append, allow_nan)
    return notes


@pytest.mark.matrix
@pytest.mark.parametrize("tag", ["f32", "bf16", "q8", "q4"])
@pytest.mark.parametrize(
    ("name", "value", "dtype"),
    [
        (EXPERT, float("nan"), torch.bfloat16),
        (EXPERT, float("-inf"), torch.float16),
        ("model.embed_tokens.weight", float("inf"), torch.float32),
        ("model.layers.2.mlp.gate.weight", float("nan"), torch.float16),
        ("model.norm.weight", float("nan"), torch.float32),
    ],
)
def test_weights_are_named(
    name: str, value: float, dtype: torch.dtype, tag: str, tmp_path: Path
) -> None:
    demo(tmp_path / "spoilt", one(name, value), dtype)
    with pytest.raises(NotFiniteWeights, match=f"'{name}' has NaN or infinity"):
        added(tmp_path / "spoilt", f"x:{tag}")
    library = Library(Settings(tmp_path / "home"))
    assert (library.installed(), library.partials()) == ([], [])
    notes = added(tmp_path / "spoilt", f"x:{tag}", allow_nan=True)
    assert [note for note in notes if note.startswith(f"NaN or infinity in {name}: ")]


@pytest.mark.parametrize(
    ("tag", "value"), [("bf16", 3.4e38), ("q8", 65504.0 * 128), ("q4", 65504.0 * 9)]
)
def test_numbers_that_a_format_cannot_hold(tag: str, value: float, tmp_path: Path) -> None:
    demo(tmp_path / "large", one(EXPERT, value), torch.float32)
    with pytest.raises(NotFiniteWeights, match=EXPERT):
        added(tmp_path / "large", f"x:{tag}")
    assert not [note for note in added(tmp_path / "large", "x:f32") if "NaN" in note]


def _fp8_weight(tensors: dict[str, Tensor]) -> str:
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    tensors[name].view(torch.uint8)[0, 0] = 0x7F  # the NaN of E4M3
    return name


def _fp8_scale(tensors: dict[str, Tensor]) -> str:
    tensors["model.layers.0.self_attn.o_proj.weight_scale_inv"][0, 0] = float("inf")
    return "model.layers.0.self_attn.o_proj.weight"


def _mxfp4_nan(tensors: dict[str, Tensor]) -> str:
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 5, 0] = 255
    return "model.layers.1.mlp.experts.down_proj"


def _mxfp4_large(tensors: dict[str, Tensor]) -> str:
    tensors["model.layers.0.mlp.experts.gate_up_proj_blocks"][1, 4, 0, 3] = 0x77  # 6, twice
    tensors["model.layers.0.mlp.experts.gate_up_proj_scales"][1, 4, 0] = 253
    return "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("save", "spoil", "tags"),
    [
        (save_fp8, _fp8_weight, ("f32", "bf16", "q8", "q4")),
        (save_fp8, _fp8_scale, ("f32", "bf16", "q8", "q4")),
        (save_mxfp4, _mxfp4_nan, ("f32", "q4", "mxfp4")),
        (save_mxfp4, _mxfp4_large, ("f32", "mxfp4")),
    ],
)
def test_weights_of_blocks_are_named(
    save: Callable[[Path], object], spoil: Spoil, tags: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "blocks"
    folder.mkdir()
    save(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    assert not [note for note in added(folder, "whole:f32") if "NaN" in note]
    tensors = load_file(folder / "model.safetensors")
    name = spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    for tag in tags:
        with pytest.raises(NotFiniteWeights, match=f"'{name}' has"):
            added(folder, f"x:{tag}")


def test_a_finite_mxfp4_scale_may_be_large(tmp_path: Path) -> None:
    save_mxfp4(tmp_path / "m")
    byte_tokenizer().save(str(tmp_path / "m" / "tokenizer.json"))
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors["model.layers.0.mlp.experts.down_proj_blocks"][1, 4, 0] = 0x11  # 0.5, 32 times
    tensors["model.layers.0.mlp.experts.down_proj_scales"][1, 4, 0] = 254
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    assert not [note for note in added(tmp_path / "m", "x:mxfp4") if "NaN" in note]


def test_fused_experts_are_named(tmp_path: Path) -> None:
    save_tiny("granite", tmp_path / "g")
    byte_tokenizer().save(str(tmp_path / "g" / "tokenizer.json"))
    tensors = load_file(tmp_path / "g" / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.input_linear.weight"
    tensors[name][4, 7, 2] = float("nan")
    save_file(tensors, tmp_path / "g" / "model.safetensors")
    with pytest.raises(NotFiniteWeights, match=name):
        added(tmp_path / "g", "x:q8")


def test_what_an_earlier_attempt_wrote_is_not_forgotten(tmp_path: Path) -> None:
    """A pull with --allow-nan is interrupted and resumed without the option."""
    work = StagingFolder(tmp_path / "work", {"of": "x"})
    for _ in range(2):
        work.add_broken("a.weight")
        work.add_rounded("b.weight")
    work.commit()
    again = StagingFolder(tmp_path / "work", {"of": "x"})
    assert (again.broken, again.rounded) == (["a.weight"], ["b.weight"])
    assert StagingFolder(tmp_path / "work", {"of": "y"}).broken == []


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[Engine]:
    """Return the demo with a NaN in one element of its last norm: every logit is NaN."""
    demo(tmp_path / "spoilt", one("model.norm.weight", float("nan"), 5))
    added(tmp_path / "spoilt", "x:q8", allow_nan=True)
    settings = Settings(tmp_path / "home")
    manifest, folder = Library(settings).read("x:q8")
    with Engine.open(manifest, folder, EngineConfig(trace=False), settings) as engine:
        yield engine


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_model_that_computes_nan_says_no_token(broken: Engine, temperature: int) -> None:
    answer = answering(broken, [1, 2, 3], 8, SamplingOptions(temperature=temperature))
    with pytest.raises(NotFiniteLogits):
        list(answer)
    assert (answer.tokens, answer.failed) == ([], True)
    with pytest.raises(NotFiniteLogits):
        evaluate(broken, None, "17+25=42")
    del answer


def test_logits() -> None:
    check_logits(np.zeros((2, 3), np.float32))
    for wrong in (np.nan, np.inf, -np.inf):
        with pytest.raises(NotFiniteLogits):
            check_logits(np.array([0, wrong, 1], np.float32))


def test_a_broken_pull_goes_on_only_with_the_wish(tmp_path: Path) -> None:
    """The journal of an interrupted pull keeps the NaN that was found."""
    name = demo(tmp_path / "two", one("model.norm.weight", float("nan")))
    tensors = load_file(tmp_path / "two" / "model.safetensors")
    index = {key: "b.safetensors" if EXPERT[:15] in key else "a.safetensors" for key in tensors}
    for file in ("a.safetensors", "b.safetensors"):
        part = {key: tensor for key, tensor in tensors.items() if index[key] == file}
        save_file(part, tmp_path / "two" / file)
    (tmp_path / "two" / "model.safetensors").unlink()
    (tmp_path / "two" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": index})
    )

    class Stopped(RuntimeError):
        pass

    def stop(phase: str, done: int, total: int) -> None:
        if phase == "repacking" and done == total:
            raise Stopped

    source = LocalSource(open_checkpoint(tmp_path / "two"), "two")
    library = Library(Settings(tmp_path / "home"))
    with pytest.raises(Stopped):
        repack(source, library, parse_name("x:bf16"), stop, ignore, allow_nan=True)
    with pytest.raises(NotFiniteWeights, match=name):
        repack(source, library, parse_name("x:bf16"), ignore, ignore)
