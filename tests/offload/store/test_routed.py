"""The routing of a layer, converted once: against the models' grouping and the policies' order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeinf.models.layers.moe import group
from moeinf.offload.policy.base import chosen_cells
from moeinf.offload.store.routed import Routed, cells_of

E = 6


@given(
    layer=st.integers(0, 3),
    rows=st.integers(1, 5),
    ids=st.lists(st.integers(-1, E - 1), min_size=10, max_size=10),
    here=st.sets(st.integers(0, 4 * E - 1)),
)
def test_it_is_what_models_and_policies_make_of_the_ids(
    layer: int, rows: int, ids: list[int], here: set[int]
) -> None:
    """Also without what some other tier has taken."""
    chosen = np.array(ids[: 2 * rows], np.int16).reshape(rows, 2)
    if rows == 1 and chosen[0, 0] == chosen[0, 1]:
        chosen[0, 1] = -1  # a token's experts are distinct
    routed = Routed.of(layer, chosen, E)
    first = layer * E
    grouped = [(first + e, at) for e, at in group(torch.from_numpy(chosen), E)]
    assert routed.pairs() == grouped
    assert routed.cells == chosen_cells(layer, chosen, E)
    assert routed.events == (chosen >= 0).sum()
    mask = np.isin(cells_of(layer, chosen, E), list(here)) & (chosen >= 0)
    taken, rest = routed.split(mask)
    assert taken == [pair for pair in grouped if pair[0] in here]
    assert rest.pairs() == [pair for pair in grouped if pair[0] not in here]
    assert rest.cells == chosen_cells(layer, rest.ids, E)
    assert rest.events == (rest.ids >= 0).sum()


@pytest.mark.parametrize(
    "wrong", [[[E, 0]], [[0, -2]], [[-2, -2]], [[0, 1], [0, E]], [[0, 0], [-5, 1]]]
)
def test_other_ids_are_refused(wrong: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="with 6 experts"):
        Routed.of(1, np.array(wrong), E)
