"""Several users of one recording: in turn, and in one pass."""

from __future__ import annotations

import numpy as np

from moeinf.offload.routing.trace import PassBuilder, Recording, RoutingShape
from moeinf.offload.simulator.cases import batched, interleaved

SHAPE = RoutingShape(layers=2, experts=8, top_k=1)


def requests(*answers: int) -> Recording:
    """Return requests: a prompt of two tokens, and so many decode tokens; ids are the number."""
    recording = Recording("some", SHAPE)
    for request, tokens in enumerate(answers):
        for rows in (2, *[1] * tokens):
            phase = "decode" if rows == 1 else "prefill"
            builder = PassBuilder(SHAPE, np.full(rows, request), phase)
            for layer in range(SHAPE.layers):
                builder.routed(layer, np.full((rows, 1), request))
            recording.add(builder.end())
    return recording


def rows(recording: Recording) -> list[list[int]]:
    for done in recording.passes:
        assert (done.ids == done.rows[:, None]).all()
    return [done.rows.tolist() for done in recording.passes]


def test_users_in_turn() -> None:
    mixed = interleaved(requests(2, 1, 1), 2)
    assert rows(mixed) == [[0, 0], [1, 1], [0], [1], [0], [2, 2], [2]]


def test_users_in_one_pass() -> None:
    """Request 2 takes the place of 1, which ends first; its prompt has a pass of its own."""
    mixed = batched(requests(3, 1, 1), 2)
    assert rows(mixed) == [[0, 0], [1, 1], [0, 1], [2, 2], [0, 2], [0]]
    assert mixed.decode_tokens == 5
    assert mixed.request_eams()[0].decode.sum() == 3 * SHAPE.layers
