"""Test the conversion of budgets to slots; too little is an error that names the minimum."""

from __future__ import annotations

import pytest

from moeinf.offload.store.budget import DoesNotFit, SlotBudget

BUDGET = SlotBudget(slot_bytes=4096, experts=192, top_k=4)


def test_the_least_is_two_tokens_of_one_layer() -> None:
    assert BUDGET.min_slots == 8
    assert BUDGET.min_bytes == 8 * 4096
    assert BUDGET.slots(BUDGET.min_bytes) == 8
    assert SlotBudget(4096, experts=5, top_k=4).min_slots == 5


def test_bytes_become_whole_slots_up_to_all_experts() -> None:
    assert BUDGET.slots(9 * 4096 - 1) == 8
    assert BUDGET.slots(9 * 4096) == 9
    assert BUDGET.slots(1 << 40) == 192


def test_too_little_names_the_least() -> None:
    with pytest.raises(DoesNotFit) as caught:
        BUDGET.slots(BUDGET.min_bytes - 1)
    assert caught.value.min_bytes == BUDGET.min_bytes
    assert caught.value.given_bytes == BUDGET.min_bytes - 1
