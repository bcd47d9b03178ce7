"""Models with tags q4 and q8: closeness to bf16, size, and exact correction.

Agreement is counted on the answers, which the demo was trained on.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from moeinf.runtime.checkpoints.checkpoint import open_checkpoint, read_header
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.jobs.evaluate import CannotCompare, evaluate
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.library.manifest import DENSE, MANIFEST, DamagedModel, Manifest, read_manifest
from moeinf.runtime.library.repacking.repack import repack
from moeinf.runtime.library.sources import LocalSource
from moeinf.runtime.library.verify import LocalRepair, repair, verify
from moeinf.runtime.names import ModelName
from moeinf.runtime.sizes import parse_memory

ALL = EngineConfig(memory=parse_memory("100%"), threads=1)
PER_KIND = 12


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(home=tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def demos(settings: Settings) -> dict[str, tuple[Manifest, Path]]:
    library = Library(settings)
    found = {}
    for tag in ("q2", "q3", "q4", "q4d8", "q8", "bf16"):
        name = ModelName("demo", tag)
        source = LocalSource(open_checkpoint(DEMO_CHECKPOINT), "demo")
        manifest = repack(source, library, name, lambda *_: None, lambda _: None)
        found[tag] = manifest, library.folder(name)
    return found


def exercises() -> list[tuple[str, str]]:
    counts: Counter[str] = Counter()
    found = []
    for line in (DEMO_CHECKPOINT / "heldout.jsonl").read_text().splitlines():
        item = json.loads(line)
        counts[item["kind"]] += 1
        if counts[item["kind"]] <= PER_KIND:
            found.append((f"<|user|>{item['prompt']}<|assistant|>", item["answer"] + "<|end|>"))
    return found


def answers(engine: Engine) -> torch.Tensor:
    """Return the most likely token at every position of every answer, given the correct prefix."""
    found = []
    for prompt, answer in exercises():
        before = engine.tokenizer.encode_text(prompt)
        whole = engine.tokenizer.encode_text(prompt + answer)
        logits = engine.model.extend([(whole[:-1], engine.new_state())], engine.store, "all")
        found.append(logits[len(before) - 1 :].argmax(-1))
    return torch.cat(found)


@pytest.mark.first
@pytest.mark.parametrize(
    ("tag", "least"), [("q3", 0.85), ("q4", 0.95), ("q4d8", 0.95), ("q8", 0.99)]
)
def test_top1_agreement_with_bf16(demos, settings, tag, least):
    with Engine.open(*demos["bf16"], ALL, settings) as engine:
        wanted = answers(engine)
    with Engine.open(*demos[tag], ALL, settings) as engine:
        found = answers(engine)
    assert len(wanted) > 300
    assert (found == wanted).double().mean() >= least


def test_residency_never_chooses_the_result(demos, settings):
    texts = []
    for memory in ("100%", "30%"):
        config = EngineConfig(memory=parse_memory(memory), threads=1)
        with Engine.open(*demos["q4"], config, settings) as engine:
            texts.append(answers(engine))
    assert torch.equal(*texts)


def test_what_is_stored(demos):
    sizes = {tag: manifest.expert_bytes for tag, (manifest, _) in demos.items()}
    assert sizes["q4"] / sizes["bf16"] == 4.5 / 16
    assert sizes["q8"] / sizes["bf16"] == 8.5 / 16
    assert sizes["q4d8"] * 3 == sizes["q4"] * 2 + sizes["q8"]
    bits = {tag: manifest.expert_bits for tag, (manifest, _) in demos.items()}
    assert bits == {"q2": 2.5, "q3": 3.5, "q4": 4.5, "q4d8": 35 / 6, "q8": 8.5, "bf16": 16}
    assert {demos[tag][0].dense_bytes for tag in ("q2", "q3", "q4d8")} == {
        demos["q4"][0].dense_bytes
    }
    assert {tag: manifest.layout for tag, (manifest, _) in demos.items()} == {
        "q2": 1, "q3": 1, "q4": 2, "q4d8": 2, "q8": 2, "bf16": 1,
    }  # fmt: skip
    kinds = {name: t.dtype for name, t in read_header(demos["q4"][1] / DENSE).items()}
    assert kinds["model.layers.0.self_attn.o_proj.weight"] == "U8"
    assert kinds["model.embed_tokens.weight"] == "U8"
    assert kinds["model.norm.weight"] == kinds["model.layers.0.mlp.gate.weight"] == "BF16"


@pytest.mark.parametrize("name", ["experts/L001/E003.safetensors", DENSE])
@pytest.mark.parametrize("tag", ["q4", "q4d8"])
def test_a_mended_file_is_the_very_same(demos, name, tag):
    manifest, folder = demos[tag]
    good = (folder / name).read_bytes()
    (folder / name).write_bytes(good[:5000] + b"x" + good[5001:])
    damages = verify(folder, manifest, lambda *_: None)
    assert [damage.path for damage in damages] == [name]
    source = LocalRepair(open_checkpoint(DEMO_CHECKPOINT))
    repair(folder, manifest, damages, source, lambda *_: None)
    assert (folder / name).read_bytes() == good


def test_a_layout_of_another_version_is_named(demos, tmp_path):
    text = json.loads((demos["q4"][1] / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps({**text, "layout": 9}))
    with pytest.raises(DamagedModel, match="Q4 layout 9"):
        read_manifest(tmp_path)


def test_evaluation_against_itself_and_of_nothing(demos, settings):
    text = "".join(prompt + answer for prompt, answer in exercises()[:8])
    with (
        Engine.open(*demos["q8"], ALL, settings) as engine,
        Engine.open(*demos["bf16"], ALL, settings) as other,
    ):
        itself = evaluate(engine, engine, text)
        assert (itself.kl_divergence, itself.top1_agreement) == (0.0, 1.0)
        assert itself.perplexity == itself.reference_perplexity
        near = evaluate(engine, other, text)
        assert near.tokens == itself.tokens
        assert 0 < near.kl_divergence < 0.05
        assert near.perplexity == pytest.approx(near.reference_perplexity, rel=0.05)
        assert evaluate(engine, None, text).top1_agreement is None
        with pytest.raises(CannotCompare, match="fewer than two"):
            evaluate(engine, None, "")
