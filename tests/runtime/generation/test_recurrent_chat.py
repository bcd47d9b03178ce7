"""Conversations with a recurrent model: the state that a later turn reuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.chat import Conversation
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.placement.plan import place
from moeinf.runtime.requests import Limits
from moeinf.runtime.sampling.sampler import SamplingOptions
from moeinf.runtime.sizes import parse_memory
from scripts.make_checkpoint import byte_tokenizer
from tests.conftest import endless, pull
from tests.tiny import save_tiny

GREEDY = SamplingOptions(temperature=0)
# The tiny vocabulary has no space. The text's end lies after the first chunk of a pass.
QUESTION = "A-QUESTION-OF-SOME-LENGTH,SO-THAT-ITS-END-LIES-BEHIND-THE-FIRST-CHUNK-OF-64-IN-A-PASS"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifest, Path, Settings]:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_tiny("qwen3.5", folder, seed=1)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = Settings(tmp_path_factory.mktemp("home"))
    manifest = pull(folder, settings, "tiny:f32")
    return manifest, Library(settings).folder(manifest.model), settings


def test_another_end_starts_from_the_last_mark(model: tuple[Manifest, Path, Settings]) -> None:
    manifest, folder, settings = model
    texts = [QUESTION, QUESTION + "-AND-MORE", QUESTION, QUESTION[:70] + "!"]
    answers, prefilled = [], []
    with Engine.open(manifest, folder, EngineConfig(context=300), settings) as engine:
        endless(engine)
        one = Conversation(engine)
        for text in texts:
            answer = one.complete(text, GREEDY, Limits(20))
            list(answer)
            answers.append(answer.tokens)
            prefilled.append((answer.prompt_tokens, answer.prefilled_tokens))
        for text, tokens in zip(texts, answers, strict=True):
            fresh = Conversation(engine).complete(text, GREEDY, Limits(20))
            list(fresh)
            assert fresh.tokens == tokens
    lengths = [count for count, _ in prefilled]
    assert prefilled[0] == (lengths[0], lengths[0])
    assert [new for _, new in prefilled[1:]] == [count - 64 for count in lengths[1:]]


def test_residency_changes_nothing(model: tuple[Manifest, Path, Settings]) -> None:
    manifest, folder, settings = model
    answers = []
    for memory in ("100%", str(manifest.slots.min_bytes)):
        config = EngineConfig(memory=parse_memory(memory), context=200)
        with Engine.open(manifest, folder, config, settings) as engine:
            endless(engine)
            answer = Conversation(engine).complete(QUESTION, GREEDY, Limits(24))
            list(answer)
            answers.append(answer.tokens)
    assert answers[0] == answers[1]


def test_the_plan_counts_it(model: tuple[Manifest, Path, Settings]) -> None:
    manifest, _, _ = model
    placement = place(manifest, EngineConfig(context=100), 8 << 30, 2)
    assert manifest.state_bytes > 0
    assert placement.kv_bytes == manifest.state_bytes + 100 * manifest.kv_bytes_per_token
