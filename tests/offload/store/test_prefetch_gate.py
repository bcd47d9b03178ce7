"""Test that prefetching stops without waits, starts with them, and that prefetches are weighed."""

from __future__ import annotations

import pytest

from moeinf.offload.policy.base import Prefetch
from moeinf.offload.store import prefetch_gate
from moeinf.offload.store.prefetch_gate import Calls, Gate, Judge, Throttle, Times


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


def accepted(judge: Judge, probability: float, cell: int = 4, layer: int = 0) -> bool:
    return bool(judge.worth([Prefetch(cell, True, probability)], layer))


@pytest.mark.parametrize(
    ("times", "least"),
    [
        (Times(read=10.0, piece=2.0, layer=20.0), 1.5 / 11.5),  # p·10 > (1 - p)·(0.5·1 + 0.1·10)
        (
            Times(read=10.0, piece=2.0, layer=2.0),
            6 / 8,
        ),  # 2 of the 10 fit before the layer; five are cut
        (Times(read=10.0, piece=10.0, layer=20.0), 3.5 / 13.5),  # a read that cannot be cut
    ],
)
def test_a_wish_has_to_be_worth_its_time(times: Times, least: float) -> None:
    for probability in (least - 0.01, least + 0.01):
        judge = Judge(4, 4, times)
        assert accepted(judge, probability) == (probability > least)


def test_more_slack_for_a_later_layer() -> None:
    """Cell 4 is of layer 1. After layer 1 it comes again after three more layers."""
    judge = Judge(4, 4, Times(read=10.0, piece=2.0, layer=2.0))
    assert not accepted(judge, 0.55, layer=0)
    assert accepted(judge, 0.55, layer=2)
    assert accepted(judge, 0.55, layer=1)
    assert not accepted(judge, 0.55, layer=0)
    assert judge.worth([Prefetch(4, True, 0.55)], 0, begun={4})  # a read that has begun goes on


def test_claims_that_do_not_come_true_are_corrected_and_tried_again() -> None:
    judge = Judge(4, 4, Times(read=10.0, piece=2.0, layer=20.0))
    reads = 0
    while accepted(judge, 1.0):
        judge.judged(4, used=False)
        reads += 1
        assert reads < 200
    passes = 0
    while not accepted(judge, 1.0):
        judge.begin_pass()
        passes += 1
        assert passes < 100
    assert passes >= 1
    for _ in range(300):
        judge.judged(4, used=True)
        assert accepted(judge, 0.9)


def test_victims_that_are_missed_make_reads_dearer() -> None:
    judge = Judge(4, 4, Times(read=10.0, piece=2.0, layer=20.0))
    assert accepted(judge, 0.3)
    for _ in range(200):
        judge.displaced(9)
        judge.missed(9)
        judge.begin_pass()
    assert not accepted(judge, 0.3)
    for _ in range(400):
        judge.displaced(9)
        judge.begin_pass()
        judge.begin_pass()
    judge.missed(9)  # long after
    assert accepted(judge, 0.3)


def test_the_times_are_measured() -> None:
    """Until a read has ended, all is worth it. A slow drive then needs surer prefetches."""
    judge = Judge(4, 4)
    assert accepted(judge, 0.01)
    judge.measured(4.0, Calls(), 5)
    assert judge.times is None
    judge.measured(4.0, Calls(2, 1.0), 5)
    assert judge.times == Times(read=0.5, piece=0.1, layer=1.0, pieces=5)
    assert accepted(judge, 0.3)
    for token in range(200):
        judge.measured(4.0, Calls(2 * token + 4, 80.0 * token), 5)
    assert judge.times.read == pytest.approx(40, rel=1e-3)
    assert not accepted(judge, 0.3)
    assert accepted(judge, 0.97)


def test_reads_of_a_prompt_are_left_out() -> None:
    """They run many at a time: decoding starts with its own times."""
    judge = Judge(10, 4)
    prompt = Calls(800, 800 * 0.030)
    judge.starts(prompt)
    decoded = Calls(prompt.whole + 40, prompt.whole_seconds + 40 * 0.006)
    judge.measured(0.1, decoded, 8.0)
    assert judge.times is not None
    assert judge.times.read == pytest.approx(0.006)


def test_pieces_that_wait_as_long_as_whole_reads_are_not_worth_it() -> None:
    """Another program keeps the drive busy. When it has ended, reads ahead are tried again."""
    judge, calls = Judge(4, 4), Calls()
    for _ in range(50):
        calls = Calls(calls.whole + 4, calls.whole_seconds + 4, calls.pieces + 9,
                      calls.piece_seconds + 7)  # fmt: skip
        judge.measured(2.0, calls, 5)
    assert judge.times is not None
    assert judge.times.call == pytest.approx((5 * 7 / 9 - 1) / 4, rel=0.03)
    assert not accepted(judge, 1.0)
    passes = 0
    while not accepted(judge, 1.0):
        calls = Calls(calls.whole + 4, calls.whole_seconds + 4, calls.pieces, calls.piece_seconds)
        judge.measured(2.0, calls, 5)
        passes += 1
        assert passes < 100
    assert passes > 20


def test_a_drive_that_is_slow_for_all_opens_the_throttle() -> None:
    """Waiting opens it, also when reads ahead are no use: the judge and the queue bound those."""
    throttle = Throttle(0.05)
    for _ in range(100):
        throttle.passed(0.0001, 0.02)
    assert not throttle.open
    for _ in range(5):
        throttle.passed(0.02, 0.04)  # another program reads the drive
    assert throttle.open


class Clock:
    """Seconds that only a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.saved = 0.0
        monkeypatch.setattr(prefetch_gate.time, "perf_counter", lambda: self.now)

    def passes(self, gate: Gate, count: int, spent: float, saved: float = 0.0) -> list[bool]:
        """Run passes that ask while the gate is open; return if each one did."""
        asked = []
        for _ in range(count):
            asked.append(gate.open)
            if gate.open:
                gate.asks()
                self.now += spent
                gate.answered()
                self.saved += saved
            self.now += 1.0  # the pass itself
            gate.passed(0.5, 1.0, self.saved)
        return asked


def test_asking_stops_where_it_saves_nothing_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight passes are a trial. The pauses are 64, 128 ... 1024 passes, then 64 again."""
    clock, gate = Clock(monkeypatch), Gate(0.05, tries=True)
    asked = clock.passes(gate, 6000, spent=0.01, saved=0.019)
    trials = [n for n in range(len(asked)) if asked[n] and (n == 0 or not asked[n - 1])]
    assert trials[:7] == [0, 72, 208, 472, 992, 2024, 3056]
    assert sum(asked) == 8 * len(trials)
    while not gate.open:
        clock.passes(gate, 1, 0.0)
    assert all(clock.passes(gate, 800, spent=0.01, saved=0.021))
    stopped = clock.passes(gate, 80, spent=0.01)
    assert stopped == [True] * 8 + [False] * 64 + [True] * 8


@pytest.mark.parametrize(("slow", "stays"), [(3, True), (5, False)])
def test_a_few_passes_that_lose_the_processor_end_no_trial(
    monkeypatch: pytest.MonkeyPatch, slow: int, stays: bool
) -> None:
    """The median of a trial counts, so most of its passes have to be slow."""
    clock, gate = Clock(monkeypatch), Gate(0.05, tries=True)
    clock.passes(gate, slow, spent=9.0, saved=0.03)
    clock.passes(gate, 8 - slow, spent=0.01, saved=0.03)
    assert gate.open == stays


def test_without_waits_no_trial_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, gate = Clock(monkeypatch), Gate(0.6, tries=True)
    assert clock.passes(gate, 99, spent=0.01) == [True] + [False] * 98
    gate.passed(99.0, 99.0, 0.0)  # only the first pass was of a trial
    assert clock.passes(gate, 7, spent=0.01, saved=0.0) == [True] * 7
    assert not gate.open


def test_a_gate_of_no_trials_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(Clock(monkeypatch).passes(Gate(0.0, tries=False), 99, spent=0.01))


@pytest.mark.parametrize(
    ("layers", "saves"),
    [
        ([(2, 8.0)], 4),  # one kind of layer: the mean wait
        ([(0, 0.0), (1, 4.0), (2, 8.0)], 4),  # one after the other
        ([(1, 5.0), (2, 6.0), (3, 7.0)], 1),  # mostly at once
        ([(1, 6.0), (3, 6.0)], 0),  # wholly at once
        ([(1, 6.0), (3, 2.0)], 0),  # noise
        ([(1, 1.0), (2, 9.0)], 10 / 3),  # more than the mean: the mean
        ([(1, 30.0), (2, 60.0)], 10),  # longer than a read: a read
    ],
)
def test_reads_ahead_save_what_a_miss_costs_its_layer(
    layers: list[tuple[int, float]], saves: float
) -> None:
    """A read takes 10, one more call nothing. A wrong one costs 0.5 · 1 + 0.1 · what it saves."""
    judge = Judge(4, 4)
    for misses, waited in layers:
        judge.layer(misses, waited)
    judge.measured(80.0, Calls(2, 20.0), 5)
    assert judge.times == Times(read=10.0, piece=2.0, layer=20.0, pieces=5)
    assert accepted(judge, 0.9) == (saves > 0)
    judge.judged(4, used=True)
    assert judge.saved == pytest.approx(saves)
    accepted(judge, 0.9)
    judge.judged(4, used=False)
    judge.judged(4, used=True)  # no read of a prefetch that was found worth it
    assert judge.saved == pytest.approx(saves - (0.5 + 0.1 * saves if saves else 0))
