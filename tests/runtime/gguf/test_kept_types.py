"""Files of mixed types: every tensor keeps its own, and the model computes with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from moeinf.models.families import family_of
from moeinf.offload.format.layout import ExpertForms, is_tiled
from moeinf.offload.format.quantise import dequantise
from moeinf.runtime.checkpoints.encode import encoded
from moeinf.runtime.checkpoints.inventory import Inventory, take_inventory
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.gguf.checkpoint import open_gguf
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.repacking.repack import in_tag
from moeinf.runtime.library.repacking.shard_writer import all_targets
from moeinf.runtime.library.verify import verify
from moeinf.runtime.sizes import parse_memory
from scripts.make_checkpoint import byte_tokenizer, config, make_checkpoint
from tests.conftest import endless, ignore
from tests.generating import answering
from tests.gguf_files import float32, matrices, quantised, write_gguf
from tests.runtime.engine.test_quantised_families import TOLERANCE, near_the_reference, reference
from tests.runtime.gguf.test_pulls import pull
from tests.tiny import save_tiny
from tests.tiny_families import gemma4

LAYERS, EXPERTS = 2, 6


def mixed(name: str, values: Tensor) -> Kind:
    """Mix types as llama.cpp does in Q4_K_M: some matrices get Q6_K."""
    if values.dim() < 2 or "gate_inp" in name:
        return Kind.F32
    six = name in ("blk.0.ffn_down_exps.weight", "output.weight") or "attn_v" in name
    return Kind.Q6_K if six else Kind.Q4_K


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint whose rows are whole blocks of 256."""
    folder = tmp_path_factory.mktemp("wide") / "checkpoint"
    make_checkpoint(folder, config(LAYERS, EXPERTS, 256, 256, 2))
    return folder


@pytest.fixture
def q4_k_m(checkpoint: Path, tmp_path: Path) -> Path:
    return write_gguf(checkpoint, tmp_path / "x.gguf", mixed)


def all_bytes(inventory: Inventory, form: str) -> list[tuple[str, Tensor, Tensor]]:
    """Return each matrix as its format, the weights of its tiles, and those of the file."""
    found = []
    for target in all_targets(inventory, form):
        for number, part in enumerate(target.parts):
            if not is_tiled(target.forms[number]):
                continue
            tiles = torch.frombuffer(bytearray(b"".join(target.data(number))), dtype=torch.uint8)
            wide = torch.frombuffer(bytearray(b"".join(encoded(part, "F32"))), dtype=torch.float32)
            kept = dequantise(tiles, target.forms[number], *part.shape)
            found.append((target.forms[number], kept, wide.view(part.shape)))
    return found


def test_every_tensor_keeps_its_type(q4_k_m: Path) -> None:
    opened = open_gguf(q4_k_m)
    inventory, form = in_tag(take_inventory(family_of(opened.config), opened), "q4k")
    assert form == "Q4K"
    assert inventory.forms.experts == (ExpertForms("Q4K", "Q6K"), ExpertForms("Q4K", "Q4K"))
    assert inventory.forms.dense["lm_head.weight"] == "Q6K"
    assert inventory.forms.dense["model.embed_tokens.weight"] == "Q4K"
    found = all_bytes(inventory, form)
    assert {form for form, _, _ in found} == {"Q4K", "Q6K"}
    for form, kept, wide in found:
        assert torch.equal(kept, wide), form


def test_a_pull_without_a_note(q4_k_m: Path, tmp_path: Path) -> None:
    settings, notes = Settings(tmp_path / "home"), ["first"]
    manifest = pull(q4_k_m, settings, notes)
    assert (manifest.tag, manifest.dtype, notes) == ("q4k", "Q4K", ["first"])
    assert manifest.expert_bits == pytest.approx((5 * 4.5 + 6.5625) / 6, abs=0.01)
    folder = Library(settings).folder(manifest.model)
    assert verify(folder, manifest, ignore) == []
    answers = []
    for memory in ("100%", "40%"):
        with Engine.open(
            manifest, folder, EngineConfig(memory=parse_memory(memory)), settings
        ) as engine:
            endless(engine)
            answer = answering(engine, [5, 9, 14, 3], 12)
            list(answer)
            answers.append(answer.tokens)
    assert answers[0] == answers[1]


def test_gemma4_trained_in_q4_0(tmp_path: Path) -> None:
    """Every matrix of a file in Q4_0 is kept; the scales beside the matrices stay float32."""
    tiny = gemma4(hidden_size=64, intermediate_size=96, moe_intermediate_size=32, head_dim=8)
    save_tiny(tiny, tmp_path / "x", seed=3)
    byte_tokenizer().save(str(tmp_path / "x" / "tokenizer.json"))
    path = write_gguf(tmp_path / "x", tmp_path / "x.gguf", matrices(Kind.Q4_0))
    settings, notes = Settings(tmp_path / "home"), ["first"]
    manifest = pull(path, settings, notes)
    assert (manifest.tag, manifest.forms, notes) == ("q4", (), ["first"])
    opened = open_gguf(path)
    found = all_bytes(in_tag(take_inventory(family_of(opened.config), opened), "q4")[0], "Q4")
    assert len(found) > 3 * 7 * 3  # experts and more
    assert all(torch.equal(kept, wide) for _, kept, wide in found)
    answers = []
    for memory in ("100%", str(manifest.slots.min_bytes)):
        config = EngineConfig(memory=parse_memory(memory))
        folder = Library(settings).folder(manifest.model)
        with Engine.open(manifest, folder, config, settings) as engine:
            endless(engine)
            answer = answering(engine, [5, 9, 14, 3], 12)
            list(answer)
            answers.append(answer.tokens)
    assert answers[0] == answers[1]
    plain, experts = reference(opened, "q4")  # the dequantised weights
    assert near_the_reference(manifest, settings, plain, experts) < TOLERANCE


@pytest.mark.parametrize(("kind", "tag"), [(Kind.Q5_K, "q5k"), (Kind.Q6_K, "q6k")])
def test_one_type(kind: Kind, tag: str, checkpoint: Path, tmp_path: Path) -> None:
    def choose(name: str, values: Tensor) -> Kind:
        return Kind.F32 if values.dim() < 2 or "gate_inp" in name else kind

    path, settings = write_gguf(checkpoint, tmp_path / "x.gguf", choose), Settings(tmp_path / "h")
    manifest = pull(path, settings)
    assert (manifest.tag, manifest.forms) == (tag, ())
    opened = open_gguf(path)
    found = all_bytes(in_tag(take_inventory(family_of(opened.config), opened), tag)[0], tag.upper())
    assert all(torch.equal(kept, wide) for _, kept, wide in found)
    folder = Library(settings).folder(manifest.model)
    with Engine.open(manifest, folder, EngineConfig(), settings) as engine:
        endless(engine)
        answer = answering(engine, [5, 9, 14, 3], 5)
        list(answer)
        assert len(answer.tokens) == 5


@pytest.mark.parametrize(
    "kind", [Kind.Q2_K, Kind.Q3_K, Kind.IQ1_M, Kind.IQ2_XXS, Kind.IQ3_S, Kind.IQ4_XS]
)
def test_types_without_a_tile_are_widened(kind: Kind, checkpoint: Path, tmp_path: Path) -> None:
    """One line names the type and the size, and weights are near those of the package gguf."""
    chance = np.random.default_rng(int(kind))

    def rows(values: Tensor, wanted: Kind) -> Any:
        if wanted != kind:
            return quantised(values, wanted)
        per_block, size = gguf.GGML_QUANT_SIZES[kind]
        shape = (*values.shape[:-1], values.shape[-1] // per_block * size)
        return chance.integers(0, 60, shape, np.uint8)  # float16 numbers in it are below 2

    def choose(name: str, values: Tensor) -> Kind:
        return kind if "_exps." in name else float32(name, values)

    with mock.patch("tests.gguf_files.quantised", rows):
        path = write_gguf(checkpoint, tmp_path / "x.gguf", choose)
    notes = ["first"]
    manifest = pull(path, Settings(tmp_path / "home"), notes)
    assert manifest.tag == "q4"
    (note,) = [note for note in notes if kind.name in note]
    assert "converted to q4" in note
    assert "MiB become" in note
    opened = open_gguf(path)
    inventory, form = in_tag(take_inventory(family_of(opened.config), opened), "q4")
    found = [(kept, wide) for _, kept, wide in all_bytes(inventory, form)]
    assert len(found) >= 3 * LAYERS * EXPERTS
    for kept, wide in found:
        assert float((kept - wide).norm()) <= 0.12 * float(wide.norm())
