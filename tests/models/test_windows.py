"""A window of several pieces has the bits of the pieces one by one, in every family."""

from __future__ import annotations

import pytest
import torch

from tests.fakes import WatchedExperts
from tests.models.conftest import Pair

PIECE = 8


def test_a_window_equals_its_pieces(pair: Pair) -> None:
    """The last piece is one token; both requests are behind some tokens already."""
    model, ids = pair.ours.model, pair.ids
    alone, together = [model.new_state(60) for _ in range(2)], [model.new_state(60) for _ in "ab"]
    parts = [(0, 3, 3 + 4 * PIECE + 1), (20, 1, 1 + PIECE + 3)]  # offset, first tokens, all tokens
    expected = []
    for (at, begun, count), state in zip(parts, alone, strict=True):
        model.extend([(ids[at : at + begun], state)], pair.ours.experts)
        for start in range(begun, count, PIECE):
            stop = min(start + PIECE, count)
            last = model.extend([(ids[at + start : at + stop], state)], pair.ours.experts)
        expected.append(last)
    for (at, begun, _), state in zip(parts, together, strict=True):
        model.extend([(ids[at : at + begun], state)], pair.ours.experts)
    watched = WatchedExperts(pair.ours.experts)
    batch = [
        (ids[at + begun : at + count], state)
        for (at, begun, count), state in zip(parts, together, strict=True)
    ]
    found = model.extend(batch, watched, piece=PIECE)
    assert torch.equal(found, torch.cat(expected))
    layers = range(model.moe.encoder_layers, model.moe.layers)
    assert [done.layers for done in watched.passes] == [list(layers)]
    for mine, its in zip(alone, together, strict=True):
        assert mine.length == its.length
        following = [model.extend([([ids[0]], state)], pair.ours.experts) for state in (mine, its)]
        assert torch.equal(*following)


def test_a_window_that_fails_leaves_the_state(pair: Pair) -> None:
    model, state = pair.ours.model, pair.ours.model.new_state(60)
    model.extend([(pair.ids[:3], state)], pair.ours.experts)
    before = model.extend([(pair.ids[3:30], state.snapshot())], pair.ours.experts, piece=PIECE)
    failing = WatchedExperts(pair.ours.experts, fail_in=model.moe.layers - 1)
    with pytest.raises(RuntimeError, match="gone"):
        model.extend([(pair.ids[3:30], state)], failing, piece=PIECE)
    assert state.length == 3
    assert torch.equal(
        model.extend([(pair.ids[3:30], state)], pair.ours.experts, piece=PIECE), before
    )
