"""Native equivalents of dense networks and gates."""

from __future__ import annotations

import torch
from torch import Tensor

from moeinf.models.layers.ffn import GatedMlp, SigmoidGate
from moeinf.native import MlpKernel, sigmoid_product, silu_product
from moeinf.offload.store.compute import MOST_ROWS
from moeinf.runtime.dense.cpu_linear import NativeLinear

_MLP_ROWS = 64  # at once, as in models/layers/ffn.py


class NativeMlp:
    """GatedMlp of native products. silu is native for any rows, which have the same bits then."""

    def __init__(self, mlp: GatedMlp, gate: NativeLinear, up: NativeLinear, down: NativeLinear):
        self._torch, self._gate, self._up, self._down = mlp, gate, up, down
        self.kernel = MlpKernel(gate.kernel, up.kernel, down.kernel)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != torch.bfloat16:
            return self._torch(x)
        x = x.contiguous()
        if len(x) > MOST_ROWS:
            return torch.cat([self._many(rows) for rows in torch.split(x, _MLP_ROWS)])
        out = torch.empty_like(x)
        self.kernel.run(x.data_ptr(), len(x), out.data_ptr())
        return out

    def _many(self, x: Tensor) -> Tensor:
        gate, up = self._gate(x), self._up(x)
        silu_product(gate.data_ptr(), up.data_ptr(), gate.numel(), gate.data_ptr())
        return self._down(gate)


class NativeGate:
    """SigmoidGate for any rows, which have the same bits then."""

    def __init__(self, torch_gate: SigmoidGate) -> None:
        self._torch = torch_gate

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        if x.dtype != torch.bfloat16 or gate.dtype != torch.bfloat16:
            return self._torch(x, gate)
        x, gate = x.contiguous(), gate.contiguous()
        out = torch.empty_like(x)
        each = x.numel() // gate.numel()
        sigmoid_product(gate.data_ptr(), each, x.data_ptr(), gate.numel(), out.data_ptr())
        return out


def native_mlp(mlp: GatedMlp) -> GatedMlp | NativeMlp:
    """Return the network, native if its products are and have no biases."""
    linears = (mlp.gate, mlp.up, mlp.down)
    found = [one for one in linears if isinstance(one, NativeLinear) and one.bias is None]
    return NativeMlp(mlp, *found) if len(found) == len(linears) else mlp
