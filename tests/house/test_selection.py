"""The tests that run without `-m full`."""

from __future__ import annotations

from itertools import product

import pytest

from tests.selection import chosen, dist_of, selection_of_kernel


def test_each_value_of_each_parameter_has_a_case() -> None:
    cases = [{"how": how, "what": what} for how, what in product("abcd", range(8))]
    positions = chosen(cases)
    assert len(positions) == 8
    assert {cases[position]["how"] for position in positions} == set("abcd")
    assert {cases[position]["what"] for position in positions} == set(range(8))


def test_values_that_come_together_need_one_case_each() -> None:
    assert chosen([{"a": i, "b": i} for i in range(3)]) == [0, 1, 2]
    assert chosen([{}]) == []


def test_a_gpu_runs_kernels_by_default_on_many_workers() -> None:
    assert selection_of_kernel("small", gpu=True) is None
    assert selection_of_kernel("large", gpu=True) is None
    assert selection_of_kernel("small", gpu=False) == "full"
    assert selection_of_kernel("large", gpu=False) == "interpreter"
    assert dist_of("loadfile", gpu=True) == "worksteal"
    assert dist_of("loadfile", gpu=False) == "loadfile"
    assert dist_of("no", gpu=True) == "no"


@pytest.mark.matrix
@pytest.mark.parametrize("how", ["x", "y"])
@pytest.mark.parametrize("what", [1, 2, 3])
def test_other_cases_of_a_matrix_are_full(
    how: str, what: int, request: pytest.FixtureRequest
) -> None:
    by_default = (what, how) in {(1, "x"), (2, "y"), (3, "x")}
    assert (request.node.get_closest_marker("full") is None) == by_default


@pytest.mark.first
@pytest.mark.parametrize("what", [1, 2, 3])
def test_other_cases_than_the_first_are_full(what: int, request: pytest.FixtureRequest) -> None:
    assert (request.node.get_closest_marker("full") is None) == (what == 1)
