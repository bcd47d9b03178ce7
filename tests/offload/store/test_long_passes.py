"""A pass of a prompt reads the next layer's experts into the slots that its own layer frees."""

from __future__ import annotations

import torch

from moeinf.native import SlotPool
from moeinf.offload.format.layout import ExpertLayout
from moeinf.offload.policy.base import Setup
from moeinf.offload.policy.lru import Lru
from moeinf.offload.routing.trace import RoutingShape
from moeinf.offload.store.expert_store import ExpertStore
from moeinf.offload.store.host_tier import HostTier
from tests.fakes import AtOnce, NoMath

SHAPE = RoutingShape(layers=3, experts=4, top_k=2)
LAYOUT = ExpertLayout(1, 1, "F32")
IDS = torch.tensor([[0, 1], [2, 3], [1, 2]])


def test_the_next_layer_is_read_while_this_one_computes() -> None:
    """All slots hold this layer's experts when it begins, and the next one's when it ends."""
    slots = SHAPE.experts
    pool = SlotPool(slots, LAYOUT.slot_bytes)
    host = HostTier(
        [LAYOUT] * 12, SHAPE.experts, pool, AtOnce(), Lru(Setup(SHAPE, slots)), NoMath()
    )  # type: ignore[arg-type]
    store = ExpertStore((host,), most_prefetches=8)
    store.begin_pass(torch.zeros(len(IDS), dtype=torch.int64), "prefill", [slice(0, len(IDS))])
    assert store.wants_hints
    for layer, read in ((0, 4), (1, 8), (2, 12)):
        if layer < 2:
            store.hint(layer + 1, IDS, torch.ones(IDS.shape))
        pending = store.submit(layer, torch.zeros(len(IDS), 1), IDS, torch.ones(IDS.shape))
        here = range(layer * 4, layer * 4 + 4)
        assert all(map(host.table.has_slot, here))
        pending.result()
        assert all(host.table.has_slot(cell + 4) for cell in here if layer < 2)
        assert store.stats.loads == read  # each once
    store.end_pass(None)
    assert store.idle
    assert not store.wants_hints
