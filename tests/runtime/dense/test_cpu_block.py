"""A block's steps up to its experts as one call: the bits of the block that it replaces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moeinf.models.base import Linear
from moeinf.models.layers.attention import GqaAttention, GqaShape, Projections
from moeinf.models.layers.decoder import Block
from moeinf.models.layers.kv_cache import CacheLayout, KvCache
from moeinf.models.layers.mla import MlaAttention, MlaShape
from moeinf.models.layers.moe import Done, SparseFfn
from moeinf.models.layers.norms import HeadNorm, RmsNorm
from moeinf.models.layers.routing import SoftmaxRouter
from moeinf.native import AttentionHalf, GqaStep, LinearKernel
from moeinf.offload.format.quantise import quantise
from moeinf.offload.store.compute import MOST_ROWS
from moeinf.runtime.dense.cpu_backend import CpuMath
from moeinf.runtime.dense.cpu_block import NativeBlock
from moeinf.runtime.dense.cpu_fused import tuned
from moeinf.runtime.dense.cpu_linear import plain_linear, tiled_linear
from tests.runtime.dense.test_cpu_fused import BF16, Draw, few_threads, rows_of

assert few_threads  # its fixture is used here, too
D, E, K, LAYERS = 96, 8, 3, 2
PLANES = ((2, 32),) * 2
FORMS = {"q": "Q4K", "k": "Q4K", "v": "Q6K", "o": "Q8"}


class Sums:
    """`Experts` whose output depends on everything that a layer submits."""

    wants_hints = False

    def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Done:
        self.ids, self.weights = ids, weights
        return Done(x * (ids.sum(1, keepdim=True) + weights.sum(1, keepdim=True)).to(x.dtype))


class Weights:
    """The `Parts` of a block: random weights, each matrix in its own format."""

    def __init__(self, forms: dict[str, str]) -> None:
        self._draw, self._forms = Draw(7), forms
        self.tuned = tuned

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._draw(*shape, about=1.0) / 4

    def linear(
        self, prefix: str, out_features: int, in_features: int, bias: bool = False
    ) -> Linear:
        weight, name = self._draw(out_features, in_features) / 8, prefix.split(".")[-1][0]
        offset = self._draw(out_features) if bias else None
        form = self._forms.get(name)
        if form is None:
            return plain_linear(weight, offset)
        tiles = quantise(weight.float(), form)
        return tiled_linear(tiles, form, out_features, in_features, offset)


def norm(width: int = D) -> RmsNorm:
    return RmsNorm(Draw(width)(width, about=1.0), 1e-5)


def gqa(forms: dict[str, str], per_head: bool = False, **changes: object) -> GqaAttention:
    shape = GqaShape(**{"heads": 6, "kv_heads": 2, "head_dim": 32, **changes})  # type: ignore[arg-type]
    wide, narrow, parts = (
        shape.heads * shape.head_dim,
        shape.kv_heads * shape.head_dim,
        Weights(forms),
    )
    linears = [
        parts.linear(n, w, D, shape.qkv_bias)
        for n, w in zip("qkv", (wide, narrow, narrow), strict=True)
    ]
    o = parts.linear("o", D, wide, shape.bias)
    norms = (HeadNorm(norm(32)),) * 2 if per_head else (norm(wide), norm(narrow))
    return GqaAttention(1, shape, Projections(*linears, o, parts.tuned), *norms)


def mla(forms: dict[str, str]) -> MlaAttention:
    return MlaAttention(1, MlaShape(5, 24, 8, 20, 40, None, scale=0.17), D, Weights(forms), "a")  # type: ignore[arg-type]


CASES: dict[str, Callable[[], Block]] = {
    "tiles of several formats": lambda: block(gqa(FORMS)),
    "bfloat16, norms by head": lambda: block(gqa({}, per_head=True)),
    "biases": lambda: block(gqa(FORMS, bias=True, qkv_bias=True)),
    "clipped in a window": lambda: block(gqa(FORMS, clip=0.9, window=4)),
    "a residual factor": lambda: replace(block(gqa(FORMS)), residual=0.22),
    "latent": lambda: block(mla({"q": "Q4", "k": "Q8"})),
    "no experts": lambda: replace(block(gqa(FORMS)), ffn=lambda x, experts: x * 3),
}


def block(attention: GqaAttention | MlaAttention) -> Block:
    router = SoftmaxRouter(Draw(5)(E, D) / 10, K, renormalise=True)
    ffn = SparseFfn(1, tuned(router), shared=lambda x: x * 2)
    return Block(tuned(norm()), attention, tuned(norm()), ffn)


@pytest.mark.parametrize("name", list(CASES))
def test_the_bits_of_the_pieces(name: str) -> None:
    pieces = CASES[name]()
    whole, latent = CpuMath().tuned(pieces), isinstance(pieces.attention, MlaAttention)
    assert isinstance(whole, NativeBlock)
    planes, rope = (((1, 48),), 8) if latent else (PLANES, 32)
    layout, draw = CacheLayout(LAYERS, planes, BF16, torch.device("cpu")), Draw(9)
    theirs, mine = ([KvCache(layout, 20) for _ in range(3)] for _ in range(2))
    for counts in ([5, 1, 2], [1, 1, 1], [1], [1, 1], [1, 3]):
        x, used = draw(sum(counts), D), len(counts)
        routed = Sums(), Sums()
        wanted = pieces(x, rows_of(counts, theirs[:used], rope), routed[0])  # type: ignore[arg-type]
        found = whole(x, rows_of(counts, mine[:used], rope), routed[1])  # type: ignore[arg-type]
        assert torch.equal(found, wanted)
        if name != "no experts":
            assert torch.equal(routed[1].ids, routed[0].ids)
            assert torch.equal(routed[1].weights, routed[0].weights)
        for caches in (theirs, mine):
            for cache, count in zip(caches, counts, strict=False):
                cache.advance(count)
    for left, right in zip(theirs, mine, strict=True):
        for a, b in zip(left.planes(1), right.planes(1), strict=True):
            assert torch.equal(a[:, : left.length], b[:, : left.length])


def test_what_stays_in_pieces() -> None:
    """A piece that is not native, and rows that the call does not take."""
    pieces = block(gqa(FORMS))
    for other in (
        replace(pieces, attention_norm=norm()),
        replace(pieces, attention=gqa({}, gated=True)),
    ):
        assert CpuMath().tuned(other) is other
    whole, layout = CpuMath().tuned(pieces), CacheLayout(LAYERS, PLANES, BF16, torch.device("cpu"))
    x = Draw(1)(MOST_ROWS + 1, D)
    caches = [[KvCache(layout, 4) for _ in x] for _ in range(2)]
    results = [
        made(x, rows_of([1] * len(x), held, 32), Sums())  # type: ignore[arg-type]
        for made, held in zip((pieces, whole), caches, strict=True)
    ]
    assert torch.equal(*results)


def test_pieces_that_do_not_fit_together() -> None:
    """Widths and numbers of projections, and widths of norms, are those of the step."""
    held = {width: Draw(1)(16, width) for width in (8, 16)}
    linear = LinearKernel("bf16", 8, 16, held[16].data_ptr())
    step = GqaStep(1, 1, 8, 1.0, 0, None, None, 0.0)
    wide, square = (LinearKernel("bf16", 16, n, held[n].data_ptr()) for n in (8, 16))
    weight = norm(16).weight.data_ptr()
    for inputs, output, width in (
        ([linear] * 2, wide, 16),
        ([linear, linear, wide], wide, 16),
        ([linear] * 3, square, 16),
        ([linear] * 3, wide, 8),
    ):
        with pytest.raises(ValueError, match="of another"):
            AttentionHalf(
                (weight, width, 1e-5), [(one, 0) for one in inputs], step, (output, 0),
                1.0, (weight, width, 1e-5), None,
            )  # fmt: skip
