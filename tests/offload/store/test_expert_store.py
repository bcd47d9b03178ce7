"""The expert store against the resident reference: the same bits, whatever the number of slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moeinf.models.layers.moe import ResidentExperts, TorchMath
from moeinf.native import ExpertKernel, SlotPool
from moeinf.offload.format.layout import ExpertKey, ExpertLayout, largest_slot_bytes
from moeinf.offload.format.quantise import quantise
from moeinf.offload.format.shards import FileRecord, shard_header, shard_path, write_file
from moeinf.offload.policy.base import Setup
from moeinf.offload.policy.table import POLICIES, USE_HINTS, USE_PAST
from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.routing.trace import Phase, RoutingShape
from moeinf.offload.store.expert_store import ExpertStore, Stopped
from moeinf.offload.store.host_tier import HostTier
from moeinf.offload.store.tier import Pending
from moeinf.offload.store.transfer import ExpertReadError, Transfer

L, E, K, D, F = 3, 6, 2, 16, 24
LAYOUT = ExpertLayout(D, F, "F32")
MIXED = [
    ExpertLayout(D, F, "Q8", biased=True),
    ExpertLayout(D, F, "Q4", biased=True, down="Q8"),
    ExpertLayout(D, F, "Q4", biased=True),
]


class Reference(Protocol):
    """Experts that are all in memory."""

    def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Pending: ...


class Kernels:
    """Experts of several layouts, by cell, in memory; the kernels compute one by one."""

    def __init__(self, layouts: Sequence[ExpertLayout], data: dict[tuple[int, int], Tensor]):
        self._layouts, self._data = layouts, data

    def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Pending:
        rows = torch.zeros(ids.numel(), D)
        for place, expert in enumerate(ids.flatten().tolist()):
            if expert >= 0:
                layout = self._layouts[layer * E + expert]
                kernel = ExpertKernel(
                    layout.dtype.lower(), D, F, layout.activation, layout.biased,
                    layout.down.lower(),
                )  # fmt: skip
                at = self._data[layer, expert].data_ptr()
                kernel.run([at], [[place]], x.data_ptr(), len(x), K, rows.data_ptr(), True)
        total = TorchMath().combine(rows.view(*ids.shape, D), weights)
        return SimpleNamespace(result=lambda: total)


@dataclass
class Shards:
    """L·E random experts, on disk and in memory."""

    folder: Path
    records: list[FileRecord]
    reference: Reference
    layouts: Sequence[ExpertLayout]

    def store(self, slots: int, readers: int = 2, name: str = "lru") -> ExpertStore:
        pool = SlotPool(slots, largest_slot_bytes(self.layouts))
        transfer = Transfer(self.folder, self.records, pool, readers=readers, direct_io=False)
        policy = POLICIES[name](Setup(RoutingShape(L, E, K), slots, past()))
        host = HostTier(self.layouts, E, pool, transfer, policy, TorchMath())
        return ExpertStore(
            (host,), most_prefetches=2 * K if name in USE_PAST else 0, hints=name in USE_HINTS
        )


def past() -> Eamc:
    """Return an EAMC of a few random requests."""
    eamc, random = Eamc(4, L, E), np.random.default_rng(3)
    for _ in range(4):
        eamc.add(random.integers(0, 9, (L, E)), random.integers(0, 9, (L, E)))
    return eamc


def make_shards(folder: Path) -> Shards:
    random = torch.Generator().manual_seed(0)
    weights, records = {}, []
    for layer in range(L):
        for expert in range(E):
            gate_up = torch.randn(2 * F, D, generator=random)
            down = torch.randn(D, F, generator=random)
            key = ExpertKey(layer, expert)
            weights[layer, expert] = (gate_up, down)
            data = [t.view(torch.uint8).numpy().data for t in (gate_up, down)]
            records.append(write_file(folder, shard_path(key), shard_header(key, LAYOUT), data))
    return Shards(folder, records, ResidentExperts(weights), [LAYOUT] * (L * E))


def make_mixed(folder: Path) -> Shards:
    """Return experts whose formats depend on the layer, in the last also on the expert."""
    random = torch.Generator().manual_seed(0)
    data, records = dict[tuple[int, int], Tensor](), list[FileRecord]()
    layouts = [MIXED[0 if n == L - 1 and e % 2 else n] for n in range(L) for e in range(E)]
    for key in (ExpertKey(layer, expert) for layer in range(L) for expert in range(E)):
        layout = layouts[key.layer * E + key.expert]
        whole = torch.frombuffer(SlotPool(1, layout.slot_bytes), dtype=torch.uint8)
        for span in layout.spans:
            form = layout.down if span.name == "down" else layout.dtype
            shape = {"down": (D, F), "gate": (F, D), "up": (F, D)}.get(span.name, span.shape)
            values = torch.randn(shape, generator=random)
            part = (
                values.bfloat16().view(torch.uint8) if len(shape) == 1 else quantise(values, form)
            )
            whole[span.offset_bytes : span.offset_bytes + span.size_bytes] = part
        data[key] = whole
        used = [whole[: layout.data_bytes].numpy().data]
        records.append(write_file(folder, shard_path(key), shard_header(key, layout), used))
    return Shards(folder, records, Kernels(layouts, data), layouts)


@pytest.fixture(scope="module", params=[make_shards, make_mixed], ids=["one format", "mixed"])
def shards(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Shards:
    made: Shards = request.param(tmp_path_factory.mktemp("shards"))
    return made


def routing(tokens: int, seed: int, none: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, distinct ids per token (-1 with probability `none`), and weights."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, D, generator=random)
    ids = torch.rand(tokens, E, generator=random).argsort(1)[:, :K].contiguous()
    ids[torch.rand(tokens, K, generator=random) < none] = -1
    return x, ids, torch.rand(tokens, K, generator=random)


def run(store: ExpertStore, layer: int, tokens: int, seed: int, none: float = 0.0) -> Tensor:
    store.begin_pass(torch.zeros(tokens, dtype=torch.int64), "decode" if tokens == 1 else "prefill")
    output = store.submit(layer, *routing(tokens, seed, none)).result()
    store.end_pass()
    return output


@pytest.fixture(params=[1, 2, 3, 7, L * E])
def store(request: pytest.FixtureRequest, shards: Shards) -> Iterator[ExpertStore]:
    store = shards.store(request.param)
    yield store
    assert store.idle
    store.close()


def test_bit_identical_to_resident_experts(store: ExpertStore, shards: Shards) -> None:
    """One slot is enough even for a layer whose tokens use all experts."""
    for seed, tokens in enumerate([1, 1, 40, 1, 17, 1, 1, 33, 2]):
        layer = seed % L
        x, ids, weights = routing(tokens, seed, none=0.2)
        expected = shards.reference.submit(layer, x, ids, weights).result()
        assert torch.equal(run(store, layer, tokens, seed, none=0.2), expected)
        assert store.idle


@settings(max_examples=60, deadline=None)
@given(
    slots=st.integers(1, L * E),
    readers=st.integers(1, 4),
    warm=st.integers(0, L * E),
    policy=st.sampled_from(sorted(POLICIES)),
    passes=st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 99), st.sampled_from(["right", "wrong", "no"]))
    ),
)
def test_any_budget_any_prediction(
    shards: Shards,
    slots: int,
    readers: int,
    warm: int,
    policy: str,
    passes: list[tuple[int, int, str]],
) -> None:
    """Right, wrong or no hints, a warm start or none: the same bits, and nothing left pinned."""
    store = shards.store(slots, readers, policy)
    store.warm(past().probable_cells()[:warm])
    try:
        for tokens, seed, hints in passes:
            phase: Phase = "decode" if tokens == 1 else "prefill"
            store.begin_pass(torch.zeros(tokens, dtype=torch.int64), phase)
            for layer in range(L):
                asked = routing(tokens, seed + layer, none=0.1)
                if store.wants_hints and hints != "no" and layer + 1 < L:
                    _, ids, scores = routing(tokens, seed + layer + (hints == "right"), none=0.1)
                    store.hint(layer + 1, ids, scores)
                pending = store.submit(layer, *asked)
                expected = shards.reference.submit(layer, *asked).result()
                assert torch.equal(pending.result(), expected)
                assert store.idle
                assert store.resident <= slots
            store.end_pass()
        stats = store.stats
        assert stats.ahead_bytes_used + stats.ahead_bytes_wasted <= stats.ahead_bytes_read
    finally:
        store.close()


def test_counts(shards: Shards) -> None:
    """Events, hits, loads and bytes of passes worked out by hand."""
    store = shards.store(slots=4)

    def decode(layer: int, ids: list[int]) -> None:
        store.begin_pass(torch.zeros(1, dtype=torch.int64), "decode")
        store.submit(layer, torch.ones(1, D), torch.tensor([ids]), torch.ones(1, K)).result()
        store.end_pass()

    decode(0, [1, 2])  # two misses
    decode(0, [2, 3])  # hit, miss
    decode(1, [1, 2])  # misses: expert 1 of layer 1 is another expert; evicts (0,1)
    decode(0, [1, 3])  # (0,1) is gone, (0,3) is there
    stats = store.stats
    assert (stats.decode_events, stats.decode_hits) == (8, 2)
    assert stats.hit_rate == 0.25
    assert stats.loads == stats.decode_loads == 6
    first, second = (shards.layouts[cell].data_bytes for cell in (0, E))
    assert stats.bytes_read == stats.decode_bytes_read == 4 * first + 2 * second
    before = stats.copy()
    store.begin_pass(torch.zeros(2, dtype=torch.int64), "prefill")
    ids = torch.tensor([[1, 3], [1, -1]])
    store.submit(0, torch.ones(2, D), ids, torch.ones(2, K)).result()
    store.end_pass()
    since = store.stats.since(before)
    assert (since.prefill_events, since.prefill_hits, since.loads) == (3, 3, 0)
    assert since.decode_events == 0
    store.close()


def test_a_damaged_shard_is_named_and_the_store_lives(tmp_path: Path) -> None:
    shards = make_shards(tmp_path)
    store = shards.store(slots=5)
    bad = tmp_path / shard_path(ExpertKey(1, 3))
    raw = bytearray(bad.read_bytes())
    raw[5000] ^= 1
    bad.write_bytes(raw)
    everyone = torch.arange(E).view(E // K, K)
    request = (torch.ones(E // K, D), everyone, torch.ones(E // K, K))
    for _ in range(2):
        store.begin_pass(torch.zeros(E // K, dtype=torch.int64), "prefill")
        with pytest.raises(ExpertReadError) as caught:
            store.submit(1, *request).result()
        assert caught.value.shard == "experts/L001/E003.safetensors"
        assert store.idle
    expected = shards.reference.submit(0, *request).result()
    store.begin_pass(torch.zeros(E // K, dtype=torch.int64), "prefill")
    assert torch.equal(store.submit(0, *request).result(), expected)
    raw[5000] ^= 1
    bad.write_bytes(raw)
    expected = shards.reference.submit(1, *request).result()
    assert torch.equal(store.submit(1, *request).result(), expected)
    store.close()


def test_stopping_and_abandoning_leave_nothing_behind(shards: Shards) -> None:
    store = shards.store(slots=4)
    store.begin_pass(torch.zeros(9, dtype=torch.int64), "prefill")
    store.submit(0, *routing(9, 1))  # the result is never taken
    store.begin_pass(torch.zeros(1, dtype=torch.int64), "decode")
    assert store.idle
    store.stopped = lambda: True
    with pytest.raises(Stopped):
        store.submit(1, *routing(1, 2))
    assert store.idle
    store.stopped = lambda: False
    expected = shards.reference.submit(1, *routing(1, 2)).result()
    assert torch.equal(run(store, 1, 1, 2), expected)
    store.close()


def test_a_slot_that_a_hung_read_may_write_to_is_lost_until_it_ends(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue's part is in tests/native; here a transfer says that its reader hangs."""
    store = shards.store(slots=3)
    hanging: set[int] = set()

    def hang(ticket: int, cell: int) -> None:
        transfer.wait(ticket, cell)
        hanging.add(store.host.table.slot_of(cell))
        raise ExpertReadError("experts/x", "the read has not ended for 30.0 s")

    transfer = store.host._transfer
    wedged = SimpleNamespace(
        telling_seconds=0.0,
        demand=transfer.demand,
        abandon=transfer.abandon,
        bytes_of=transfer.bytes_of,
        no_slot=transfer.no_slot,
        ended=transfer.ended,
        close=transfer.close,
        wait=hang,
        may_write=hanging.__contains__,
    )
    monkeypatch.setattr(store.host, "_transfer", wedged)
    for lost in (1, 2, 3):
        store.begin_pass(torch.zeros(1, dtype=torch.int64), "decode")
        with pytest.raises(ExpertReadError, match="has not ended"):
            store.submit(0, *routing(1, lost)).result()
        assert store.idle
        assert len(hanging) == lost
    store.begin_pass(torch.zeros(1, dtype=torch.int64), "decode")
    with pytest.raises(ExpertReadError, match="hold every slot"):
        store.submit(0, *routing(1, 1)).result()
    assert store.idle
    hanging.clear()  # the readers have come back
    wedged.wait = transfer.wait
    expected = shards.reference.submit(0, *routing(1, 1)).result()
    assert torch.equal(run(store, 0, 1, 1), expected)
    store.close()


def test_a_layer_asks_for_its_misses_when_it_is_submitted(shards: Shards) -> None:
    """The reads start with or without an earlier hint, and not only in result()."""
    store = shards.store(slots=L * E, name="adaptive")
    store._most_prefetches = 0  # nothing is there before it is asked for
    asked: list[int] = []
    demand = store.host._transfer.demand

    def noted(cells: Sequence[int], slots: Sequence[int]) -> list[int]:
        asked.extend(cells)
        return demand(cells, slots)

    store.host._transfer.demand = noted  # type: ignore[method-assign]
    store.begin_pass(torch.zeros(1, dtype=torch.int64), "decode")
    assert store.wants_hints
    for layer in range(L):
        asked.clear()
        x, ids, weights = routing(1, layer)
        if layer + 1 < L:
            store.hint(layer + 1, ids, weights)
            assert not asked
        pending = store.submit(layer, x, ids, weights)
        assert asked == [layer * E + expert for expert in ids[0].tolist()]
        assert torch.equal(
            pending.result(), shards.reference.submit(layer, x, ids, weights).result()
        )
    store.close()


@pytest.mark.parametrize("failures", [[RuntimeError] * 9, [KeyboardInterrupt] * 2])
def test_reads_that_fail_in_any_way_leave_no_slot_behind(
    shards: Shards, failures: list[type[BaseException]]
) -> None:
    """Reader threads that fail inside, one after another; a Ctrl-C, and one while it cleans up."""
    store, failures = shards.store(slots=4), failures.copy()
    queue = store.host._transfer._queue

    def fails(ticket: int) -> None:
        queue.wait(ticket)
        if failures:
            raise failures.pop()(f"ticket {ticket}")

    store.host._transfer._queue = SimpleNamespace(  # type: ignore[assignment]
        wait=fails, cancel=lambda _ticket, half_read=False: False,
        **{name: getattr(queue, name) for name in ("submit_many", "can_submit", "collect")},
    )  # fmt: skip
    x, ids, weights = routing(2, 1)
    store.begin_pass(torch.zeros(2, dtype=torch.int64), "prefill")
    with pytest.raises(failures[0], match="ticket 1" if len(failures) > 2 else "ticket 2"):
        store.submit(0, x, ids, weights).result()
    store.abandon()  # as the next pass begins with
    store.host._transfer._queue = queue
    assert store.idle
    assert store.resident == 0
    assert store.host.table.loading == 0
    expected = shards.reference.submit(0, x, ids, weights).result()
    store.begin_pass(torch.zeros(2, dtype=torch.int64), "prefill")
    assert torch.equal(store.submit(0, x, ids, weights).result(), expected)
    store.close()
