"""Test which experts the last passes used, and their heat."""

from __future__ import annotations

import numpy as np
import torch

from moeinf.offload.routing import recent_use
from moeinf.offload.routing.recent_use import HALF_LIFE, KEPT, LEVELS, RecentUse, heat_of


def add(recent: RecentUse, *layers: list[list[int]]) -> None:
    recent.begin()
    for layer, ids in enumerate(layers):
        recent.add(layer, torch.tensor(ids))
    recent.end()


def test_the_cells_of_a_pass() -> None:
    recent = RecentUse(4)
    add(recent, [[0, 3], [3, -1]], [[2, 1], [1, 1]])
    (done,) = recent.passes()
    assert (done.number, recent.number) == (1, 1)
    for _ in range(2):  # worked out once
        assert done.cells().tolist() == [0, 3, 5, 6]
    recent.begin()
    recent.end()  # a pass without layers of experts
    assert recent.number == 1


def test_ids_are_copied_when_the_pass_ends() -> None:
    """A layer may write to the same ids in the next pass."""
    recent, ids = RecentUse(4), torch.tensor([[1]])
    for expert in (1, 2):
        ids.fill_(expert)
        recent.begin()
        recent.add(0, ids)
        recent.end()
    assert [one.cells().tolist() for one in recent.passes()] == [[1], [2]]


def test_a_long_pass_keeps_only_what_occurs() -> None:
    recent = RecentUse(4)
    recent.begin()
    recent.add(1, torch.full((recent_use._FEW, 2), 3))
    recent.end()
    (done,) = recent.passes()
    assert done.used.tolist() == [7]


def test_only_the_last_passes_count() -> None:
    recent = RecentUse(4)
    add(recent, [[0]])
    for _ in range(KEPT):
        add(recent, [[1]])
    assert recent.passes()[0].number == 2
    assert heat_of(recent.passes(), 4).tolist() == [0, LEVELS, 0, 0]


def test_heat_decays_and_the_hottest_has_all_of_it() -> None:
    recent = RecentUse(3)
    assert heat_of(recent.passes(), 3).tolist() == [0, 0, 0]
    add(recent, [[0]])
    for _ in range(HALF_LIFE):
        add(recent, [[2]])
    weights = 0.5 ** (np.arange(HALF_LIFE) / HALF_LIFE)
    assert heat_of(recent.passes(), 3).tolist() == [
        np.ceil(LEVELS * 0.5 / weights.sum()),
        0,
        LEVELS,
    ]
