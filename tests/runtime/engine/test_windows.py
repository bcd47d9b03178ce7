"""A long prompt goes through a layer before the next: same bits, and each expert is read once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moeinf.offload.store.host_tier import _FEW
from moeinf.runtime.config import PREFILL_CHUNK, EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.runtime.sizes import parse_memory
from tests.conftest import Open, pull

IDS = [16 + (37 * place + place // 7) % 200 for place in range(PREFILL_CHUNK + 199)]


def read(engine: Engine, ids: list[int]) -> tuple[NDArray[np.float32], int]:
    """Return the logits after the prompt, and the experts that were read for it."""
    before = engine.store.stats.loads
    logits = engine.extend(engine.new_state(), ids)
    assert engine.store.idle
    return logits, engine.store.stats.loads - before


@pytest.mark.first
@pytest.mark.parametrize("model", ["demo", "demo:bf16", "demo:f32"])
@pytest.mark.parametrize("policy", ["adaptive", "lru", "lfu"])
def test_each_expert_is_read_once(model: str, policy: str, open_engine: Open) -> None:
    """A window reads what it uses and lacks; two chunks read nearly twice as much."""
    full = open_engine(model, trace=False)  # nothing is read for past requests
    expected, used = read(full, IDS)
    for memory in ("30%", str(full.info.placement.min_memory_bytes)):
        short = open_engine(model, memory=memory, policy=policy, window=PREFILL_CHUNK, trace=False)
        long = open_engine(
            model, memory=memory, policy=policy, window=2 * PREFILL_CHUNK, trace=False
        )
        assert (full.window, long.window) == (PREFILL_CHUNK, 2 * PREFILL_CHUNK)
        for _ in range(2):  # nothing resident, then what the first prompt left
            resident = long.store.resident
            twice, more = read(short, IDS)
            once, less = read(long, IDS)
            assert np.array_equal(once, expected)
            assert np.array_equal(twice, expected)
            assert less <= used * (1.05 if policy == "adaptive" else 1)  # some hints are wrong
            assert less < 0.7 * more
        if policy == "lru":  # nothing is read ahead: it brings back only those that left too early
            assert less <= used - resident + _FEW


def test_a_short_prompt_is_hinted_too(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of a few tokens uses many experts, so each layer names the next one's."""
    full, engine = open_engine(trace=False), open_engine(memory="30%", window=512, trace=False)
    hinted: list[int] = []
    hint = engine.store.hint

    def told(layer: int, *given: Any) -> None:
        hinted.append(layer)
        hint(layer, *given)

    monkeypatch.setattr(engine.store, "hint", told)
    assert np.array_equal(read(engine, IDS[:20])[0], read(full, IDS[:20])[0])
    assert hinted == list(range(1, engine.info.manifest.layers))


@pytest.mark.parametrize("window", [0, -256, 100])
def test_a_window_is_at_least_a_chunk(window: int) -> None:
    with pytest.raises(InvalidValue, match="at least 256"):
        EngineConfig(window=window)


@pytest.mark.full
def test_a_prompt_of_8192_tokens_has_the_same_bits(tmp_path: Path) -> None:
    """Windows of 256, 1,000 and 8,192 tokens; 1,000 is three chunks."""
    checkpoint, settings = tmp_path / "long", Settings(tmp_path / "home")
    shutil.copytree(DEMO_CHECKPOINT, checkpoint)
    about = json.loads((checkpoint / "config.json").read_text())
    about["max_position_embeddings"] = 8448
    (checkpoint / "config.json").write_text(json.dumps(about))
    manifest = pull(checkpoint, settings, "long")
    prompt, found = (IDS * 19)[:8192], []
    for window, rounded in ((256, 256), (1000, 768), (8192, 8192)):
        config = EngineConfig(
            memory=parse_memory("30%"), context=8448, window=window, policy="lru", trace=False
        )
        with Engine.open(manifest, settings.models / "long/q4", config, settings) as engine:
            assert engine.window == rounded
            state = engine.new_state()
            logits, loads = engine.extend(state, prompt), engine.store.stats.loads
            found.append((loads, logits, engine.extend(state, [5])))
    (most, *first), (fewer, *second), (least, *third) = found
    assert all(map(np.array_equal, first, second))
    assert all(map(np.array_equal, first, third))
    assert least <= manifest.slots.experts + _FEW < fewer < most
