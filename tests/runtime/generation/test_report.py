"""The prefetch report: causes of hits, bytes read and bytes wasted."""

from __future__ import annotations

from moeinf.offload.store.stats import StoreStats
from moeinf.runtime.generation.chat import Conversation
from moeinf.runtime.generation.report import foresight, verbose_lines
from moeinf.runtime.requests import Limits
from moeinf.runtime.sampling.sampler import SamplingOptions
from tests.conftest import Open

_GREEDY = SamplingOptions(temperature=0)
_STATS = StoreStats(
    decode_events=100, decode_hits=80, decode_hits_hinted=20, decode_hits_predicted=15,
    ahead_bytes_read=4 << 20, ahead_bytes_used=3 << 20, ahead_bytes_wasted=1 << 20,
    decode_policy_seconds=0.002,
)  # fmt: skip


def test_causes_add_up_to_the_hits() -> None:
    found = foresight(_STATS, steps=10)
    assert found["hits"] == {"cached": 45, "hinted": 20, "predicted": 15}
    assert found["ahead_bytes"] == {"read": 4 << 20, "used": 3 << 20, "wasted": 1 << 20}
    assert found["prefetch_accuracy"] == 0.75
    assert found["policy_us_per_token"] == 200.0


def test_nothing_decoded_and_nothing_read_ahead() -> None:
    found = foresight(StoreStats(), steps=0)
    assert found["prefetch_accuracy"] is None
    assert found["policy_us_per_token"] is None


def test_a_victim_that_came_back_wastes_nothing() -> None:
    """Its bytes were counted before this period and returned within it."""
    found = foresight(StoreStats(ahead_bytes_used=5, ahead_bytes_wasted=-3), steps=1)
    assert found["ahead_bytes"]["wasted"] == 0
    assert found["prefetch_accuracy"] == 1.0


def test_verbose_says_the_same(open_engine: Open) -> None:
    engine = open_engine("demo:bf16", context=64)
    generation = Conversation(engine).ask("17+25=", _GREEDY, Limits(max_tokens=11))
    list(generation)
    assert generation.decode_steps == 2
    generation.store = _STATS
    lines = dict(verbose_lines(engine, generation, 0.0))
    assert lines["hits by cause"] == "45 cached, 20 hinted, 15 predicted"
    assert lines["deciding"] == "1000 us per token"
    assert lines["prefetch accuracy"] == "75% (4.0 MiB read ahead: 3.0 MiB used, 1.0 MiB wasted)"
