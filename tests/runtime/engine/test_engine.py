"""The engine on the trained demo: memory may change the time but not the tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from moeinf.models.base import Pending
from moeinf.offload.store.budget import DoesNotFit
from moeinf.offload.store.expert_store import Stopped
from moeinf.offload.store.transfer import ExpertReadError
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.chat import Conversation
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.library.manifest import DamagedModel
from moeinf.runtime.placement.plan import BadContext, place
from moeinf.runtime.requests import Limits
from moeinf.runtime.sampling.sampler import SamplingOptions
from moeinf.runtime.sizes import parse_memory
from tests.conftest import Open
from tests.watched import Watched

GREEDY = SamplingOptions(temperature=0)
SAMPLED = SamplingOptions(temperature=1.5, seed=11)
PROMPTS = ("17+25=", "sort owl, fig, zebra, ant", "4091 in words", "close ([{<", "hello")


def tokens(engine: Engine, prompt: str, options: SamplingOptions = GREEDY) -> list[int]:
    answer = Conversation(engine).ask(prompt, options, Limits(max_tokens=40))
    list(answer)
    return answer.tokens


def answer(engine: Engine, prompt: str) -> str:
    return "".join(Conversation(engine).ask(prompt, GREEDY, Limits(max_tokens=80)))


def test_the_demo_answers(open_engine: Open) -> None:
    engine = open_engine(memory="30%")
    assert answer(engine, "17+25=") == "42"
    assert answer(engine, "sort owl, fig, zebra, ant") == "ant, fig, owl, zebra"
    assert answer(engine, '{"name": "Ana", "age": 31} age') == "31"


@pytest.mark.parametrize("model", ["demo", "demo:f32"])
def test_memory_never_changes_the_tokens(model: str, open_engine: Open) -> None:
    full = open_engine(model)
    least = full.info.placement.min_memory_bytes
    assert least <= 4 * full.info.manifest.top_k * full.info.slot_bytes
    third, smallest = open_engine(model, memory="30%"), open_engine(model, memory=str(least))
    assert full.info.slots == 192
    assert (third.info.slots, smallest.info.slots) == (57, 8)
    for prompt in PROMPTS:
        for options in (GREEDY, SAMPLED):
            expected = tokens(full, prompt, options)
            assert tokens(third, prompt, options) == expected
            assert tokens(smallest, prompt, options) == expected
    stats = smallest.store.stats  # 8 slots, 24 experts per token: every hit was prefetched
    ahead = stats.decode_hits_hinted + stats.decode_hits_predicted
    assert 0 < ahead <= stats.decode_hits < ahead + 0.3 * stats.decode_events
    assert 0.3 < (third.store.stats.hit_rate or 0) < 1
    assert full.store.stats.loads <= 192


def test_a_prompt_that_needs_more_experts_than_slots(open_engine: Open) -> None:
    """A prefill chunk of 200 different bytes uses nearly all 32 experts of a layer.

    8 slots are enough for it.
    """
    full, small = open_engine(), open_engine(memory="393216")
    ids = [16 + i for i in range(200)]
    distinct: list[int] = []

    class Counting(Watched):
        def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Pending:
            distinct.append(len(ids.unique()))
            return super().submit(layer, x, ids, weights)

    with small.routed_through(Counting):
        logits = small.extend(small.new_state(), ids)
    assert small.info.slots == 8 < max(distinct)
    assert (logits == full.extend(full.new_state(), ids)).all()
    assert small.store.idle


def test_too_little_memory_names_the_least(open_engine: Open) -> None:
    with pytest.raises(DoesNotFit) as caught:
        open_engine(memory="393215")
    assert caught.value.min_bytes == 393216


def test_contexts(open_engine: Open) -> None:
    assert open_engine().info.context == 512
    assert open_engine(context=64).new_state().capacity == 64
    with pytest.raises(BadContext, match="context of at most 512 tokens, got 513"):
        open_engine(context=513)


@pytest.mark.parametrize("memory", [None, "30%", "64MiB"])
def test_the_kv_cache_takes_a_share_of_what_is_free(memory: str | None, demo_home: Path) -> None:
    demo = Library(Settings(demo_home)).read("demo")[0]
    config = EngineConfig(memory=None if memory is None else parse_memory(memory))
    placement = place(replace(demo, max_context=1 << 30), config, 8 << 30, 2)
    assert 1.4 * (1 << 30) < placement.kv_bytes < 2 << 30
    assert placement.peak_bytes < 3 << 30  # a second model has room, too


def test_stopping_in_the_middle_of_a_pass(open_engine: Open) -> None:
    engine = open_engine(memory="30%")
    state = engine.new_state()
    asked = 0

    def stop_in_the_fourth_layer() -> bool:
        nonlocal asked
        asked += 1
        return asked == 4

    with engine.stoppable(stop_in_the_fourth_layer), pytest.raises(Stopped):
        engine.extend(state, [1, 2, 3])
    assert engine.store.idle
    assert state.length == 0
    assert answer(engine, "17+25=") == "42"


@pytest.fixture
def own_home(tmp_path: Path, demo_home: Path) -> Path:
    """Return a copy of the demo that a test may damage."""
    shutil.copytree(demo_home / "models/demo/bf16", tmp_path / "models/demo/bf16")
    return tmp_path


def open_in(home: Path) -> Engine:
    manifest, folder = Library(Settings(home)).read("demo")
    return Engine.open(manifest, folder, EngineConfig(memory=parse_memory("30%")), Settings(home))


def flip(path: Path, place: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[place] ^= 0x10
    path.write_bytes(raw)


def test_a_flipped_byte_in_a_shard_is_never_a_wrong_token(own_home: Path) -> None:
    for shard in (own_home / "models/demo/bf16/experts/L002").iterdir():
        flip(shard, 9000)
    with open_in(own_home) as engine:
        conversation = Conversation(engine)
        with pytest.raises(ExpertReadError) as caught:
            list(conversation.ask("17+25=", GREEDY, Limits()))
        assert conversation.messages == []  # half an answer is not stored
        assert caught.value.shard.startswith("experts/L002/E")
        assert engine.store.idle


@pytest.mark.parametrize("damage", ["flipped", "truncated", "gone", "header"])
def test_damaged_dense_weights(damage: str, own_home: Path) -> None:
    path = own_home / "models/demo/bf16/dense.safetensors"
    if damage == "flipped":
        flip(path, path.stat().st_size - 1000)
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "header":
        flip(path, 9)
    else:
        path.unlink()
    with pytest.raises(DamagedModel, match=r"demo:bf16.*dense\.safetensors"):
        open_in(own_home)
    assert list((own_home / "run").glob("*.json")) == []


@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja"]
)
def test_a_damaged_small_file_is_named(file: str, own_home: Path) -> None:
    flip(own_home / "models/demo/bf16" / file, 30)
    with pytest.raises(DamagedModel, match=f"demo:bf16: {file} is not what was pulled"):
        open_in(own_home)
    (own_home / "models/demo/bf16" / file).unlink()
    with pytest.raises(DamagedModel, match=file):
        open_in(own_home)


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "x"), ("dense_bytes", None), ("kv_bytes_per_token", 0), ("layers", True),
     ("tag", 7), ("format", 9), ("layout", 9), ("experts", 33), ("hidden", 64),
     ("usual_context", 0), ("usual_context", True), ("usual_context", 1 << 40)],
)  # fmt: skip
def test_a_manifest_that_makes_no_sense(field: str, value: object, own_home: Path) -> None:
    manifest = own_home / "models/demo/bf16/manifest.json"
    about = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**about, field: value}))
    with pytest.raises(DamagedModel, match=r"manifest\.json|demo:bf16"):
        open_in(own_home)


def test_a_damaged_manifest_is_listed_as_such(own_home: Path) -> None:
    manifest = own_home / "models/demo/bf16/manifest.json"
    about = json.loads(manifest.read_text())
    about["files"][0]["path"] = "../../../etc/passwd"
    manifest.write_text(json.dumps(about))
    with pytest.raises(DamagedModel, match="leaves the model's folder"):
        open_in(own_home)
    (entry,) = Library(Settings(own_home)).installed()
    assert entry.manifest is None
    assert "leaves the model's folder" in entry.problem


def test_greedy_equals_transformers_token_for_token(open_engine: Open) -> None:
    """float32, the checkpoint as it was trained, and an independent implementation."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        DEMO_CHECKPOINT,
        dtype=torch.float32,
        experts_implementation="eager",
        attn_implementation="eager",
    )
    engine = open_engine("demo:f32", memory="30%")
    lines = (DEMO_CHECKPOINT / "heldout.jsonl").read_text().splitlines()
    one_of_each = {item["kind"]: item["prompt"] for item in map(json.loads, lines)}
    for question in one_of_each.values():
        conversation = Conversation(engine)
        reply = conversation.ask(question, GREEDY, Limits(max_tokens=60))
        list(reply)
        prompt = torch.tensor([conversation.prompt(conversation.messages[:1])])
        expected = model.generate(prompt, do_sample=False, max_new_tokens=60)
        assert reply.tokens == expected[0, prompt.shape[1] :].tolist()


def test_slow_kernels_are_said(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine("demo") as engine:
        assert any(note.startswith("kernels: ") for note in engine.info.choices)
    monkeypatch.setattr("moeinf.runtime.engine.opening.kernels_are_fast", lambda: False)
    with open_engine("demo") as engine:
        assert any("no AVX2" in note for note in engine.info.choices)
    with open_engine("demo:f32") as engine:
        assert not any(note.startswith("kernels: ") for note in engine.info.choices)
