"""The choice of a number of threads, with made-up times."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moeinf.runtime.engine.thread_tuner import ThreadTuner


def _run(tuner: ThreadTuner, steps: int, time_of: Callable[[int], float]) -> list[int]:
    """Return the threads of each step."""
    used = []
    for _ in range(steps):
        used.append(tuner.threads)
        tuner.took(time_of(used[-1]))
    return used


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ({1: 8, 2: 4, 4: 2, 8: 1}, 8),  # every thread helps
        ({1: 8, 2: 4, 4: 3, 8: 3}, 4),  # memory is saturated: fewer are as good
        ({1: 2, 2: 3, 4: 5, 8: 9}, 1),  # threads wait for cores that others use
        ({1: 4, 2: 2, 4: 2.5, 8: 3}, 2),
    ],
)
def test_finds_the_best(times: dict[int, float], best: int) -> None:
    tuner = ThreadTuner(8)
    _run(tuner, 1500, times.__getitem__)
    assert tuner.chosen == best


def test_a_bad_trial_is_short_and_rare() -> None:
    """Trying a count that is twice as slow costs less than 1 % of 4,000 steps."""
    used = _run(ThreadTuner(2), 4000, lambda threads: 1 / threads)
    assert used[:16] == [2] * 16
    assert 0 < used.count(1) < 0.005 * 4000


def test_returns_when_the_cores_are_free_again() -> None:
    tuner = ThreadTuner(2)
    _run(tuner, 300, lambda threads: float(threads))
    assert tuner.chosen == 1
    used = _run(tuner, 5000, lambda threads: 1 / threads)
    assert tuner.chosen == 2
    assert used[-100:] == [2] * 100


def test_noise_moves_nothing_far() -> None:
    """One slow step among the others of a trial decides nothing."""
    tuner, steps = ThreadTuner(2), iter(range(10**6))
    _run(tuner, 2000, lambda threads: 1 / threads + (3 if next(steps) % 7 == 0 else 0))
    assert tuner.chosen == 2


def test_one_thread_needs_no_trial() -> None:
    assert set(_run(ThreadTuner(1), 10_000, lambda _: 1.0)) == {1}
