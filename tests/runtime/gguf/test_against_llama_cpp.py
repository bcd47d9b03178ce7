"""Files that we export and files that llama.cpp quantises: both programs compute the same.

Skipped where llama_cpp cannot be imported: `pip install llama-cpp-python` compiles it.
"""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from torch import Tensor

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.jobs.export_gguf import export_gguf
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from tests.conftest import ignore
from tests.exported import FAMILIES, STREAMS, Model, checkpoint, exported
from tests.generating import answering
from tests.gguf_files import matrices, write_gguf
from tests.gguf_wide import widened
from tests.llama_cpp_side import (
    Llama,
    computed_as_there,
    difference,
    llama,
    our_logits,
    quantised,
)
from tests.runtime.gguf.writing.test_like_the_converter import EXPORTED
from tests.steady import steady
from tests.tiny import save_tiny
from tests.tiny_families import Tiny

TAGS = ("bf16", "q4", "q8", "f32")
POSITIONS = 200
RECENT_POSITIONS = 100
RECENT = {**EXPORTED, **STREAMS}
INDEXED = ("v32", "glm-dsa")  # llama.cpp rotates their keys by 64 channels at least
# On the 90 % of tokens that differ least: a rounding may move the others to another expert.
TYPICAL_KL = 1e-3
BLOCK = 32  # weights of Q4_0 and Q8_0
WIDTHS = (
    "global_head_dim",
    "head_dim",
    "hidden_size",
    "index_head_dim",
    "intermediate_size",
    "kv_lora_rank",
    "linear_head_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "mamba_head_dim",
    "moe_intermediate_size",
    "moe_latent_size",
    "moe_shared_expert_intermediate_size",
    "o_lora_rank",
    "ple_embed_dim",
    "q_lora_rank",
    "qk_nope_head_dim",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "v_head_dim",
)
IDS = random.Random(1).choices(range(272), k=POSITIONS)
ROUNDING = 0.5  # of the demo's logits around 20; bf16 has steps of 0.125 there
NEARLY_TIED = 0.15  # of the families' logits, whose standard deviation is 1
# The greatest mean KL divergence. float32 sums differ in order; with the others llama.cpp rounds
# activations, too, to groups of 8 bits (q4, q8) or to bf16.
MOST_KL = {"f32": 1e-7, "bf16": 1e-3, "q8": 1e-3, "q4": 1e-3}
RAMP = 1e-5  # llama.cpp rounds the ends of yarn's ramp; gpt-oss does not
# A file does not record that the ends are rounded, so they are not after a pull.
IMPORTED = ["gpt-oss", *(name for name in FAMILIES if not name.startswith("gpt-oss"))]


def full(value: str) -> Any:
    return pytest.param(value, marks=pytest.mark.full)


def items(count: int) -> list[tuple[str, str]]:
    """Return (prompt, answer) of exercises that the demo was not trained on, of all kinds."""
    lines = (DEMO_CHECKPOINT / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    chosen = random.Random(0).sample(lines, count)
    return [(item["prompt"], item["answer"]) for item in map(json.loads, chosen)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """Return the demo under every tag, exported."""
    folders = {tag: tmp_path_factory.mktemp(tag) for tag in TAGS}
    return {tag: exported(DEMO_CHECKPOINT, folder, tag) for tag, folder in folders.items()}


def rendered(prompt: str) -> str:
    return f"<|begin|><|user|>{prompt}<|assistant|>"


@pytest.mark.parametrize("tag", TAGS)
def test_logits_of_the_demo(tag: str, models: dict[str, Model]) -> None:
    """Only the positions of answers count: the demo was not trained on prompts."""
    ours, theirs = list[Tensor](), list[Tensor]()
    with models[tag].engine() as engine, llama(models[tag].file) as other:
        for prompt, answer in items(30):
            ids = engine.tokenizer.encode_rendered(rendered(prompt) + answer)
            assert other.tokens(rendered(prompt) + answer) == ids
            begun = len(engine.tokenizer.encode_rendered(rendered(prompt))) - 1
            ours.append(our_logits(engine, ids)[begun:])
            theirs.append(other.logits(ids)[begun:])
    found = difference(torch.cat(ours), torch.cat(theirs))
    assert found.positions >= POSITIONS
    assert found.kl < MOST_KL[tag], found


@pytest.mark.parametrize("tag", TAGS[:2])
def test_answers_of_the_demo(tag: str, models: dict[str, Model]) -> None:
    """The file's own template and tokens are used."""
    same(models[tag], 20)


@pytest.mark.full
@pytest.mark.parametrize("tag", TAGS)
def test_many_answers_of_the_demo(tag: str, models: dict[str, Model]) -> None:
    same(models[tag], 200)


def same(model: Model, count: int) -> None:
    """Assert that both answer exercises alike, but where two tokens are tied."""
    with model.engine() as engine, llama(model.file) as theirs:
        for prompt, _ in items(count):
            ids = engine.tokenizer.encode_rendered(rendered(prompt))
            ours = answering(engine, ids, 64)
            text = "".join(ours)
            if theirs.chat(prompt, 64) != text:
                assert_tied(engine, theirs, [*ids, *ours.tokens], len(ids) - 1)


def assert_tied(engine: Engine, theirs: Llama, ids: list[int], begun: int) -> None:
    """Assert that where the best tokens of an answer differ, ours leads by rounding only."""
    found = difference(our_logits(engine, ids)[begun:], theirs.logits(ids)[begun:])
    assert found.changed
    assert found.gap <= ROUNDING, found


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tag", ["f32", "q4"])
def test_exported_families(name: str, tag: str, tmp_path: Path) -> None:
    model = exported(checkpoint(name, tmp_path / "checkpoint"), tmp_path, tag)
    most = RAMP if (name, tag) == ("gpt-oss", "f32") else MOST_KL[tag]
    with computed_as_there(name), model.engine() as engine, llama(model.file) as other:
        assert_near(our_logits(engine, IDS), other.logits(IDS), most)


@pytest.mark.parametrize("name", RECENT)
def test_exported_recent_families(name: str, tmp_path: Path) -> None:
    """Texts are longer than windows, and than the tokens that an indexer chooses."""
    tiny = RECENT[name].but(**({"index_head_dim": 64} if name in INDEXED else {}))
    save_tiny(tiny, tmp_path / "checkpoint", seed=3)
    ours, theirs = both_logits(name, tmp_path, "f32")
    assert_near(ours, theirs, MOST_KL["f32"])


@pytest.mark.parametrize("name", [next(iter(RECENT)), *map(full, [*RECENT][1:])])
@pytest.mark.parametrize("tag", ["q8", "q4"])
def test_exported_recent_families_in(tag: str, name: str, tmp_path: Path) -> None:
    """Rows are whole blocks, so that they stay codes. Indexers choose all tokens."""
    tiny = in_blocks(RECENT[name])
    save_tiny(tiny, tmp_path / "checkpoint", seed=3, change=lambda m: steady(m, tiny.family))
    ours, theirs = both_logits(name, tmp_path, tag)
    assert difference(*typical(ours, theirs)).kl <= TYPICAL_KL


def both_logits(name: str, folder: Path, tag: str) -> tuple[Tensor, Tensor]:
    """Export the checkpoint in `folder`; return our logits and llama.cpp's."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_CHECKPOINT / file, folder / "checkpoint")
    model = exported(folder / "checkpoint", folder, tag)
    assert tag == "f32" or model.made.tensors[{"q4": "Q4_0", "q8": "Q8_0"}[tag]] > 2
    ids = IDS if name in STREAMS else IDS[:RECENT_POSITIONS]
    with model.engine(len(ids)) as engine, llama(model.file, len(ids)) as other:
        return our_logits(engine, ids), other.logits(ids)


def in_blocks(tiny: Tiny) -> Tiny:
    """Return the same with widths in whole blocks, and with indexers that choose all tokens."""
    heads = tiny.settings.get("num_attention_heads", 1)
    steps = {"hidden_size": math.lcm(heads, BLOCK), "index_head_dim": 64}
    wide = {}
    for key in WIDTHS:
        if tiny.settings.get(key):
            step = steps.get(key, BLOCK)
            wide[key] = -(-tiny.settings[key] // step) * step
    if "ple_embed_dim" in wide:
        wide["ple_embed_dim"] = wide["hidden_size"]  # llama.cpp has no other
    chosen = {
        key: 2 * POSITIONS for key in ("index_topk", "indexer_budget") if key in tiny.settings
    }
    return tiny.but(**wide, **chosen)


def typical(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 90 % of rows of both that differ least."""
    p, q = (logits.double().log_softmax(-1) for logits in (theirs, ours))
    least = (p.exp() * (p - q)).sum(-1).argsort()[: len(p) * 9 // 10]
    return ours[least], theirs[least]


@pytest.mark.parametrize("form", ["Q4_K_M", *map(full, ("Q4_0", "Q8_0", "Q5_K_M", "Q6_K"))])
@pytest.mark.parametrize("name", IMPORTED)
def test_files_of_llama_cpp(name: str, form: str, tmp_path: Path) -> None:
    held_against_llama_cpp(name, form, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", STREAMS)
def test_files_of_llama_cpp_with_streams(name: str, tmp_path: Path) -> None:
    """Rows are whole blocks, and indexers choose all tokens."""
    tiny = in_blocks(STREAMS[name])
    save_tiny(tiny, tmp_path / "checkpoint", seed=3, change=lambda m: steady(m, tiny.family))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_CHECKPOINT / file, tmp_path / "checkpoint")
    made = exported(tmp_path / "checkpoint", tmp_path, "f32")
    model = made.pulled(quantised(made.file, "Q8_0"))
    with model.engine(len(IDS)) as engine, llama(model.file, len(IDS)) as other:
        ours, theirs = our_logits(engine, IDS), other.logits(IDS)
    assert difference(*typical(ours, theirs)).kl <= TYPICAL_KL


@pytest.mark.parametrize("name", ["gpt-oss", *(full(name) for name in IMPORTED[1:])])
def test_mxfp4_files_of_llama_cpp(name: str, tmp_path: Path) -> None:
    """Experts that are exported again have llama.cpp's own bytes."""
    model = held_against_llama_cpp(name, "MXFP4_MOE", tmp_path)
    again, folder = tmp_path / "again.gguf", Library(model.settings).folder(model.manifest.model)
    export_gguf(folder, model.manifest, again, ignore, ignore, force=False)
    ours, theirs = (
        {tensor.name: tensor for tensor in GGUFReader(path).tensors} for path in (again, model.file)
    )
    experts = [name for name in ours if re.search(r"ffn_(gate|up|down)_exps\.weight$", name)]
    assert len(experts) == 3 * model.manifest.layers
    for name in experts:
        assert ours[name].tensor_type == theirs[name].tensor_type == GGMLQuantizationType.MXFP4
        assert np.array_equal(ours[name].data, theirs[name].data), name


# The architectures whose graphs in llama.cpp apply the factors of NVFP4 experts.
@pytest.mark.parametrize("name", ["qwen3", *map(full, ("mixtral", "mixtral-llama3", "qwen3.5"))])
def test_nvfp4_files(name: str, tmp_path: Path) -> None:
    """llama.cpp quantises nothing to NVFP4: the file is our export of what its converter makes."""
    made = exported(checkpoint(name, tmp_path / "checkpoint"), tmp_path, "f32")
    theirs = write_gguf(tmp_path / "checkpoint", tmp_path / "theirs.gguf", blocks_of_nvfp4)
    model = made.pulled(theirs)
    file, folder = tmp_path / "nvfp4.gguf", Library(model.settings).folder(model.manifest.model)
    written = export_gguf(folder, model.manifest, file, ignore, ignore, force=False)
    kept = [t.tensor_type for t in GGUFReader(theirs).tensors if ".ssm_out." not in t.name]
    assert written.tensors["NVFP4"] == kept.count(GGMLQuantizationType.NVFP4)
    held_on(made, replace(model, file=file), name)


def blocks_of_nvfp4(name: str, values: Tensor) -> GGMLQuantizationType:
    """Return NVFP4 but for the embedding, whose factor llama.cpp does not read."""
    kind = matrices(GGMLQuantizationType.NVFP4)(name, values)
    return GGMLQuantizationType.BF16 if name == "token_embd.weight" else kind


def held_against_llama_cpp(name: str, form: str, folder: Path) -> Model:
    """Compare both programs on a file that llama.cpp quantised, and on its weights in float32."""
    made = exported(checkpoint(name, folder / "checkpoint"), folder, "f32")
    return held_on(made, made.pulled(quantised(made.file, form)), name)


def held_on(made: Model, model: Model, name: str) -> Model:
    """Compare both programs on the file of `model`, and on its weights in float32."""
    with computed_as_there(name):
        with model.engine() as engine, llama(model.file) as other:
            assert_near(our_logits(engine, IDS), other.logits(IDS), 1e-3)
        reference = made.pulled(model.file, "f32")
        with reference.engine() as engine, llama(widened(model.file)) as wide:
            assert_near(our_logits(engine, IDS), wide.logits(IDS), 1e-5)
    return model


def assert_near(ours: Tensor, theirs: Tensor, most_kl: float) -> None:
    """Assert that the next tokens are the same, but where two are nearly tied."""
    found = difference(ours, theirs)
    assert found.kl <= most_kl, found
    assert found.gap <= NEARLY_TIED, found


def test_llama_cpp_runs_phimoe_otherwise(tmp_path: Path) -> None:
    """The note of the export is true: only with its norms and router are logits the same."""
    model = exported(checkpoint("phimoe", tmp_path / "checkpoint"), tmp_path, "f32")
    with model.engine() as engine, llama(model.file) as other:
        assert difference(our_logits(engine, IDS), other.logits(IDS)).kl > 0.01
