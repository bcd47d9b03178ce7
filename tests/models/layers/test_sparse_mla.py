"""Test latent attention to chosen keys: against a plain reference, and up to its border."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moeinf.models.base import KvForm
from moeinf.models.layers import attention, indexer
from moeinf.models.layers.indexer import Indexer, IndexerShape, largest
from moeinf.models.layers.kv_cache import CacheLayout, KvCache, PassRows, Span
from moeinf.models.layers.mla import MlaAttention, MlaShape
from moeinf.models.layers.sparse_mla import SparseMlaAttention, divided_at
from tests.fakes import DictParts

HIDDEN, TOKENS = 6, 30
SHAPE = MlaShape(heads=3, nope=10, rope=4, value=12, kv_lora=10, q_lora=9, scale=0.2)
INDEX = IndexerShape(heads=5, width=7, top=8, rope=4, pairs=False)
SIZES = {
    "q_a_proj.weight": (9, HIDDEN),
    "q_a_layernorm.weight": (9,),
    "q_b_proj.weight": (3 * 14, 9),
    "kv_a_proj_with_mqa.weight": (14, HIDDEN),
    "kv_a_layernorm.weight": (10,),
    "kv_b_proj.weight": (3 * 22, 10),
    "o_proj.weight": (HIDDEN, 36),
    "indexer.wq_b.weight": (5 * 7, 9),
    "indexer.wk.weight": (7, HIDDEN),
    "indexer.k_norm.weight": (7,),
    "indexer.k_norm.bias": (7,),
    "indexer.weights_proj.weight": (5, HIDDEN),
}
X = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))


def weights(**changes: float) -> dict[str, Tensor]:
    """Return random weights; changes: factors of some, with _ for each dot."""
    draw = torch.Generator().manual_seed(0)
    found = {f"a.{name}": torch.randn(size, generator=draw) for name, size in SIZES.items()}
    for name, factor in changes.items():
        found[f"a.indexer.{name}.weight"] *= factor
    return found


def layer_of(tensors: dict[str, Tensor], shape: IndexerShape = INDEX) -> SparseMlaAttention:
    parts = DictParts(tensors)
    dense = MlaAttention(0, SHAPE, HIDDEN, parts, "a")
    chooser = Indexer(1, shape, HIDDEN, 9, parts, "a.indexer")
    return SparseMlaAttention(dense, shape, chooser, lends=True)


def rows_of(*spans: Span) -> PassRows:
    positions = torch.cat([torch.arange(s.past, s.past + s.count) for s in spans])
    angles = (positions[:, None] * torch.tensor([0.7, 0.1])).float()
    return PassRows(spans, positions, angles.cos(), angles.sin())


def new_cache(form: KvForm = "full") -> KvCache:
    layout = CacheLayout(
        1, ((1, 14),), torch.float32, torch.device("cpu"), form=form, indexers=(7,)
    )
    return KvCache(layout, TOKENS)


def run(layer: SparseMlaAttention, cuts: list[int], form: KvForm = "full") -> Tensor:
    """Return the output for all of X, given in pieces."""
    cache, out = new_cache(form), []
    for start, stop in zip([0, *cuts], [*cuts, TOKENS], strict=True):
        out.append(layer(X[start:stop], rows_of(Span(cache, slice(0, stop - start), start))))
        cache.advance(stop - start)
    return torch.cat(out)


@functools.cache
def places_of(shape: IndexerShape) -> Tensor:
    """Return [T, S] bool: the keys that each token sees, by loops over tokens and a stable sort."""
    w = {name.removeprefix("a."): tensor for name, tensor in weights().items()}
    rows = rows_of(Span(new_cache(), slice(0, TOKENS), 0))
    narrow = functional.rms_norm(X @ w["q_a_proj.weight"].T, (9,), w["q_a_layernorm.weight"], 1e-6)
    queries = (narrow @ w["indexer.wq_b.weight"].T).view(TOKENS, shape.heads, shape.width)
    keys = functional.layer_norm(
        X @ w["indexer.wk.weight"].T,
        (7,),
        w["indexer.k_norm.weight"],
        w["indexer.k_norm.bias"],
        1e-6,
    )

    def turned(vector: Tensor, at: int) -> Tensor:
        vector = vector.clone()
        for pair in range(2):
            i, j = (2 * pair, 2 * pair + 1) if shape.pairs else (pair, pair + 2)
            cos, sin = rows.cos[at, pair], rows.sin[at, pair]
            a, b = vector[i].clone(), vector[j].clone()
            vector[i], vector[j] = a * cos - b * sin, a * sin + b * cos
        return vector

    keys = torch.stack([turned(keys[s], s) for s in range(TOKENS)])
    seen = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    for t in range(TOKENS):
        scores = torch.zeros(t + 1)
        for h, weight in enumerate(w["indexer.weights_proj.weight"] @ X[t]):
            scores += weight * torch.relu(keys[: t + 1] @ turned(queries[t, h], t))
        order = sorted(range(t + 1), key=lambda s: -scores[s])  # stable: the earlier one first
        seen[t, order[: shape.top]] = True
    return seen


def masked(tensors: dict[str, Tensor], seen: Tensor) -> Tensor:
    """Return latent attention in which each token sees the keys of `seen` [T, S]."""
    dense = MlaAttention(0, SHAPE, HIDDEN, DictParts(tensors), "a")
    rows = rows_of(Span(new_cache(), slice(0, TOKENS), 0))
    q_nope, q_rope, memory = dense.torch_core.heads(dense.q(X), dense.kv_a(X), rows)
    latent, k_rope = torch.split(memory[:, 0], [10, 4], -1)
    k_nope = torch.einsum("sc,hnc->hsn", latent, dense.torch_core.kv_b[:, :10])
    values = torch.einsum("sc,hvc->hsv", latent, dense.torch_core.kv_b[:, 10:])
    scores = torch.einsum("thn,hsn->hts", q_nope, k_nope) + torch.einsum(
        "thr,sr->hts", q_rope, k_rope
    )
    chances = (scores * SHAPE.scale).masked_fill(~seen, -torch.inf).softmax(-1)
    return dense.o(torch.einsum("hts,hsv->thv", chances, values).flatten(1))


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("cuts", [[], [1], [7], [8], [9], [3, 20], list(range(1, TOKENS))])
def test_it_sees_what_the_indexer_chooses(pairs: bool, cuts: list[int]) -> None:
    """A prompt at once, in chunks on both sides of the border, and token by token."""
    shape, tensors = replace(INDEX, pairs=pairs), weights()
    seen = places_of(shape)
    assert not torch.equal(seen, places_of(replace(shape, pairs=not pairs)))
    found = run(layer_of(tensors, shape), cuts)
    torch.testing.assert_close(found, masked(tensors, seen), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cuts", [[], [9], list(range(1, TOKENS))])
def test_of_equal_scores_the_earlier_token_wins(cuts: list[int]) -> None:
    """Without weights all scores are 0, so every token sees the first eight."""
    tensors = weights(weights_proj=0.0)
    seen = torch.arange(TOKENS) <= torch.arange(TOKENS)[:, None]
    seen[:, INDEX.top :] = False
    found = run(layer_of(tensors), cuts)
    torch.testing.assert_close(found, masked(tensors, seen), rtol=1e-4, atol=1e-4)


def test_largest_with_many_equal_scores() -> None:
    draw = torch.Generator().manual_seed(3)
    scores = torch.randint(-3, 3, (40, 50), generator=draw).float()
    scores[5] = -torch.inf
    scores[6, 10:] = torch.inf
    for count in (1, 7, 49, 50):
        order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        assert torch.equal(largest(scores, count).long(), order.sort(-1).values)


@pytest.mark.parametrize("cuts", [[], [5], list(range(1, 20))])
def test_up_to_the_border_it_is_dense(cuts: list[int]) -> None:
    """The bits of plain latent attention, and the keys of later choices."""
    tensors, shape = weights(), replace(INDEX, top=TOKENS)
    dense = MlaAttention(0, SHAPE, HIDDEN, DictParts(tensors), "a")
    cache, plain = new_cache(), new_cache()
    layer = layer_of(tensors, shape)
    for start, stop in zip([0, *cuts], [*cuts, TOKENS], strict=True):
        span = slice(0, stop - start)
        found = layer(X[start:stop], rows_of(Span(cache, span, start)))
        assert torch.equal(found, dense(X[start:stop], rows_of(Span(plain, span, start))))
        for one in (cache, plain):
            one.advance(stop - start)
    assert torch.equal(cache.planes(0)[0], plain.planes(0)[0])


def test_small_blocks_choose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row at a time, and scores of a few keys at a time."""
    whole = run(layer_of(weights()), [4])
    monkeypatch.setattr(attention, "SCRATCH_BYTES", 1)
    monkeypatch.setattr(indexer, "_KEYS", 3)
    torch.testing.assert_close(run(layer_of(weights()), [4]), whole, rtol=1e-4, atol=1e-4)


def test_uneven_rows_in_one_pass() -> None:
    """One request crosses the border, one is before it and one is behind it."""
    layer, starts, stops = layer_of(weights()), (5, 2, 12), (11, 6, 13)
    caches = [new_cache() for _ in starts]
    for cache, start in zip(caches, starts, strict=True):
        layer(X[:start], rows_of(Span(cache, slice(0, start), 0)))
        cache.advance(start)
    spans, at = [], 0
    for cache, start, stop in zip(caches, starts, stops, strict=True):
        spans.append(Span(cache, slice(at, at + stop - start), start))
        at += stop - start
    x = torch.cat([X[a:b] for a, b in zip(starts, stops, strict=True)])
    together, alone = layer(x, rows_of(*spans)), run(layer, [])
    expected = torch.cat([alone[a:b] for a, b in zip(starts, stops, strict=True)])
    torch.testing.assert_close(together, expected, rtol=1e-4, atol=1e-4)


def test_a_layer_without_an_indexer_uses_the_choice_before_it() -> None:
    tensors = weights()
    first = layer_of(tensors)
    dense = MlaAttention(0, SHAPE, HIDDEN, DictParts(tensors), "a")
    second = SparseMlaAttention(dense, INDEX, None, lends=False)
    rows = rows_of(Span(new_cache(), slice(0, TOKENS), 0))
    found = first(X, rows)
    assert [choice.shape for choice in rows.chosen] == [(TOKENS - INDEX.top, INDEX.top)]
    assert torch.equal(second(X, rows), found)
    assert rows.chosen == []


def test_in_q8() -> None:
    """The indexer's keys are stored in q8 too; they choose nearly the same."""
    full, small = run(layer_of(weights()), [4, 20]), run(layer_of(weights()), [4, 20], "q8")
    error = (full - small).norm(dim=-1) / full.norm(dim=-1)
    assert 1e-5 < float(error.median()) < 0.02
    assert new_cache("q8").layout.bytes_per_token == (2 + 14) + (2 + 7 + 1)


def test_a_number_that_is_not_finite_ends_nothing() -> None:
    tensors = weights()
    tensors["a.indexer.wk.weight"] = tensors["a.indexer.wk.weight"] * torch.nan
    layer, cache = layer_of(tensors), new_cache()
    assert layer(X, rows_of(Span(cache, slice(0, TOKENS), 0))).isfinite().all()


def test_divided_at() -> None:
    caches = [new_cache() for _ in range(4)]
    spans = [
        Span(caches[0], slice(0, 3), 0),
        Span(caches[1], slice(3, 9), 5),
        Span(caches[2], slice(9, 10), 8),
        Span(caches[3], slice(10, 11), 7),
    ]
    near, far = divided_at(spans, 8)
    assert near == [spans[0], Span(caches[1], slice(3, 6), 5), spans[3]]
    assert far == [Span(caches[1], slice(6, 9), 8), spans[2]]
