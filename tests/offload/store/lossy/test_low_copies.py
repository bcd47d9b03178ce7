"""Test the lossy use of copies in fewer bits for light experts that are not resident."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moeinf.models.layers.moe import TorchMath
from moeinf.native import SlotPool
from moeinf.offload.format.layout import ExpertKey, ExpertLayout
from moeinf.offload.format.quantise import quantise
from moeinf.offload.format.shards import shard_header, shard_path, write_file
from moeinf.offload.policy.table import POLICIES
from moeinf.offload.store.expert_store import ExpertStore
from moeinf.offload.store.host_tier import HostTier
from moeinf.offload.store.lossy.low_copies import LowCopies, light
from moeinf.offload.store.transfer import ExpertReadError, Transfer
from tests.offload.store.test_expert_store import LAYOUT, D, E, F, Kernels, L, Shards, make_shards

LOW = ExpertLayout(D, F, "Q2")
FULL_BYTES, LOW_BYTES = LAYOUT.data_bytes, LOW.data_bytes


@dataclass
class Both:
    """The same random experts in float32 and in Q2, on disk and in memory."""

    full: Shards
    low: Shards

    def store(self, slots: int, low_slots: int, above: float, policy: str = "lru") -> ExpertStore:
        plain = self.full.store(slots, name=policy)
        host = plain.host
        assert isinstance(host, HostTier)
        pool = SlotPool(low_slots, LOW.slot_bytes)
        transfer = Transfer(self.low.folder, self.low.records, pool, readers=1, direct_io=False)
        low = LowCopies(host, [LOW] * (L * E), pool, transfer, TorchMath(), above)
        return ExpertStore((host,), low=low)


def make_low(full: Shards, folder: Path) -> Shards:
    """Write copies in Q2, and keep their kernels' arithmetic as the reference."""
    data, records = dict[tuple[int, int], Tensor](), []
    for cell, record in enumerate(full.records):
        key = ExpertKey(*divmod(cell, E))
        raw = (full.folder / record.path).read_bytes()[record.data_offset :]
        values = torch.frombuffer(bytearray(raw), dtype=torch.float32)
        gate, up, down = values.split([F * D, F * D, D * F])
        rows = (gate.view(F, D), up.view(F, D), down.view(D, F))
        tiles = torch.cat([quantise(part.contiguous(), "Q2") for part in rows])
        whole = torch.frombuffer(SlotPool(1, LOW.slot_bytes), dtype=torch.uint8)
        whole[: len(tiles)] = tiles
        data[key] = whole
        header = shard_header(key, LOW)
        records.append(write_file(folder, shard_path(key), header, [tiles.numpy().data]))
    return Shards(folder, records, Kernels([LOW] * (L * E), data), [LOW] * (L * E))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    full = make_shards(tmp_path_factory.mktemp("full"))
    return Both(full, make_low(full, tmp_path_factory.mktemp("low")))


def decode(store: ExpertStore, ids: list[int], weights: list[float], layer: int = 0) -> Tensor:
    store.begin_pass(torch.zeros(1, dtype=torch.int64), "decode")
    asked = torch.ones(1, D), torch.tensor([ids]), torch.tensor([weights])
    try:
        output = store.submit(layer, *asked).result()
    finally:
        store.end_pass()
    return output


def expected(both: Both, ids: list[int], weights: list[float], low: list[int]) -> Tensor:
    """Return the output of layer 0 with these experts from the copies."""
    x, rows = torch.ones(1, D), torch.zeros(1, len(ids), D)
    for place, expert in enumerate(ids):
        source = both.low if expert in low else both.full
        one = source.reference.submit(0, x, torch.tensor([[expert]]), torch.ones(1, 1))
        rows[0, place] = one.result()[0]
    return TorchMath().combine(rows, torch.tensor([weights]))


@pytest.mark.parametrize(
    ("above", "found"),
    [
        (0.0, "0111"),
        (0.499, "0111"),
        (0.5, "0011"),
        (0.749, "0011"),
        (0.75, "0001"),
        (0.99, "0001"),
    ],
)
def test_the_weights_above_decide(above: float, found: str) -> None:
    """Above the ranks lie 0, 0.5, 0.75 and 1 of the row; the order of the ids does not matter."""
    order = [2, 0, 3, 1]
    weights = torch.tensor([[4.0, 2.0, 2.0, 0.0]])
    shuffled = light(torch.cat([weights, weights[:, order]]), above).int().tolist()
    assert "".join(map(str, shuffled[0])) == found
    assert shuffled[1][1] == 0, "the largest weight"
    assert sum(shuffled[1]) == sum(shuffled[0])


def test_bytes_and_bits_of_scripted_routing(both: Both) -> None:
    """Which copy each expert is computed with, and what is read, worked out by hand."""
    store = both.store(slots=2, low_slots=1, above=0.6)
    heavy_light, stats = [0.8, 0.2], store.stats
    found = decode(store, [1, 2], heavy_light)  # two misses, of which 2 is light
    assert torch.equal(found, expected(both, [1, 2], heavy_light, low=[2]))
    assert (stats.bytes_read, stats.low_reads) == (FULL_BYTES + LOW_BYTES, 1)
    found = decode(store, [1, 2], heavy_light)  # a hit, and a copy that is in its slot
    assert torch.equal(found, expected(both, [1, 2], heavy_light, low=[2]))
    assert stats.bytes_read == FULL_BYTES + LOW_BYTES
    found = decode(store, [2, 1], heavy_light)  # 2 is heavy now, and 1 is resident
    assert torch.equal(found, expected(both, [2, 1], heavy_light, low=[]))
    assert stats.bytes_read == 2 * FULL_BYTES + LOW_BYTES
    found = decode(store, [1, 2], heavy_light)  # the expert itself replaces its copy
    assert torch.equal(found, expected(both, [1, 2], heavy_light, low=[]))
    decode(store, [1, 3], heavy_light)  # the copy of 3 takes the only slot
    decode(store, [1, 4], heavy_light)
    assert stats.bytes_read == stats.decode_bytes_read == 2 * FULL_BYTES + 3 * LOW_BYTES
    assert (stats.low_reads, stats.low_bytes_read) == (3, 3 * LOW_BYTES)
    assert stats.low_bytes_spared == 3 * (FULL_BYTES - LOW_BYTES)
    assert (stats.decode_events, stats.decode_events_low) == (12, 4)
    assert store.idle
    store.close()


def test_exact_with_all_resident_and_in_prefill(both: Both) -> None:
    store = both.store(slots=L * E, low_slots=2, above=0.0)
    ids, weights = [1, 2], [0.5, 0.5]
    store.begin_pass(torch.zeros(1, dtype=torch.int64), "prefill")
    asked = torch.ones(1, D), torch.tensor([ids]), torch.tensor([weights])
    assert torch.equal(store.submit(0, *asked).result(), expected(both, ids, weights, low=[]))
    store.end_pass()
    assert torch.equal(decode(store, ids, weights), expected(both, ids, weights, low=[]))
    assert store.stats.low_reads == store.stats.decode_events_low == 0
    store.close()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_any_policy_keeps_within_its_slots(both: Both, policy: str) -> None:
    """More light misses of several rows than slots for copies: the rest are read themselves."""
    store = both.store(3, 1, 0.3, policy)
    random = torch.Generator().manual_seed(0)
    for step in range(24):
        tokens = 1 + step % 3
        store.begin_pass(torch.zeros(tokens, dtype=torch.int64), "decode")
        ids = torch.rand(tokens, E, generator=random).argsort(1)[:, :4].contiguous()
        mix = torch.rand(tokens, 4, generator=random)
        store.submit(step % L, torch.ones(tokens, D), ids, mix).result()
        assert store.idle
        assert store.resident <= 3
        store.end_pass()
    stats = store.stats
    assert stats.low_reads > 0
    assert stats.bytes_read == stats.loads * FULL_BYTES + stats.low_reads * LOW_BYTES
    store.close()


def test_a_damaged_copy_is_named_and_the_store_lives(both: Both, tmp_path: Path) -> None:
    low = make_low(both.full, tmp_path)
    damaged = tmp_path / low.records[2].path
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    store = Both(both.full, low).store(slots=2, low_slots=1, above=0.6)
    with pytest.raises(ExpertReadError, match="E002"):
        decode(store, [1, 2], [0.8, 0.2])
    assert store.idle
    mix = [0.8, 0.2]
    assert torch.equal(decode(store, [1, 3], mix), expected(both, [1, 3], mix, low=[3]))
    store.close()
