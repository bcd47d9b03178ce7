"""A reused prefix: which tokens are kept, and that the result differs by rounding alone."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from moeinf.runtime.config import PREFILL_CHUNK
from moeinf.runtime.engine.engine import Engine
from tests.conftest import Open

# The number of rows of a product decides its rounding. Seen with bf16: 0.036 on a processor without
# AVX-512, where both ways are 0.012 and 0.028 from float32.
TOLERANCE = {"demo:f32": 1e-5, "demo:bf16": 6e-2, "demo": 6e-2}  # of the largest logit
IDS = [16 + (37 * place + place // 7) % 200 for place in range(PREFILL_CHUNK + 90)]


def continued(engine: Engine, cut: int, decoded: int) -> NDArray[np.float32]:
    """Return the logits after IDS where a state had `cut` of its tokens, the last by decoding."""
    state = engine.new_state()
    engine.extend(state, [*IDS[: cut - decoded]])
    for token in IDS[cut - decoded : cut]:
        engine.step([(state, token)])
    engine.step([(state, 17)])  # a token that differs
    state.truncate(cut)
    return engine.extend(state, IDS[cut:])


@pytest.mark.parametrize("model", TOLERANCE)
def test_a_reused_prefix_changes_rounding_alone(model: str, open_engine: Open) -> None:
    """Cut before, at and after a chunk's border, behind prefill and behind an answer."""
    engine = open_engine(model, trace=False)
    fresh = engine.extend(engine.new_state(), IDS)
    worst = 0.0
    for cut, decoded in ((3, 0), (200, 9), (PREFILL_CHUNK, 0), (len(IDS) - 20, 30)):
        found = continued(engine, cut, decoded)
        worst = max(worst, float(np.abs(found - fresh).max() / np.abs(fresh).max()))
        assert found.argmax() == fresh.argmax()
    assert worst <= TOLERANCE[model]


@pytest.mark.parametrize("model", ["demo", "demo:bf16"])
def test_residency_does_not_change_a_reused_prefix(model: str, open_engine: Open) -> None:
    engine = open_engine(model, trace=False)
    full = continued(engine, 200, 9)
    least = str(engine.info.placement.min_memory_bytes)
    for memory in ("30%", least):
        assert np.array_equal(continued(open_engine(model, memory, trace=False), 200, 9), full)
