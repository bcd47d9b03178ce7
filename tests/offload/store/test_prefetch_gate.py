"""Test that prefetching stops without waits, and starts again with them."""

from __future__ import annotations

from moeinf.offload.store.prefetch_gate import Throttle


def test_open_until_a_token_has_shown_that_nothing_waits() -> None:
    throttle = Throttle(0.05)
    assert throttle.open
    throttle.passed(0.0, 0.01)
    assert not throttle.open


def test_the_share_is_of_the_last_tokens() -> None:
    """Some 45 tokens without waits close the gate after long waits; a few long waits open it."""
    throttle = Throttle(0.05)
    for _ in range(1000):
        throttle.passed(0.01, 0.02)  # half of the time
    closed_after = 0
    while throttle.open:
        throttle.passed(0.0, 0.02)
        closed_after += 1
    assert 42 < closed_after < 48  # 0.95 ** n < 0.1
    throttle.passed(0.0, 0.02)
    opened_after = 0
    while not throttle.open:
        throttle.passed(0.01, 0.02)
        opened_after += 1
    assert opened_after == 1


def test_none_is_always_open() -> None:
    throttle = Throttle(0.0)
    throttle.passed(0.0, 1.0)
    assert throttle.open
