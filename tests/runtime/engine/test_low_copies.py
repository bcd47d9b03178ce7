"""Test engines that compute light absent experts with the model's tag q2."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moeinf.runtime.config import EngineConfig, LossyReproducible, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library, ModelInUse
from moeinf.runtime.library.low_copy import NoLowCopy
from moeinf.runtime.sizes import MemorySize, parse_memory
from tests.conftest import pull

LOSSY = EngineConfig(context=64, memory=parse_memory("30%"), q2_on_miss=0.3, threads=1)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    found = Settings(tmp_path_factory.mktemp("home"))
    for tag in ("bf16", "q2"):
        pull(DEMO_CHECKPOINT, found, f"demo:{tag}")
    return found


def opened(settings: Settings, config: EngineConfig, name: str = "demo:bf16") -> Engine:
    return Engine.open(*Library(settings).read(name), config, settings)


def logits(engine: Engine) -> torch.Tensor:
    state = engine.new_state()
    return torch.cat([engine.all_logits(state, [token]) for token in range(40, 72)])


def test_within_the_memory_and_in_use(settings: Settings) -> None:
    """The copies' slots are a part of --memory, and their model cannot be removed meanwhile."""
    with opened(settings, LOSSY) as engine:
        place, budget = engine.info.placement, engine.info.manifest.slots
        given = place.memory_bytes
        assert given == MemorySize(share=0.3).of(budget.max_bytes)
        assert place.low_slots > budget.top_k
        assert place.slots * place.slot_bytes + place.low_slots * place.low_slot_bytes <= given
        logits(engine)
        stats = engine.store.stats
        assert stats.low_reads > 0
        assert 0 < stats.decode_events_low < stats.decode_events
        with pytest.raises(ModelInUse):
            Library(settings).remove("demo:q2")
        half = budget.max_bytes // 2
        engine.set_memory(MemorySize(bytes=half))
        logits(engine)
        assert engine.info.placement.experts_bytes <= half


def test_exact_where_all_fit(settings: Settings) -> None:
    found = list[torch.Tensor]()
    for config in (LOSSY, replace(LOSSY, q2_on_miss=None)):
        with opened(settings, replace(config, memory=parse_memory("100%"))) as engine:
            found.append(logits(engine))
            assert engine.info.placement.low_bytes == 0
            assert engine.store.stats.low_reads == 0
    assert torch.equal(*found)


def test_refusals(settings: Settings, tmp_path: Path) -> None:
    """Few bits already, no copy, a copy of other weights, and options that contradict it."""
    with pytest.raises(NoLowCopy, match=r"2\.5 bits"):
        opened(settings, LOSSY, "demo:q2")
    elsewhere = Settings(tmp_path)
    pull(DEMO_CHECKPOINT, elsewhere, "demo:bf16")
    with pytest.raises(NoLowCopy, match="not on this machine"):
        opened(elsewhere, LOSSY)
    manifest = elsewhere.models / "demo" / "bf16" / "manifest.json"
    pull(DEMO_CHECKPOINT, elsewhere, "demo:q2")
    text = manifest.read_text()
    manifest.write_text(text.replace('"source": "', '"source": "other'))
    with pytest.raises(NoLowCopy, match="same checkpoint"):
        opened(elsewhere, LOSSY)
    for wrong in ({"reproducible": True}, {"device": "cuda"}, {"q2_on_miss": 1.0}):
        with pytest.raises((InvalidValue, LossyReproducible), match="--experts"):
            replace(LOSSY, **wrong)  # type: ignore[arg-type]
