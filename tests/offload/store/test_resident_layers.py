"""A layer whose experts are all in slots: one call, with the bits of the other path."""

from __future__ import annotations

import itertools

import pytest
import torch

from moeinf.offload.store.resident_layers import NativeLayer
from tests.offload.store.test_expert_store import LAYOUT, D, E, K, L, Shards, routing, run
from tests.offload.store.test_expert_store import shards as shards  # the fixture


@pytest.mark.parametrize(("slots", "read"), [(L * E, L * E), (L * E - 1, 1)])
def test_the_rest_is_read_ahead_where_all_experts_fit(
    shards: Shards, slots: int, read: int
) -> None:
    store = shards.store(slots=slots)
    assert store.warm([3]) == read
    assert store.host.warming
    store.host._transfer._queue.drain()
    run(store, 0, 1, 0)
    if slots == L * E:
        native = [store.slots(layer) is not None for layer in range(L)]
        assert native == [shards.layouts[0] is not LAYOUT and layer < L - 1 for layer in range(L)]
        assert (store.resident, store.stats.loads, store.stats.ahead_bytes_read) == (
            L * E,
            L * E,
            0,
        )
        assert store.stats.decode_hits == store.stats.decode_events > 0
        assert not store.host.warming
    store.close()


def test_a_layer_that_is_all_there_is_one_call(shards: Shards) -> None:
    """Where a layer has one layout with kernels, and few rows; a missing expert prevents it."""
    store = shards.store(slots=L * E)
    store.warm(range(L * E))
    for layer in range(L):
        run(store, layer, 40, layer)  # the reads have arrived
    for layer, tokens in itertools.product(range(L), (1, 16, 17)):
        store.begin_pass(torch.zeros(tokens, dtype=torch.int64), "prefill")
        before = store.stats.copy()
        asked = routing(tokens, layer, none=0.2)
        pending = store.submit(layer, *asked)
        one_call = shards.layouts[0] is not LAYOUT and layer < L - 1 and tokens <= 16
        assert isinstance(pending, NativeLayer) == one_call
        assert torch.equal(pending.result(), shards.reference.submit(layer, *asked).result())
        events = int((asked[1] >= 0).sum())
        since = store.stats.since(before)
        assert (since.prefill_events, since.prefill_hits) == (events, events)
        store.end_pass()
    for wrong in (-2, E):
        with pytest.raises(ValueError, match="expert ids"):
            store.submit(0, torch.ones(1, D), torch.tensor([[wrong, 1]]), torch.ones(1, K))
    store.close()
