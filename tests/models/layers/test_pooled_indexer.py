"""Test the choice of pools: against a plain reference, and over texts that end anywhere."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moeinf.models.base import KvForm
from moeinf.models.layers.indexer import IndexerShape
from moeinf.models.layers.kv_cache import CacheLayout, KvCache, Span
from moeinf.models.layers.mla import MlaAttention
from moeinf.models.layers.pooled_indexer import PooledIndexer
from moeinf.models.layers.sparse_mla import SparseMlaAttention
from tests.fakes import DictParts
from tests.models.layers.test_sparse_mla import HIDDEN, SHAPE, TOKENS, X, masked, rows_of, weights

WIDTH = 7
SHAPES = {pool: IndexerShape(5, WIDTH, 8, rope=0, pairs=True, pool=pool) for pool in (1, 2, 4)}


def tensors_of(shape: IndexerShape) -> dict[str, Tensor]:
    draw, name = torch.Generator().manual_seed(4), "a.indexer.index_kpool_compress"
    gate, ape = (torch.randn(rows, width, generator=draw) for rows, width in (
        (WIDTH, HIDDEN), (shape.pool, WIDTH)
    ))  # fmt: skip
    return {**weights(), f"{name}_gate": gate, f"{name}_ape": ape}


def layer_of(shape: IndexerShape) -> SparseMlaAttention:
    parts = DictParts(tensors_of(shape))
    dense = MlaAttention(0, SHAPE, HIDDEN, parts, "a")
    return SparseMlaAttention(
        dense, shape, PooledIndexer(1, shape, HIDDEN, 9, parts, "a.indexer"), True
    )


def new_cache(form: KvForm = "full") -> KvCache:
    cpu, width = torch.device("cpu"), 2 * WIDTH
    layout = CacheLayout(1, ((1, 14),), torch.float32, cpu, form=form, indexers=(width,))
    return KvCache(layout, TOKENS)


def extend(layer: SparseMlaAttention, cache: KvCache, stop: int, x: Tensor = X) -> Tensor:
    """Return the output for the tokens up to `stop` that the cache lacks."""
    start = cache.length
    out = layer(x[start:stop], rows_of(Span(cache, slice(0, stop - start), start)))
    cache.advance(stop - start)
    return out


@functools.cache
def expected_of(shape: IndexerShape) -> Tensor:
    """Return the output for all of X, whose pools are chosen by loops over tokens."""
    w = {name.removeprefix("a.indexer."): tensor for name, tensor in tensors_of(shape).items()}
    narrow = functional.rms_norm(
        X @ w["a.q_a_proj.weight"].T, (9,), w["a.q_a_layernorm.weight"], 1e-6
    )
    queries = (narrow @ w["wq_b.weight"].T).view(TOKENS, 5, WIDTH)
    keys = functional.layer_norm(
        X @ w["wk.weight"].T, (WIDTH,), w["k_norm.weight"], w["k_norm.bias"], 1e-6
    )
    gates = (X @ w["index_kpool_compress_gate"].T).double()
    seen, pool = torch.zeros(TOKENS, TOKENS, dtype=torch.bool), shape.pool
    for t in range(TOKENS):
        scores = []
        for first in range(0, (t + 1) // pool * pool, pool):
            own = slice(first, first + pool)
            chances = (gates[own] + w["index_kpool_compress_ape"]).exp()
            key = (chances / chances.sum(0) * keys[own]).sum(0).float()
            scores.append(float(w["weights_proj.weight"] @ X[t] @ torch.relu(queries[t] @ key)))
        best = sorted(range(len(scores)), key=lambda p: -scores[p])[: 8 // pool]
        for p in best:
            seen[t, p * pool : (p + 1) * pool] = True
        seen[t, (t + 1) // pool * pool : t + 1] = True
    return masked(weights(), seen)


@pytest.mark.parametrize("pool", SHAPES)
@pytest.mark.parametrize("cuts", [[], [11], [3, 8, 22], list(range(1, TOKENS))])
def test_it_sees_pools_and_what_follows_the_last(pool: int, cuts: list[int]) -> None:
    """A prompt at once, in chunks that cut pools, and token by token."""
    layer, cache = layer_of(SHAPES[pool]), new_cache()
    found = torch.cat([extend(layer, cache, stop) for stop in [*cuts, TOKENS]])
    torch.testing.assert_close(found, expected_of(SHAPES[pool]), rtol=1e-4, atol=1e-4)
    first = SHAPES[pool].reach
    assert torch.equal(*(  # dense up to there
        extend(layer_of(IndexerShape(5, WIDTH, top, 0, True, pool)), new_cache(), first)
        for top in (8, 64)
    ))  # fmt: skip


@pytest.mark.parametrize("kept", [14, 15, 16, 17])
def test_a_text_goes_back_into_a_pool(kept: int) -> None:
    """The last token of a pool is written again: by others, then by itself."""
    layer, cache = layer_of(SHAPES[4]), new_cache()
    other = X.flip(0)
    extend(layer, cache, kept)
    extend(layer, cache, 25, other)
    cache.truncate(kept)
    copy = cache.snapshot()
    extend(layer, cache, 25, other)
    found = extend(layer, copy, TOKENS)
    torch.testing.assert_close(found, expected_of(SHAPES[4])[kept:], rtol=1e-4, atol=1e-4)


def test_in_q8() -> None:
    """Keys, gates and the keys of pools are stored in q8; they choose nearly the same."""
    layer, cache = layer_of(SHAPES[4]), new_cache("q8")
    small = torch.cat([extend(layer, cache, stop) for stop in (4, 21, TOKENS)])
    full = expected_of(SHAPES[4])
    error = (full - small).norm(dim=-1) / full.norm(dim=-1)
    assert 1e-5 < float(error.median()) < 0.02
    assert cache.layout.bytes_per_token == (2 + 14) + (2 + 14)
