"""What computes with dense weights on a device: its products, and between them its own pieces.

Does not know kernels, nor names of tensors. Attention of single tokens takes its place in the text
from a tensor there, so that a decode step can be repeated without the host (graphs.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from moeinf.models.attention import GqaCore
from moeinf.models.base import Piece
from moeinf.models.decoder import DecodeStep
from moeinf.models.kv_cache import PassRows
from moeinf.models.mla import MlaCore
from moeinf.runtime.graphs import GraphedStep, Graphs
from moeinf.runtime.linears import Products


class DeviceMath(Products, Protocol):
    """What a device offers for dense weights."""

    def attend_newest(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position: Tensor,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [H, W] of the token at `position` [1] over a cache k [G, S, W], v [G, S, V] -> [H, V];
        see offload/device_attention.py."""
        ...

    def graphs(self) -> Graphs | None:
        """What writes work down there; None: nothing does."""
        ...


class DevicePieces:
    """The DenseMath of one model on a device."""

    def __init__(self, device: DeviceMath) -> None:
        self._device, self._cores = device, 0
        self.note: str | None = None  # whether it repeats decode steps by itself, and why
        self.place = device.place
        self.tiled_linear = device.tiled_linear
        self.plain_linear = device.plain_linear
        self.tiled_embedding = device.tiled_embedding

    def tuned(self, piece: Piece) -> Piece:
        """See models.base.Parts.tuned."""
        made: object = piece
        if type(piece) in _CORES:
            made, self._cores = _CORES[type(piece)](piece, self._device), self._cores + 1
        elif isinstance(piece, DecodeStep) and self._cores == piece.cache.layers:
            graphs = self._device.graphs()
            if graphs is not None:
                made = GraphedStep(piece, graphs, self._tell)
        return cast(Piece, made)

    def _tell(self, note: str) -> None:
        self.note = note


class DeviceGqa:
    """GqaCore for passes of one token per request."""

    def __init__(self, core: GqaCore, device: DeviceMath) -> None:
        self._torch, self._attend = core, device.attend_newest

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rows: PassRows) -> Tensor:
        if any(span.count > 1 for span in rows.spans):
            return self._torch(q, k, v, rows)
        core, shape = self._torch, self._torch.shape
        q, k, v = core.heads(q, k, v, rows)
        out = torch.empty_like(q)
        for span in rows.spans:
            at, place = span.rows.start, rows.positions[span.rows]
            keys, values = span.cache.planes(core.layer)
            keys.index_copy_(1, place, k[span.rows].transpose(0, 1))
            values.index_copy_(1, place, v[span.rows].transpose(0, 1))
            out[at] = self._attend(
                q[at], keys, values, place, shape.softmax_scale, shape.window, core.sinks
            )
        return out.flatten(1)


class DeviceMla:
    """MlaCore for passes of one token per request."""

    def __init__(self, core: MlaCore, device: DeviceMath) -> None:
        self._torch, self._attend = core, device.attend_newest

    def __call__(self, q: Tensor, latent: Tensor, rows: PassRows) -> Tensor:
        if any(span.count > 1 for span in rows.spans):
            return self._torch(q, latent, rows)
        core, shape = self._torch, self._torch.shape
        q_nope, q_rope, new = core.heads(q, latent, rows)
        absorbed = core.absorb(q_nope, q_rope)
        mixed = absorbed.new_empty(len(absorbed), shape.heads, shape.kv_lora)
        for span in rows.spans:
            at, place = span.rows.start, rows.positions[span.rows]
            (memory,) = span.cache.planes(core.layer)
            memory.index_copy_(1, place, new[span.rows].transpose(0, 1))
            values = memory[..., : shape.kv_lora]
            mixed[at] = self._attend(absorbed[at], memory, values, place, shape.scale)
        return core.release(mixed).flatten(1)


_CORES: dict[type, Callable[[Any, DeviceMath], object]] = {GqaCore: DeviceGqa, MlaCore: DeviceMla}
