"""Test edge cases of the native core of `eamc`: ties, empty rows, invalid arguments."""

from __future__ import annotations

import numpy as np
import pytest

from moeinf.native import EamcCore, sum_as_shares


def core() -> EamcCore:
    return EamcCore(2, 3, 4, epsilon=0.125)


def test_equal_keys_leave_by_last_use_then_by_number() -> None:
    found = core()
    for cell in (5, 4, 3):
        found.admitted(cell)
    found.routed(1, np.array([[0, 1]]))
    assert [found.victim(lambda _cell: True) for _ in range(4)] == [5, 3, 4, None]


def test_equal_wishes_come_by_number() -> None:
    found = core()
    found.begin_pass(False)
    assert found.wishes(4) == [0, 1, 2]  # the last layer is L away: its weight is 0
    found.admitted(1)
    assert found.wishes(4) == [0, 2]
    assert found.wishes(1) == [0]


def test_shares_of_a_row_without_counts_are_uniform() -> None:
    entries = np.array([[[1, 3, 0, 0], [0, 0, 0, 0]], [[4, 0, 0, 0], [0, 0, 0, 0]]], np.float32)
    expected = [[5 / 8, 3 / 8, 0, 0], [0.25] * 4]
    assert sum_as_shares(entries, [0, 1]).tolist() == expected


def test_what_does_not_exist_is_refused() -> None:
    found, entries = core(), np.zeros((2, 2, 3), np.float32)
    for call in (
        lambda: found.admitted(6),
        lambda: found.forget(-1),
        lambda: found.routed(2, np.array([[0]])),
        lambda: found.routed(0, np.array([[3]])),
        lambda: sum_as_shares(entries, [2]),
    ):
        with pytest.raises(IndexError):
            call()
    with pytest.raises(ValueError, match=r"\[L, E\]"):
        found.predict(np.zeros((3, 2), np.float32))
