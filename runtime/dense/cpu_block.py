"""A decoder block whose steps up to the experts are one native call.

Between two calls the interpreter takes longer than many a step, and the threads fall asleep. The
call has the bits of the calls that it replaces. Everything but one token per request takes those.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeinf.models.base import Experts
from moeinf.models.layers.attention import GqaAttention
from moeinf.models.layers.decoder import Block
from moeinf.models.layers.kv_cache import PassRows
from moeinf.models.layers.mla import MlaAttention
from moeinf.models.layers.moe import SparseFfn
from moeinf.native import AttentionHalf, LinearKernel
from moeinf.offload.store.compute import MOST_ROWS
from moeinf.runtime.dense.cpu_fused import (
    NativeGqa,
    NativeMla,
    NativeNorm,
    NativeRouter,
    is_q8,
    native_norm,
    requests,
)
from moeinf.runtime.dense.cpu_linear import NativeLinear


class NativeBlock:
    """Block for few requests that bring one token each."""

    def __init__(
        self, block: Block, core: NativeGqa | NativeMla, half: AttentionHalf, top_k: int | None
    ) -> None:
        """Wrap `block`. half: its steps up to the router; top_k: of the router, None without."""
        self._block, self._core, self._half, self._top_k = block, core, half, top_k
        self.over = block.over

    def __call__(self, x: Tensor, rows: PassRows, experts: Experts) -> Tensor:
        """Map [T, D] to [T, D]."""
        count, core, block = len(x), self._core, self._block
        single = count == len(rows.spans) and count <= MOST_ROWS  # each span has a row
        native = x.dtype == torch.bfloat16 and rows.cos.shape[-1] == core.angles
        if not single or not native or is_q8(rows):
            return block(x, rows, experts)
        x = x.contiguous()
        y, z = torch.empty_like(x), torch.empty_like(x)
        top_k = self._top_k or 0
        ids = torch.empty(count, top_k, dtype=torch.int64)
        weights = torch.empty(count, top_k)
        self._half(
            x.data_ptr(), rows.cos.data_ptr(), rows.sin.data_ptr(),
            requests(rows.spans, core.layer),
            y.data_ptr(), z.data_ptr(), ids.data_ptr(), weights.data_ptr(),
        )  # fmt: skip
        if not top_k:
            return block.plus(y, block.ffn(z, experts))
        ffn = block.ffn
        assert isinstance(ffn, SparseFfn)
        return block.plus(y, ffn.finish(z, ffn.submit(z, ids, weights, experts)))


def tuned_block(block: Block) -> Block | NativeBlock:
    """Return the block, or one that computes up to its experts in one call."""
    attention, norms = block.attention, (block.attention_norm, block.ffn_norm)
    if isinstance(attention, GqaAttention) and not attention.shape.gated:
        p = attention.projections
        inputs, output = [p.q, p.k, p.v], p.o
    elif isinstance(attention, MlaAttention) and attention.scaling is None:
        inputs, output = [attention.q, attention.kv_a], attention.o
    else:
        return block
    core = attention.core
    linears = [found for one in [*inputs, output] if (found := _linear(one)) is not None]
    native_norms = [native_norm(norm.torch_norm) for norm in norms if isinstance(norm, NativeNorm)]
    weights = [weight for weight in native_norms if weight is not None]
    if not isinstance(core, NativeGqa | NativeMla) or len(linears) <= len(inputs):
        return block
    if len(weights) < len(norms):
        return block
    before, after = weights
    router = block.ffn.router if isinstance(block.ffn, SparseFfn) else None
    native = router if isinstance(router, NativeRouter) else None
    half = AttentionHalf(
        before, linears[:-1], core.step, linears[-1], block.residual, after,
        None if native is None else native.kernel,
    )  # fmt: skip
    return NativeBlock(block, core, half, None if native is None else native.top_k)


def _linear(linear: object) -> tuple[LinearKernel, int] | None:
    """Return a linear layer's kernel and the address of its bias; None: it is not native."""
    if not isinstance(linear, NativeLinear):
        return None
    if linear.bias is None:
        return linear.kernel, 0
    return (linear.kernel, linear.bias.data_ptr()) if _fits(linear.bias) else None


def _fits(bias: Tensor) -> bool:
    return bias.dtype == torch.bfloat16 and bias.is_contiguous()
