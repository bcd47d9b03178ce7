"""Test the EAMC on examples computed by hand: matching, replacement, predictions, priorities."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from moeinf.offload.format.array_file import BadContainer, pack
from moeinf.offload.routing.eamc import (
    Eamc,
    Matcher,
    ceiling,
    distance_weights,
    eviction_priorities,
    normalised,
    prefetch_priorities,
)

NONE = np.zeros((2, 3), int)


def eam(*rows: list[int]) -> np.ndarray:
    return np.array(rows)


# Three requests of a model with 2 layers of 3 experts, one expert per token, 4 tokens of prefill.
A = eam([4, 0, 0], [0, 4, 0])
B = eam([0, 4, 0], [0, 0, 4])
C = eam([2, 2, 0], [4, 0, 0])


def of(capacity: int, *prefills: np.ndarray) -> Eamc:
    eamc = Eamc(capacity, 2, 3)
    for prefill in prefills:
        eamc.add(prefill, NONE)
    return eamc


def test_cosine_on_the_observed_rows_only() -> None:
    """Layer 0 routes [3, 1, 0], then layer 1 routes [4, 0, 0].

    After layer 0: A: 12/(√10·4) = .9487, B: 4/(√10·4) = .3162, C: 8/(√10·√8) = .8944.
    After layer 1: A: 12/(√26·√32) = .4160, B: 4/(√26·√32) = .1387, C: (8+16)/(√26·√24) = .9608.
    """
    matcher = Matcher(of(9, A, B, C), "prefill")
    assert matcher.similarity().tolist() == [0, 0, 0]
    matcher.observe(0, np.array([[0], [0], [0], [1]]))
    assert_allclose(matcher.similarity(), [0.9487, 0.3162, 0.8944], atol=1e-4)
    matcher.observe(1, np.array([[0], [0], [0], [0]]))
    assert_allclose(matcher.similarity(), [0.4160, 0.1387, 0.9608], atol=1e-4)


def test_rows_of_later_layers_count_with_earlier_passes_once_they_ran() -> None:
    """Pass 1 routes expert 0, then 1; pass 2 routes expert 0 in both layers.

    After layer 0 of pass 2 the query is only row 0 = [2, 0, 0]: A: 8/(2·4) = 1,
    C: 4/(2·√8) = .7071. After layer 1 its rows are [2, 0, 0], [1, 1, 0]:
    A: (8+4)/(√6·√32) = .8660, C: (4+4)/(√6·√24) = .6667.
    """
    matcher = Matcher(of(9, A, C), "prefill")
    matcher.observe(0, np.array([[0]]))
    matcher.observe(1, np.array([[1]]))
    matcher.begin_pass()
    assert matcher.similarity().tolist() == [0, 0]
    matcher.observe(0, np.array([[0]]))
    assert_allclose(matcher.similarity(), [1, 0.7071], atol=1e-4)
    matcher.observe(1, np.array([[0]]))
    assert_allclose(matcher.similarity(), [0.8660, 0.6667], atol=1e-4)


def test_ties_go_to_the_newest() -> None:
    eamc = of(9, A, B, 3 * A)
    matcher = Matcher(eamc, "prefill")
    matcher.observe(0, np.array([[0]]))
    assert eamc.best(matcher.similarity(), 3) == [2, 0, 1]
    assert eamc.best(matcher.similarity()) == [2]


def test_a_full_collection_replaces_the_closest() -> None:
    """D = [[3, 1, 0], [0, 4, 0]]: to A (12+16)/(√26·√32) = .9707, to B 4/(√26·√32) = .1387."""
    eamc = of(2, A, B)
    assert eamc.add(eam([3, 1, 0], [0, 4, 0]), NONE) == 0
    assert len(eamc) == 2
    assert eamc.entry(0).prefill.tolist() == [[3, 1, 0], [0, 4, 0]]
    assert eamc.entry(1).prefill.tolist() == B.tolist()
    assert [e.prefill.tolist() for e in eamc.entries()] == [B.tolist(), [[3, 1, 0], [0, 4, 0]]]


def test_automatic_capacity_grows_with_what_is_different() -> None:
    """3A has cosine 1 to A and replaces it; B and C have at most .5 and are added."""
    eamc = Eamc(9, 2, 3, alike=0.97)
    places = [eamc.add(prefill, NONE) for prefill in (A, B, 3 * A, C, 2 * B)]
    assert places == [0, 1, 0, 2, 1]
    assert [e.prefill.tolist() for e in eamc.entries()] == [
        (3 * A).tolist(), C.tolist(), (2 * B).tolist(),
    ]  # fmt: skip


def test_an_entry_replaces_all_that_it_is_alike() -> None:
    """The cosine of A and C is 8/(√32·√24) = .29; A + C has .86 and .73 to them, .28 to B."""
    eamc = Eamc(9, 2, 3, alike=0.7)
    for prefill in (A, B, C):
        eamc.add(prefill, NONE)
    assert eamc.add(A + C, NONE) == 0
    assert [e.prefill.tolist() for e in eamc.entries()] == [B.tolist(), (A + C).tolist()]
    matcher = Matcher(eamc, "prefill")
    matcher.observe(0, np.array([[1]]))
    assert eamc.best(matcher.similarity(), 2) == [eamc.best(matcher.similarity())[0], 0]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 999), st.integers(1, 30), st.integers(1, 12))
def test_an_automatic_collection_is_restored_by_its_entries(
    seed: int, count: int, capacity: int
) -> None:
    """A rewritten log relies on this: entries added oldest first are neither merged nor lost."""
    random = np.random.default_rng(seed)
    first, again = (Eamc(capacity, 2, 3, alike=0.9) for _ in range(2))
    for _ in range(count):
        first.add(*random.poisson(2, (2, 2, 3)))
    for entry in first.entries():
        again.add(entry.prefill, entry.decode)
    assert len(again) == len(first) <= capacity
    for ours, theirs in zip(first.entries(), again.entries(), strict=True):
        assert ours.prefill.tolist() == theirs.prefill.tolist()


def test_the_ceiling_is_set_by_matching_or_memory() -> None:
    assert ceiling(26, 64) == 512
    assert ceiling(58, 256) == (64 << 20) // (16 * 58 * 256) == 282
    assert ceiling(1000, 100_000) == 1


def test_distance_of_pairs_is_the_mean_of_both_parts() -> None:
    """To (A, B), the query (A, A) has cosines 1 and 0, mean .5.

    (A, none) has 1 and 0 too, because the entry has a decode part and the query has not. To
    (A, none) it has 1, over the only part.
    """
    eamc = Eamc(9, 2, 3)
    eamc.add(A, B)
    eamc.add(A, NONE)
    assert eamc.similarity(A, A).tolist() == [0.5, 0.5]
    assert eamc.similarity(A, NONE).tolist() == [0.5, 1.0]


def test_the_prediction_sums_matches_and_normalises_rows() -> None:
    """A + C = [[6, 2, 0], [4, 4, 0]] -> [[3/4, 1/4, 0], [1/2, 1/2, 0]]; zeros are uniform."""
    eamc = of(9, A, B, C)
    total = eamc.sum_of([0, 2], "prefill")
    assert total.tolist() == [[6, 2, 0], [4, 4, 0]]
    assert normalised(total).tolist() == [[0.75, 0.25, 0], [0.5, 0.5, 0]]
    assert_allclose(normalised(eamc.sum_of([0], "decode")), 1 / 3, rtol=1e-6)


def test_later_layers_count_less_for_prefetch() -> None:
    """L = 4 at l = 1: layer 2 has 1 - 1/4, layer 3 has 1 - 2/4, layers 0 and 1 have 0."""
    assert distance_weights(1, 4).tolist() == [0, 0, 0.75, 0.5]
    prediction = np.array([[1, 0], [0, 1], [0.5, 0.5], [0.25, 0.75]], np.float32)
    expected = [[0, 0], [0, 0], [0.375, 0.375], [0.125, 0.375]]
    assert prefetch_priorities(prediction, 1).tolist() == expected
    assert distance_weights(-1, 4).tolist() == [0.75, 0.5, 0.25, 0]  # before the first layer


def test_early_layers_are_kept_by_eviction() -> None:
    """(P + ε)·(1 - i/L), with ε = 1/8 and L = 2: [1, 1/2]·[.875, .375] and [.625, .625]/2."""
    prediction = np.array([[0.75, 0.25], [0.5, 0.5]], np.float32)
    expected = [[0.875, 0.375], [0.3125, 0.3125]]
    assert eviction_priorities(prediction, 0.125).tolist() == expected


def random_entries(seed: int, count: int, layers: int = 3, experts: int = 5) -> Eamc:
    random = np.random.default_rng(seed)
    eamc = Eamc(64, layers, experts)
    for _ in range(count):
        eamc.add(*random.poisson(0.7, (2, layers, experts)))
    return eamc


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 999), st.integers(1, 20), st.data())
def test_the_running_match_is_the_cosine(seed: int, count: int, data: st.DataObject) -> None:
    """Compare with products of whole matrices, over passes, skipped layers and added entries."""
    eamc = random_entries(seed, count)
    matcher = Matcher(eamc, "decode")
    history = np.zeros((3, 5))
    for _ in range(data.draw(st.integers(1, 4))):
        matcher.begin_pass()
        for layer in range(3):
            ids = data.draw(st.lists(st.integers(0, 4), max_size=12))
            if not ids and data.draw(st.booleans()):
                continue
            matcher.observe(layer, np.array([ids], np.int64))
            np.add.at(history[layer], ids, 1)
            if data.draw(st.integers(0, 5)) == 0:
                eamc.add(*np.random.default_rng(seed + layer).poisson(1, (2, 3, 5)))
            seen = history[: layer + 1].ravel()
            for place, found in enumerate(matcher.similarity()):
                entry = eamc.entry(place).decode[: layer + 1].ravel().astype(float)
                norm = np.linalg.norm(seen) * np.linalg.norm(entry)
                assert found == pytest.approx(entry @ seen / norm if norm else 0, abs=1e-5)


def test_bytes_keep_entries_and_their_age() -> None:
    eamc = of(2, A, B)
    eamc.add(eam([3, 1, 0], [0, 4, 0]), B)
    read = Eamc.from_bytes(eamc.to_bytes())
    assert (read.capacity, len(read)) == (2, 2)
    for before, after in zip(eamc.entries(), read.entries(), strict=True):
        assert before.prefill.tolist() == after.prefill.tolist()
        assert before.decode.tolist() == after.decode.tolist()
    assert len(Eamc.from_bytes(eamc.to_bytes(), capacity=1)) == 1
    assert len(Eamc.from_bytes(Eamc(5, 2, 3).to_bytes())) == 0


def test_bytes_of_another_shape_are_refused() -> None:
    arrays = {"prefill": np.zeros((1, 2, 3), np.uint32), "decode": np.zeros((1, 3, 2), np.uint32)}
    meta = {"capacity": 4, "layers": 2, "experts": 3}
    with pytest.raises(BadContainer):
        Eamc.from_bytes(pack("eamc", 1, meta, arrays))
    with pytest.raises(BadContainer):
        Eamc.from_bytes(pack("eamc", 1, {**meta, "capacity": -1}, arrays))


@pytest.mark.parametrize(
    "counts",
    [
        np.zeros((), np.uint32),
        np.zeros((2, 3), np.uint32),
        np.zeros((1, 2, 3, 1), np.uint32),
        np.full((1, 2, 3), np.nan, np.float32),
        np.full((1, 2, 3), -1, np.int32),
    ],
    ids=["no-axis", "two-axes", "four-axes", "not-a-number", "negative"],
)
def test_what_is_no_count_is_refused(counts: np.ndarray) -> None:
    meta = {"capacity": 4, "layers": 2, "experts": 3}
    right = np.zeros((1, 2, 3), np.uint32)
    for arrays in (
        {"prefill": counts, "decode": counts},
        {"prefill": right, "decode": counts},
        {"prefill": counts, "decode": right},
    ):
        with pytest.raises(BadContainer, match="not <u4"):
            Eamc.from_bytes(pack("eamc", 1, meta, arrays))


def test_growing_keeps_what_is_stored() -> None:
    eamc = random_entries(1, 50)
    assert len(eamc) == 50
    first = random_entries(1, 1).entry(0)
    assert eamc.entry(0).prefill.tolist() == first.prefill.tolist()
