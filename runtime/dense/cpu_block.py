"""Decoder blocks as one native call, which ends at an expert that is not in memory.

Between two calls the interpreter takes longer than many a step, and the threads fall asleep. The
call has the bits of the calls that it replaces. Everything but one token per request takes those.
A block whose attention is not native attends alone, and the call does the rest of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import cast

import torch
from torch import Tensor

from moeinf.models.base import Experts
from moeinf.models.layers.attention import GqaAttention
from moeinf.models.layers.decoder import Block, Layer
from moeinf.models.layers.feed_forward import DenseFfn
from moeinf.models.layers.ffn import GatedShared
from moeinf.models.layers.kv_cache import PassRows, Piece
from moeinf.models.layers.mla import LowRank, MlaAttention
from moeinf.models.layers.moe import SparseFfn
from moeinf.native import (
    AttentionHalf,
    DecoderLayer,
    LayerRun,
    LinearKernel,
    MlpKernel,
    RouterKernel,
    SlotKernel,
)
from moeinf.offload.store.compute import MOST_ROWS
from moeinf.offload.store.resident_layers import NativeLayerExperts
from moeinf.runtime.dense.cpu_fused import (
    NativeGqa,
    NativeMla,
    NativeNorm,
    NativeRouter,
    is_q8,
    requests,
)
from moeinf.runtime.dense.cpu_linear import NativeLinear
from moeinf.runtime.dense.cpu_mlp import NativeGate, NativeMlp

_Biased = tuple[LinearKernel, int]  # a linear layer and the address of its bias


class NotFused(Exception):
    """The reason why a part of a block is not in the native call."""


@dataclass
class _Rest:
    """The steps of the call after attention, and the reason why there are not more."""

    router: RouterKernel | None = None
    mlp: MlpKernel | None = None
    gate: _Biased | None = None
    top_k: int = 0  # of the router
    reason: str | None = None  # why the feed-forward network is not one of the steps


class NativeBlock:
    """Block for few requests that bring one token each."""

    def __init__(
        self, block: Block, core: NativeGqa | NativeMla | None, layer: DecoderLayer, rest: _Rest
    ) -> None:
        """Wrap `block`. core: of its attention, None if that is no part of `layer`."""
        self.block, self.core, self.layer, self.top_k = block, core, layer, rest.top_k
        self.joins = rest.reason is None  # the feed-forward network is one of the steps
        self.sparse = block.ffn if self.joins and isinstance(block.ffn, SparseFfn) else None
        self.over = block.over

    def __call__(self, x: Tensor, rows: PassRows, experts: Experts) -> Tensor:
        """Map [T, D] to [T, D]."""
        return NativeBlocks([self])(x, rows, experts)  # not kept: the two would be a cycle

    def stops(self, slots: SlotKernel | None) -> bool:
        """Return whether the native call cannot complete the layer, wherever its experts are."""
        return not self.joins or (self.sparse is not None and slots is None)

    def caches(self, rows: PassRows) -> list[tuple[int, int, int, int, int, int, int]]:
        """Return the requests' caches in this layer, as the native call takes them."""
        return [] if self.core is None else requests(rows.spans, self.core.layer)

    def finish(
        self, y: Tensor, z: Tensor, ids: Tensor, weights: Tensor, experts: Experts
    ) -> Tensor:
        """Return the output [T, D] after the steps up to the experts."""
        block, ffn = self.block, self.block.ffn
        if not self.top_k:
            return block.plus(y, ffn(z, experts))
        assert isinstance(ffn, SparseFfn)
        return block.plus(y, ffn.finish(z, ffn.submit(z, ids, weights, experts)))


class NativeBlocks:
    """Blocks that follow each other, as one call while no expert is absent."""

    def __init__(self, blocks: Sequence[NativeBlock]) -> None:
        """Join blocks of one decoder."""
        self.blocks = blocks
        self._top_k = max(block.top_k for block in blocks)
        self._numbers = [0 if one.sparse is None else one.sparse.layer for one in blocks]
        self._run = LayerRun([one.layer for one in blocks], self._numbers, self._top_k)
        # A call begins where a block has to attend before it.
        self._begins = [one.core is None for one in blocks[1:]] + [True]

    def __call__(self, x: Tensor, rows: PassRows, experts: Experts) -> Tensor:
        """Map [T, D] to [T, D]."""
        count, blocks = len(x), self.blocks
        single = count == len(rows.spans) and count <= MOST_ROWS  # each span has a row
        if not single or x.dtype != torch.bfloat16:
            for block in blocks:
                x = block.block(x, rows, experts)
            return x
        ids = torch.empty(len(blocks), count, self._top_k, dtype=torch.int64)
        weights = torch.empty(len(blocks), count, self._top_k)
        caches, q8 = [block.caches(rows) for block in blocks], is_q8(rows)
        slots, first = self._slots(experts), 0
        while first < len(blocks):
            if blocks[first].core is None:
                x = blocks[first].block.attended(x, rows)
            x = x.contiguous()
            y, z = torch.empty_like(x), torch.empty_like(x)
            # Nothing runs beyond a layer that is not all native, or has to be submitted.
            end = first + 1
            while not self._begins[end - 1] and not blocks[end - 1].stops(slots[end - 1]):
                end += 1
            done = self._run(
                first, x.data_ptr(), count,
                rows.cos.data_ptr(), rows.sin.data_ptr(), rows.cos.shape[-1],
                caches[first:end], q8, slots[first:end],
                y.data_ptr(), z.data_ptr(), ids.data_ptr(), weights.data_ptr(),
            )  # fmt: skip
            for number in range(first, first + done):
                if blocks[number].sparse is not None:
                    assert isinstance(experts, NativeLayerExperts)
                    layer = self._numbers[number]
                    experts.computed(layer, ids[number], weights[number], count * self._top_k)
            first, x = first + done, y
            if first < end:
                x = blocks[first].finish(y, z, ids[first], weights[first], experts)
                first += 1
        return x

    def over(self, x: Tensor, pieces: Sequence[Piece], experts: Experts) -> Tensor:
        """See Block.over."""
        for block in self.blocks:
            x = block.over(x, pieces, experts)
        return x

    def _slots(self, experts: Experts) -> list[SlotKernel | None]:
        """Return where each layer's experts are; None: the layer has to be submitted."""
        sparse = [block.sparse for block in self.blocks]
        whole = isinstance(experts, NativeLayerExperts)
        hints = whole and any(one.ahead for one in sparse if one) and experts.wants_hints
        if not isinstance(experts, NativeLayerExperts) or hints:
            return [None] * len(sparse)
        return [None if one is None else experts.slots(one.layer) for one in sparse]


def joined(blocks: Sequence[Layer]) -> tuple[Layer | NativeBlocks, ...]:
    """Return the blocks, with neighbours joined that one call may compute."""
    found: list[Layer | NativeBlocks] = []
    for native, group in groupby(blocks, lambda block: isinstance(block, NativeBlock)):
        run = list(group)
        found.extend([NativeBlocks(cast(list[NativeBlock], run))] if native else run)
    return tuple(found)


def tuned_block(block: Block) -> Block | NativeBlock:
    """Return the block, or one that computes up to its experts, or all, in one call."""
    rest = _rest(block.ffn)
    try:
        half, core = _attention(block)
    except NotFused:
        if rest.router is None and rest.reason is not None:
            return block  # its norm alone is no gain
        half, core = None, None
    try:
        norm = _norm(block.ffn_norm)
    except NotFused:
        return block
    width = norm[1]
    layer = DecoderLayer(half, width, block.residual, norm, rest.router, rest.mlp, rest.gate)
    return NativeBlock(block, core, layer, rest)


def why_in_pieces(block: Block) -> list[str]:
    """Return why parts of a block of tuned pieces are not in the native call; [] if all are."""
    reasons = []
    for part in (lambda: _attention(block), lambda: _norm(block.ffn_norm)):
        try:
            part()
        except NotFused as error:
            reasons.append(str(error))
    rest = _rest(block.ffn)
    return reasons if rest.reason is None else [*reasons, rest.reason]


def _attention(block: Block) -> tuple[AttentionHalf, NativeGqa | NativeMla]:
    """Return a block's attention and its core. Raises NotFused."""
    attention, widening = block.attention, None
    if isinstance(attention, GqaAttention):
        p = attention.projections
        inputs, output = [p.q, p.k, p.v], p.o
        if attention.gate is not None and not isinstance(attention.gate, NativeGate):
            raise NotFused("its gate")
        gated = attention.gate is not None
    elif isinstance(attention, MlaAttention):
        if attention.scaling is not None:
            raise NotFused("queries scaled by position")
        inputs, output, gated = [attention.q, attention.kv_a], attention.o, False
        if isinstance(attention.q, LowRank):
            inputs[0] = attention.q.down
            widening = _norm(attention.q.norm), _linear(attention.q.up)
    else:
        raise NotFused(type(attention).__name__)
    core = attention.core
    if not isinstance(core, NativeGqa | NativeMla):
        raise NotFused(type(core).__name__)
    half = AttentionHalf(
        _norm(block.attention_norm), [_linear(one) for one in inputs], core.step,
        _linear(output), widening=widening, gated=gated,
    )  # fmt: skip
    return half, core


def _rest(ffn: Callable[[Tensor, Experts], Tensor]) -> _Rest:
    """Return what the call does of a feed-forward layer."""
    found = _Rest()
    try:
        if isinstance(ffn, DenseFfn):
            found.mlp = _mlp(ffn.mlp)
            return found
        if not isinstance(ffn, SparseFfn):
            raise NotFused(type(ffn).__name__)
        if not isinstance(ffn.router, NativeRouter):
            router = getattr(ffn.router, "torch_router", ffn.router)
            raise NotFused(f"its router, a {type(router).__name__}")
        found.router, found.top_k = ffn.router.kernel, ffn.router.top_k
        if ffn.before is not None or ffn.after is not None:
            raise NotFused("steps around its experts")
        if isinstance(ffn.shared, GatedShared):
            if not isinstance(ffn.shared.times, NativeGate):
                raise NotFused("its gate")
            found.mlp, found.gate = _mlp(ffn.shared.expert), _linear(ffn.shared.gate)
        elif ffn.shared is not None:
            found.mlp = _mlp(ffn.shared)
    except NotFused as error:
        found.mlp = found.gate = None
        found.reason = str(error)
    return found


def _mlp(mlp: object) -> MlpKernel:
    """Return a dense network's kernel. Raises NotFused."""
    if not isinstance(mlp, NativeMlp):
        raise NotFused(f"its dense network, a {type(mlp).__name__}")
    return mlp.kernel


def _norm(norm: object) -> tuple[int, int, float, bool]:
    """Return a norm as native steps take it. Raises NotFused."""
    if not isinstance(norm, NativeNorm):
        raise NotFused(f"its norm, a {type(norm).__name__}")
    return norm.native


def _linear(linear: object) -> _Biased:
    """Return a linear layer's kernel and the address of its bias, or 0. Raises NotFused."""
    if not isinstance(linear, NativeLinear):
        raise NotFused("weights that are not bfloat16 or tiles")
    if linear.bias is None:
        return linear.kernel, 0
    if linear.bias.dtype != torch.bfloat16 or not linear.bias.is_contiguous():
        raise NotFused("a bias that is not bfloat16")
    return linear.kernel, linear.bias.data_ptr()
