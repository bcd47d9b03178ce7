"""A block's steps up to its experts as one call: the bits of the block that it replaces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor

from moeinf.models.base import KvForm, Linear, Phase
from moeinf.models.layers.attention import (
    GqaAttention,
    GqaCore,
    GqaShape,
    InterleavedRopeCore,
    NormAfterRopeCore,
    NoRopeCore,
    Projections,
)
from moeinf.models.layers.decoder import Block
from moeinf.models.layers.feed_forward import DenseFfn
from moeinf.models.layers.ffn import GatedMlp, gated_mlp, gated_shared
from moeinf.models.layers.kv_cache import CacheLayout, KvCache
from moeinf.models.layers.mla import MlaAttention, MlaShape
from moeinf.models.layers.moe import Done, SparseFfn
from moeinf.models.layers.norms import HeadNorm, RmsNorm, WideRmsNorm
from moeinf.models.layers.routing import SoftmaxRouter
from moeinf.native import (
    AttentionHalf,
    DecoderLayer,
    ExpertKernel,
    GqaStep,
    LinearKernel,
    RouterKernel,
    SlotKernel,
)
from moeinf.offload.format.quantise import quantise
from moeinf.offload.store.compute import MOST_ROWS
from moeinf.offload.store.resident_layers import NativeLayer, NativeLayerExperts
from moeinf.runtime.dense.cpu_backend import CpuMath
from moeinf.runtime.dense.cpu_block import NativeBlock, why_in_pieces
from moeinf.runtime.dense.cpu_fused import tuned
from moeinf.runtime.dense.cpu_linear import plain_linear, tiled_linear
from moeinf.runtime.dense.cpu_mlp import NativeMlp
from tests.runtime.dense.test_cpu_fused import BF16, Draw, few_threads, rows_of

assert few_threads  # its fixture is used here, too
D, F, E, K, LAYERS = 96, 64, 8, 3, 2
PLANES = ((2, 32),) * 2
FORMS = {"q": "Q4K", "k": "Q4K", "v": "Q6K", "o": "Q8"}


class Sums:
    """`Experts` whose output depends on everything that a layer submits."""

    wants_hints = False

    def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Done:
        self.ids, self.weights = ids, weights
        return Done(x * (ids.sum(1, keepdim=True) + weights.sum(1, keepdim=True)).to(x.dtype))


class InSlots(NativeLayerExperts):
    """`Experts` of both layers in slots; `absent` have none. It counts how a layer is computed."""

    wants_hints = False

    def __init__(self, absent: Sequence[int] = ()) -> None:
        kernel = ExpertKernel("bf16", D, F)
        size = -(-kernel.expert_bytes // 64) * 64
        weights = Draw(4)(LAYERS * E, size // 2) / 8
        self._held = torch.empty(LAYERS * E * size + 64, dtype=torch.uint8)
        start = -self._held.data_ptr() % 64
        slots = self._held[start : start + LAYERS * E * size]
        slots.copy_(weights.view(torch.uint8).flatten())
        self._table = torch.arange(LAYERS * E, dtype=torch.int32)
        self._table[[E + expert for expert in absent]] = -1
        self.kernel = SlotKernel(kernel, self._table.data_ptr(), LAYERS, E, slots.data_ptr(), size)
        self.submitted, self.whole = 0, list[tuple[int, int, Tensor]]()

    def begin_pass(self, rows: Tensor, phase: Phase, pieces: Sequence[slice] = ()) -> None: ...

    def end_pass(self, accepted_rows: Tensor | None = None) -> None: ...

    def hint(self, layer: int, ids: Tensor, scores: Tensor) -> None: ...

    def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Done:
        self.submitted += 1
        found = ids if self.kernel.count(layer, ids.data_ptr(), *ids.shape) >= 0 else ids % 2
        return Done(NativeLayer(self.kernel, layer, x, found, weights, 0).result())

    def slots(self, layer: int) -> SlotKernel:
        return self.kernel

    def computed(self, layer: int, ids: Tensor, weights: Tensor, events: int) -> None:
        self.whole.append((layer, events, ids))


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


def wide_norm(width: int = D) -> WideRmsNorm:
    return WideRmsNorm(norm(width).weight, 1e-5)


def gqa(
    forms: dict[str, str],
    per_head: bool = False,
    layer: int = 1,
    core: type[GqaCore] = GqaCore,
    sinks: Tensor | None = None,
    **changes: object,
) -> GqaAttention:
    shape = GqaShape(**{"heads": 6, "kv_heads": 2, "head_dim": 32, **changes})  # type: ignore[arg-type]
    wide, narrow, parts = (
        shape.heads * shape.head_dim,
        shape.kv_heads * shape.head_dim,
        Weights(forms),
    )
    widths = (2 * wide if shape.gated else wide, narrow, shape.kv_heads * shape.value_width)
    linears = [parts.linear(n, w, D, shape.qkv_bias) for n, w in zip("qkv", widths, strict=True)]
    o = parts.linear("o", D, shape.heads * shape.value_width, shape.bias)
    norms = (HeadNorm(wide_norm(32)),) * 2 if per_head else (norm(wide), norm(narrow))
    made = Projections(*linears, o, parts.tuned)
    return GqaAttention(layer, shape, made, *norms, sinks=sinks, core=core)


def mla(forms: dict[str, str], bottleneck: int | None = None) -> MlaAttention:
    shape = MlaShape(5, 24, 8, 20, 40, bottleneck, scale=0.17, bias=bottleneck is not None)
    return MlaAttention(1, shape, D, Weights(forms), "a")  # type: ignore[arg-type]


CASES: dict[str, Callable[[], Block]] = {
    "tiles of several formats": lambda: block(gqa(FORMS)),
    "bfloat16, norms by head": lambda: block(gqa({}, per_head=True)),
    "biases": lambda: block(gqa(FORMS, bias=True, qkv_bias=True)),
    "clipped in a window": lambda: block(gqa(FORMS, clip=0.9, window=4)),
    "a residual factor": lambda: replace(block(gqa(FORMS)), residual=0.22),
    "latent": lambda: block(mla({"q": "Q4", "k": "Q8"})),
    "latent behind a bottleneck": lambda: block(mla({"q": "Q4", "k": "Q8"}, bottleneck=64)),
    "no experts": lambda: replace(block(gqa(FORMS)), ffn=lambda x, experts: x * 3),
    "part of a head rotates": lambda: block(gqa(FORMS)),
    "gated": lambda: block(gqa(FORMS, per_head=True, gated=True)),
    "no rotation": lambda: block(gqa(FORMS, core=NoRopeCore)),
    "neighbours rotate": lambda: block(gqa(FORMS, core=InterleavedRopeCore)),
    "norms after the rotation": lambda: block(gqa(FORMS, per_head=True, core=NormAfterRopeCore)),
    "narrow values": lambda: block(gqa(FORMS, value_dim=24)),
    "sinks, wide norms": lambda: replace(
        block(gqa(FORMS, sinks=Draw(2)(6), window=3)),
        attention_norm=tuned(wide_norm()),
        ffn_norm=tuned(wide_norm()),
    ),
    "other attention": lambda: replace(block(gqa(FORMS)), attention=lambda x, rows: x * 0.5),
    "another norm": lambda: replace(block(gqa(FORMS)), attention_norm=norm()),
}


def block(attention: GqaAttention | MlaAttention) -> Block:
    router = SoftmaxRouter(Draw(5)(E, D) / 10, K, renormalise=True)
    ffn = SparseFfn(1, tuned(router), shared=lambda x: x * 2)
    return Block(tuned(norm()), attention, tuned(norm()), ffn)


@pytest.mark.parametrize(
    ("name", "form"),
    [(name, "full") for name in CASES] + [(n, "q8") for n in ("biases", "latent", "gated")],
)
def test_the_bits_of_the_pieces(name: str, form: KvForm) -> None:
    pieces = CASES[name]()
    whole, latent = CpuMath().tuned(pieces), isinstance(pieces.attention, MlaAttention)
    assert isinstance(whole, NativeBlock)
    assert (whole.core is None) == (name in ("other attention", "another norm"))
    planes, rope = (((1, 48),), 8) if latent else (PLANES, 32)
    rope = 16 if name in ("part of a head rotates", "gated") else rope
    if name == "narrow values":
        planes = (2, 32), (2, 24)
    layout = CacheLayout(LAYERS, planes, BF16, torch.device("cpu"), form=form)
    draw = Draw(9)
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
            written = 0 if name == "other attention" else left.length
            assert torch.equal(a[:, :written], b[:, :written])


def whole_case(ffn: str) -> Block:
    """Return a block of pieces whose feed-forward layer one call can compute."""
    mlp = gated_mlp(Weights(FORMS), "mlp", D, 160)
    made = replace(block(gqa(FORMS)), residual=0.22)
    if ffn == "dense":
        return replace(made, ffn=DenseFfn(mlp))
    gated = gated_shared(Weights(FORMS), "mlp", D, 160)
    shared = {"experts": None, "shared": mlp, "gated": gated, "odd": lambda x: x * 2}[ffn]
    return replace(made, ffn=replace(cast(SparseFfn, made.ffn), shared=shared))


@pytest.mark.parametrize("ffn", ["experts", "shared", "gated", "dense", "odd"])
def test_a_whole_layer(ffn: str) -> None:
    """It has the bits of the pieces; a layer with an absent expert is submitted."""
    pieces = whole_case(ffn)
    whole, layout = CpuMath().tuned(pieces), CacheLayout(LAYERS, PLANES, BF16, torch.device("cpu"))
    odd = [2, 3, 4, 5, 6, 7]
    for absent, counts in (((), [1]), ((), [1, 1, 1]), (odd, [1, 1])):
        x = Draw(9)(len(counts), D)
        caches = [[KvCache(layout, 4) for _ in counts] for _ in range(2)]
        experts = InSlots(absent), InSlots(absent)
        wanted, found = (
            made(x, rows_of(counts, held, 32), one)  # type: ignore[arg-type]
            for made, held, one in zip((pieces, whole), caches, experts, strict=True)
        )
        assert torch.equal(found, wanted)
        submits = ffn != "dense" and (ffn == "odd" or bool(absent))
        assert experts[1].submitted == submits
        routed = ffn != "dense" and not submits
        assert [(layer, events) for layer, events, _ in experts[1].whole] == [
            (1, K * len(counts))
        ] * routed


@pytest.mark.parametrize("absent", [(), (2, 3, 4, 5, 6, 7)])
def test_blocks_that_follow_each_other(absent: tuple[int, ...]) -> None:
    """One call computes them up to an absent expert; the rest is another."""
    first, last = whole_case("shared"), whole_case("experts")
    first = replace(
        first, attention=gqa(FORMS, layer=0), ffn=replace(cast(SparseFfn, first.ffn), layer=0)
    )
    dense = replace(whole_case("dense"), attention=gqa(FORMS, layer=2))
    other = replace(whole_case("dense"), attention=lambda x, rows: x * 0.5)
    pieces = (first, other, other, last, dense)
    math = CpuMath()
    (whole,) = math.tuned(tuple(math.tuned(one) for one in pieces))  # type: ignore[type-var]
    layout = CacheLayout(3, PLANES, BF16, torch.device("cpu"))
    caches = [[KvCache(layout, 8) for _ in range(2)] for _ in range(2)]
    for token in range(3):
        x = Draw(token)(2, D)
        experts = InSlots(absent), InSlots(absent)
        wanted = x
        for one in pieces:
            wanted = one(wanted, rows_of([1, 1], caches[0], 32), experts[0])
        found = whole(x, rows_of([1, 1], caches[1], 32), experts[1])
        assert torch.equal(found, wanted)
        assert experts[1].submitted == bool(absent)
        assert [layer for layer, _, _ in experts[1].whole] == [0, 1][: 1 if absent else 2]
        for cache in (*caches[0], *caches[1]):
            cache.advance(1)
    for left, right in zip(*caches, strict=True):
        for layer in range(3):
            for a, b in zip(left.planes(layer), right.planes(layer), strict=True):
                assert torch.equal(a[:, : left.length], b[:, : left.length])


def test_native_mlp_rows_do_not_depend_on_company() -> None:
    """One row, few, and more than a call takes; torch's own network is near."""
    parts = Weights({"g": "Q8", "u": "Q4", "d": "Q8"})
    plain = GatedMlp(*(parts.linear(n, 160, D) for n in ("g", "u")), parts.linear("d", D, 160))
    mlp, x = tuned(plain), Draw(3)(MOST_ROWS + 90, D)
    assert isinstance(mlp, NativeMlp)
    assert isinstance(tuned(replace(plain, up=lambda rows: rows)), GatedMlp)
    together = mlp(x)
    assert torch.equal(torch.cat([mlp(x[at : at + 1]) for at in range(len(x))]), together)
    assert torch.equal(mlp(x[:MOST_ROWS]), together[:MOST_ROWS])
    torch.testing.assert_close(together, plain(x), rtol=2e-2, atol=2e-2)
    assert torch.equal(mlp(x[:2].float()), plain(x[:2].float()))


def test_what_stays_in_pieces() -> None:
    """A piece that is not native, and rows that the call does not take."""
    pieces = block(gqa(FORMS))
    other = replace(pieces, attention_norm=norm(), ffn=lambda x, experts: x)
    for left in (replace(pieces, ffn_norm=norm()), other):
        assert CpuMath().tuned(left) is left
    assert why_in_pieces(pieces) == ["its dense network, a function"]
    assert why_in_pieces(other) == ["its norm, a RmsNorm", "function"]
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
                (weight, width, 1e-5, False), [(one, 0) for one in inputs], step, (output, 0)
            )
    normed, inputs = (weight, 16, 1e-5, False), [(one, 0) for one in [linear] * 3]
    for changes in (
        {"gated": True},
        {"gated": True, "widening": (normed, (square, 0))},
        {"widening": (normed, (square, 0))},
    ):
        with pytest.raises(ValueError, match="of another"):
            AttentionHalf(normed, inputs, step, (wide, 0), **changes)  # type: ignore[arg-type]
    half = AttentionHalf(normed, inputs, step, (wide, 0))
    router = RouterKernel(held[8].data_ptr(), 16, 8, 2, False, 1.0, 1, 1, "softmax", 0)
    for width, chosen, gate in ((8, None, None), (16, router, None), (16, None, (square, 0))):
        with pytest.raises(ValueError, match="of another"):
            DecoderLayer(half, width, 1.0, (weight, width, 1e-5, False), chosen, None, gate)
