"""Exported files in llama.cpp: the same tokens, logits and answers as in our engine.

Skipped where llama_cpp cannot be imported: `pip install llama-cpp-python` compiles it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from tests.exported import FAMILIES, Model, checkpoint, exported
from tests.generating import answering
from tests.llama_cpp_side import Llama, difference, llama, our_logits, widened

TAGS = ("bf16", "q4", "q8", "f32")
POSITIONS = 200
ROUNDING = 0.5  # of logits around 20; bf16 has steps of 0.125 there
# The greatest mean KL divergence. float32 sums differ in order; with the others llama.cpp rounds
# activations, too, to groups of 8 bits (q4, q8) or to bf16.
MOST_KL = {"f32": 1e-7, "bf16": 1e-3, "q8": 1e-3, "q4": 1e-3, "mxfp4": 1e-3}


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
def test_logits_of_a_family(name: str, tag: str, tmp_path: Path) -> None:
    assert_near(exported(checkpoint(name, tmp_path / "checkpoint"), tmp_path, tag))


def test_mxfp4(tmp_path: Path) -> None:
    made = checkpoint("gpt-oss", tmp_path / "checkpoint", mxfp4=True)
    model = exported(made, tmp_path, "mxfp4")
    assert model.made.tensors["MXFP4"] == 3 * model.manifest.layers
    assert_near(model)


def assert_near(model: Model) -> None:
    """Compare the logits after a text of random tokens.

    Random weights are chaotic: a rounded activation chooses other experts. So where the programs
    differ, the yardstick is the file with every tensor in float32: our distance from it may be
    twice that of llama.cpp.
    """
    ids = random.Random(1).choices(range(272), k=POSITIONS)
    with model.engine() as engine, llama(model.file) as other:
        ours, theirs = our_logits(engine, ids), other.logits(ids)
    found = difference(ours, theirs)
    if found.kl < MOST_KL[model.manifest.tag]:
        assert found.gap <= 2 * found.largest, found
        return
    assert model.manifest.tag != "f32", found
    with llama(widened(model.file)) as wide:
        exact = wide.logits(ids)
    assert difference(ours, exact).kl < 2 * difference(theirs, exact).kl, found
