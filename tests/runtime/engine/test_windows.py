"""A long prompt goes through a layer before the next: same bits, and each expert is read once."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from moeinf.offload.store.host_tier import _FEW
from moeinf.runtime.config import PREFILL_CHUNK, EngineConfig
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.invalid import InvalidValue
from tests.conftest import Open

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


@pytest.mark.parametrize("window", [0, -256, 100, 300])
def test_a_window_is_whole_chunks(window: int) -> None:
    with pytest.raises(InvalidValue, match="multiple of 256"):
        EngineConfig(window=window)
