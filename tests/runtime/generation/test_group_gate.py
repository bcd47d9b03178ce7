"""The choice between passes of one request and of all, with made-up times."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

from moeinf.runtime.generation.group_gate import GroupGate
from moeinf.runtime.generation.in_flight import Running

USERS = 4


def run(gate: GroupGate, passes: int, seconds: Callable[[int], float], wait: float) -> list[int]:
    """Return the rows of each pass. seconds: of a pass, by rows; wait: the share of it."""
    used = []
    for _ in range(passes):
        rows = 1 if gate.alone else USERS
        used.append(rows)
        gate.passed(rows, USERS, seconds(rows), wait * seconds(rows))
    return used


def rate(used: list[int], seconds: Callable[[int], float]) -> float:
    """Return tokens per second, in those of one request after the other."""
    return sum(used) / sum(map(seconds, used)) * seconds(1)


def slower_together(rows: int) -> float:
    return rows**1.23  # 0.73 times as fast with 4


def faster_together(rows: int) -> float:
    return 1 + 0.5 * (rows - 1)


def test_all_share_a_pass_from_memory() -> None:
    assert run(GroupGate(), 50, slower_together, wait=0.0) == [USERS] * 50


def test_one_after_the_other_where_that_is_faster() -> None:
    gate = GroupGate()
    used = run(gate, 3000, slower_together, wait=0.5)
    assert used[:3] == [USERS, USERS, 1]  # the first passes show that the disk decides
    assert used.count(USERS) < 60
    assert rate(used, slower_together) > 0.98


def test_together_where_that_is_faster() -> None:
    gate = GroupGate()
    used = run(gate, 3000, faster_together, wait=0.5)
    assert used[-1] == USERS
    assert rate(used, faster_together) > 0.95 * 4 / faster_together(4)


def test_a_bad_trial_ends_early() -> None:
    used = run(GroupGate(), 120, lambda rows: rows**2, wait=0.5)
    assert used == [USERS] * 2 + [1] * 64 + [USERS] * 8 + [1] * 46


def test_trials_cost_one_percent() -> None:
    """The next trial comes when the loss of the last one is 1 % of the tokens since."""
    gate = GroupGate()
    run(gate, 66, slower_together, wait=0.5)
    used = run(gate, 4000, slower_together, wait=0.5)
    assert used[0] == USERS
    assert 3 * 8 <= used.count(USERS) <= 4 * 8
    assert rate(used, slower_together) > 0.988


def test_a_trial_without_a_loss_is_soon_repeated() -> None:
    used = run(GroupGate(), 300, lambda rows: rows * 1.0, wait=0.5)
    assert used.count(USERS) == 2 + 3 * 16


def test_changes_when_the_workload_does() -> None:
    gate = GroupGate()
    run(gate, 500, slower_together, wait=0.5)
    assert not gate.together
    run(gate, 3000, faster_together, wait=0.5)
    assert gate.together
    run(gate, 3000, slower_together, wait=0.5)
    assert not gate.together
    assert run(gate, 60, slower_together, wait=0.0)[-1] == USERS  # all experts are in memory now


def test_one_request_is_never_held_back() -> None:
    gate = GroupGate()
    for _ in range(300):
        assert gate.group([]) == []
        gate.passed(1, 1, 1.0, 0.5)
        assert gate.group([one := request(9)]) == [one]


def request(tokens: int, *, prefilled: bool = True, embed: bool = False) -> Running:
    """Return a stand-in with what the gate reads."""
    answer, asked = SimpleNamespace(tokens=range(tokens)), SimpleNamespace(embed=embed)
    return cast(Running, SimpleNamespace(answer=answer, request=asked, prefilled=prefilled))


def test_turns() -> None:
    """A request decodes 256 tokens before the next; prompts wait for the first turns only."""
    gate = GroupGate()
    gate.passed(1, 2, 1.0, 0.9)
    assert gate.alone
    old, young, waiting = request(255), request(3), request(0, prefilled=False)
    text = request(0, prefilled=False, embed=True)
    everyone = [old, young, waiting, text]
    assert gate.group([old, young]) == [old]
    assert gate.group([request(256), young]) == [young]
    assert gate.group([longer := request(300), request(513)]) == [longer]
    assert gate.admitted(everyone, [old, young]) == [old, young, text]
    assert gate.admitted(everyone, [longer]) == everyone
    assert gate.admitted([waiting, text], []) == [waiting, text]
