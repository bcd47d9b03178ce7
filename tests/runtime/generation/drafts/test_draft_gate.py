"""The gate's arithmetic with given times: costs, the best number of rows, the bound of losses."""

from __future__ import annotations

import pytest

from moeinf.runtime.generation.drafts.draft_gate import DraftGate, DraftStats

SURE = [0.99**place for place in range(1, 16)]


def measured(costs: dict[int, float], times: int = 40) -> DraftGate:
    """Return a gate that knows that a pass of n rows costs costs[n], and one row 2 s."""
    gate = DraftGate()
    for _ in range(10):
        gate.passed(2.0, 0.0)
    for _ in range(times):
        for rows, cost in costs.items():
            gate.checked(DraftStats(gained=100.0), rows - 1, rows, 2 * cost, 0.0)
    return gate


def test_nothing_before_the_first_pass() -> None:
    assert DraftGate().worth(DraftStats(), SURE) == 0


def test_rows_grow_with_what_was_measured() -> None:
    gate, account, found = measured({}), DraftStats(), list[int]()
    for _ in range(6):
        drafted = gate.worth(account, SURE)
        found.append(drafted)
        gate.checked(account, drafted, drafted + 1, 2.0 * 1.2, 0.0)
    assert found == [1, 3, 7, 15, 15, 15]
    assert gate.worth(account, SURE[:5]) == 5
    assert gate.worth(account, SURE[:6]) == 5  # rows are 2, 3, 4, 6, 8, 12 or 16


def test_the_most_tokens_per_second() -> None:
    gate = measured({2: 1.5, 3: 2.0, 4: 3.6, 6: 5.4, 8: 7.2})
    assert gate.worth(DraftStats(), SURE) == 2  # (1 + 0.99 + 0.98) / 2.0
    assert gate.worth(DraftStats(), [0.9, 0.1]) == 1  # 1.9 / 1.5, and 2.0 / 2.0
    assert gate.worth(DraftStats(), [0.5, 0.3]) == 0  # 1.5 / 1.5, and 1.8 / 2.0
    assert gate.cost(3) == pytest.approx(2.0, abs=0.01)
    assert gate.cost(12) == pytest.approx(1 + 6.2 * 11 / 7, abs=0.05)  # from 8 rows


def test_a_cost_that_is_not_used_is_tried_again() -> None:
    gate = measured({2: 2.0})
    assert gate.worth(DraftStats(), [0.99]) == 0
    for _ in range(400):
        gate.passed(2.0, 0.0)
    assert gate.cost(2) == pytest.approx(1.5, abs=0.05)
    assert gate.worth(DraftStats(), [0.99]) == 1


def test_waiting_for_the_disk_ends_drafts() -> None:
    gate = measured({2: 1.1})
    assert gate.worth(DraftStats(), SURE) > 0
    for _ in range(20):
        gate.passed(2.0, 0.4)
    assert gate.worth(DraftStats(), SURE) == 0
    for _ in range(40):
        gate.passed(2.0, 0.0)
    assert gate.worth(DraftStats(), SURE) > 0


@pytest.mark.parametrize("drafted", [1, 15])
def test_losses_are_bounded(drafted: int) -> None:
    """Every draft is wrong, and is believed to be right, for 1,000 tokens."""
    gate, account, seconds = measured({}), DraftStats(), 0.0
    gate = measured({drafted + 1: 1.0}) if drafted > 1 else gate
    for _ in range(1000):
        if gate.worth(account, SURE[:drafted]):
            cost = 2.0 * (1 + 0.5 * drafted)
            gate.checked(account, drafted, 1, cost, 0.0)
            seconds += cost
        else:
            gate.passed(2.0, 0.0)
            seconds += 2.0
    assert account.drafted > 0
    assert account.accepted == 0
    assert seconds < 2.0 * 1000 / 0.98


def test_gains_pay_for_losses_of_the_same_request() -> None:
    gate, account = measured({2: 1.5}), DraftStats()
    for _ in range(10):
        gate.checked(account, 1, 2, 3.0, 0.0)
    assert account.gained == pytest.approx(5.0)
    gate.checked(account, 1, 1, 6.0, 0.0)  # three times one row, which counts as two
    assert account.gained == pytest.approx(4.0)
    assert (account.drafted, account.accepted) == (11, 10)
