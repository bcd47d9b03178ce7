"""Test the lossy drop of light experts that are not resident."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moeinf.offload.store.expert_store import ExpertStore
from moeinf.offload.store.host_tier import HostTier
from moeinf.offload.store.lossy.skipping import without_light_misses
from tests.offload.store.test_expert_store import K, L, Shards, make_shards, routing


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    return make_shards(tmp_path_factory.mktemp("shards"))


def lossy(shards: Shards, slots: int, below: float) -> ExpertStore:
    host = shards.store(slots).host
    assert isinstance(host, HostTier)
    return ExpertStore((host,), skip_below=below)


def test_only_light_absent_experts_go() -> None:
    """Rows: light and absent; light and resident; all light, so that the largest stays; padding."""
    ids = torch.tensor([[0, 1, 2], [0, 1, 2], [3, 4, 5], [1, -1, 2]])
    weights = torch.tensor([[8.0, 1.5, 0.5], [8.0, 1.5, 0.5], [1.0, 1.1, 1.0], [0.5, 90.0, 9.5]])
    here = torch.zeros(4, 3, dtype=torch.bool)
    here[1, 2] = True
    kept = without_light_misses(ids, weights, here.numpy(), 0.1)
    assert kept.tolist() == [[0, 1, -1], [0, 1, 2], [3, 4, 5], [-1, -1, 2]]
    kept = without_light_misses(ids, weights, here.numpy(), 0.9)
    assert kept.tolist() == [[0, -1, -1], [0, -1, 2], [-1, 4, -1], [-1, -1, 2]]
    assert ids[0].tolist() == [0, 1, 2]  # the caller's ids do not change


def decode(store: ExpertStore, layer: int, asked: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    store.begin_pass(torch.zeros(1, dtype=torch.int64), "decode")
    output = store.submit(layer, *asked).result()
    store.end_pass()
    return output


def test_the_output_loses_the_dropped_terms_alone(shards: Shards) -> None:
    """The same history gives the same bits; a resident light expert is computed."""
    outputs, skipped = list[Tensor](), list[int]()
    for _ in range(2):
        store = lossy(shards, 4, 0.4)
        for seed in range(30):
            layer, (x, ids, weights) = seed % L, routing(1, seed)
            here = store.host.resident(ids.numpy() + layer * store.host.experts)
            kept = without_light_misses(ids, weights, here, 0.4)
            expected = shards.reference.submit(layer, x, kept, weights).result()
            outputs.append(decode(store, layer, (x, ids, weights)))
            assert torch.equal(outputs[-1], expected)
        stats = store.stats
        assert stats.decode_events + stats.decode_events_skipped == 30 * K
        skipped.append(stats.decode_events_skipped)
        store.close()
    assert skipped[0] == skipped[1] > 0
    assert all(torch.equal(a, b) for a, b in zip(outputs[:30], outputs[30:], strict=True))


@pytest.mark.parametrize(("below", "tokens"), [(0.0, 1), (0.9, 3)])
def test_exact_at_zero_and_in_prefill(shards: Shards, below: float, tokens: int) -> None:
    store = lossy(shards, 3, below)
    for seed in range(6):
        asked = routing(tokens, seed)
        store.begin_pass(
            torch.zeros(tokens, dtype=torch.int64), "decode" if tokens == 1 else "prefill"
        )
        expected = shards.reference.submit(seed % L, *asked).result()
        assert torch.equal(store.submit(seed % L, *asked).result(), expected)
        store.end_pass()
    assert store.stats.decode_events_skipped == 0
    store.close()
