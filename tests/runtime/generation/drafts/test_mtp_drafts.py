"""Answers that layers for multi-token prediction draft are those without."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.engine.mtp_engine import MtpEngine
from moeinf.runtime.generation.events import Event
from moeinf.runtime.library.library import Library
from moeinf.runtime.sizes import parse_memory
from tests.conftest import endless, pull
from tests.runtime.generation.drafts.test_model_drafts import (  # noqa: F401
    PROMPTS,
    answers,
    drafts,
    often,
    told,
)
from tests.tiny_modules import checkpoint

Opened = Callable[..., Engine]
NAMES = ["glm4", "deepseek-v3", "qwen3-next", "mimo"]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    found = Settings(tmp_path_factory.mktemp("home"))
    for name in NAMES:
        folder = tmp_path_factory.mktemp(name)
        checkpoint(name, folder)
        pull(folder, found, f"{name}:q8")
    return found


@pytest.fixture
def opened(settings: Settings) -> Iterator[Opened]:
    engines: list[Engine] = []

    def open_one(name: str, memory: str = "100%", **options: Any) -> Engine:
        manifest, folder = Library(settings).read(f"{name}:q8")
        if memory == "least":
            memory = str(manifest.slots.min_bytes)
        config = EngineConfig(memory=parse_memory(memory), context=128, **options)
        engines.append(Engine.open(manifest, folder, config, settings))
        endless(engines[-1])
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close()


def often_right(found: list[list[Event]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace nine of ten tokens that the layers predict by those of these answers."""
    texts = [[*prompt, *told(events)[1]] for prompt, events in zip(PROMPTS * 2, found, strict=True)]
    predict, draw = MtpEngine.extend, random.Random(3)

    def extend(self: MtpEngine, ids: Any, stopped: Any) -> tuple[int, float]:
        token, chance = predict(self, ids, stopped)
        known, at = self._states._tokens, self.place
        text = next(t for t in texts if t[: len(known)] == known)
        return (text[at] if at < len(text) and draw.random() < 0.9 else token), chance

    monkeypatch.setattr(MtpEngine, "extend", extend)


@pytest.mark.matrix
@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("memory", ["100%", "60%", "least"])
@pytest.mark.parametrize("policy", ["learned", "lru"])
@pytest.mark.parametrize("name", NAMES)
def test_the_same_answers(
    name: str, policy: str, memory: str, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(opened(name, speculation=False))
    engine = opened(name, memory, policy=policy)
    assert isinstance(engine.draft, MtpEngine)
    often_right(expected, monkeypatch)
    found = answers(engine)
    assert list(map(told, found)) == list(map(told, expected))
    drafted, accepted = drafts(found)
    assert drafted // 5 < accepted < drafted


def test_by_the_measured_gate(opened: Opened) -> None:
    """At real costs, and with what the layers predict."""
    found = answers(opened("glm4"), 60)
    expected = answers(opened("glm4", mtp=False), 60)
    assert list(map(told, found)) == list(map(told, expected))
    assert opened("glm4", mtp=False).draft is None
