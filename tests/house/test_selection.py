"""What runs without `-m full`."""

from __future__ import annotations

from itertools import product

from tests.selection import chosen


def test_each_value_of_each_parameter_has_a_case() -> None:
    cases = [{"how": how, "what": what} for how, what in product(range(4), range(8))]
    positions = chosen(cases)
    assert len(positions) == 8
    assert {cases[position]["how"] for position in positions} == set(range(4))
    assert {cases[position]["what"] for position in positions} == set(range(8))


def test_values_that_come_together_need_one_case_each() -> None:
    assert chosen([{"a": i, "b": i} for i in range(3)]) == [0, 1, 2]
    assert chosen([{}]) == []
