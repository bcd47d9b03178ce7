"""Dense weights on a device: products, and replacements for the pieces between them.

Up to MOST_ROWS rows each piece is one or two kernels. Passes of more rows run in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, cast

from torch import Tensor

from moeinf.models.base import Piece
from moeinf.models.layers.attention import GqaCore
from moeinf.models.layers.decoder import DecodeStep
from moeinf.models.layers.ffn import GatedMlp
from moeinf.models.layers.kv_cache import CacheLayout
from moeinf.models.layers.mla import LowRank, MlaCore
from moeinf.models.layers.norms import HeadNorm, RmsNorm, WideRmsNorm
from moeinf.models.layers.routing import (
    NormedRouter,
    SigmoidRouter,
    SoftmaxRouter,
    SparseMixer,
    TopSoftmaxRouter,
)
from moeinf.offload.gpu_kernels.router_spec import RouterKind
from moeinf.offload.store.compute import MOST_ROWS
from moeinf.runtime.dense.cpu_linear import Products
from moeinf.runtime.dense.gpu_attention import (
    CoreMath,
    DeviceGqa,
    DeviceHeadNorm,
    DeviceMla,
    DeviceNorm,
    device_gqa,
)
from moeinf.runtime.dense.graphed_step import GraphedStep, Graphs

_Router = SoftmaxRouter | TopSoftmaxRouter | SigmoidRouter | SparseMixer


class DeviceMath(Products, CoreMath, Protocol):
    """The operations of a device on dense weights."""

    def route(
        self, x: Tensor, weight: Tensor, kind: RouterKind, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run a router of models/layers/routing.py; see offload/gpu_kernels/router.py."""
        ...

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) · up."""
        ...

    def graphs(self) -> Graphs | None:
        """Return the interface for graph capture; None if the device has no graphs."""
        ...


class DevicePieces:
    """The DenseMath of one model on a device."""

    def __init__(self, device: DeviceMath) -> None:
        self._device, self._cores = device, 0
        self.graphs: str | None = None  # the gain from replayed decode steps
        self.note: str | None = None  # the reason if decode steps are not replayed
        self.place = device.place
        self.tiled_linear = device.tiled_linear
        self.plain_linear = device.plain_linear
        self.tiled_embedding = device.tiled_embedding

    def tuned(self, piece: Piece) -> Piece:
        """See models.base.Parts.tuned."""
        made: object = piece
        if type(piece) in _PIECES:
            made = _PIECES[type(piece)](piece, self._device)
            self._cores += isinstance(made, DeviceGqa | DeviceMla)
        elif isinstance(piece, DecodeStep) and self._replayable(piece.cache):
            graphs = self._device.graphs()
            if graphs is not None:
                made = GraphedStep(piece, graphs, self._tell)
        return cast(Piece, made)

    def _replayable(self, cache: CacheLayout) -> bool:
        """Return True if no step reads the position on the host, as indexers do."""
        return self._cores == cache.layers and not cache.indexers

    def _tell(self, words: str, pays: bool) -> None:
        self.graphs, self.note = (words, None) if pays else (None, f"no CUDA graphs: {words}")


class DeviceRouter:
    """A router for few rows. A row's result does not depend on the others, as it does in torch."""

    def __init__(self, router: _Router, device: DeviceMath) -> None:
        self._torch, self._route = router, device.route
        self._bias: Tensor | None = getattr(router, "bias", None)
        self._kind = _kind_of(router)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if len(x) > MOST_ROWS:
            return self._torch(x)
        return self._route(x, self._torch.weight, self._kind, self._bias)


class DeviceMlp:
    """GatedMlp for few rows."""

    def __init__(self, mlp: GatedMlp, device: DeviceMath) -> None:
        self._torch, self._gated = mlp, device.gated

    def __call__(self, x: Tensor) -> Tensor:
        mlp = self._torch
        if len(x) > MOST_ROWS:
            return mlp(x)
        return mlp.down(self._gated(mlp.gate(x), mlp.up(x)))


def _low_rank(piece: LowRank, device: DeviceMath) -> LowRank:
    norm = piece.norm
    return replace(piece, norm=DeviceNorm(norm, device)) if isinstance(norm, RmsNorm) else piece


def _normed(router: NormedRouter, device: DeviceMath) -> NormedRouter:
    norm = router.norm
    if isinstance(norm, WideRmsNorm):
        norm = DeviceNorm(norm, device)
    inner = cast(SoftmaxRouter, DeviceRouter(router.inner, device))
    return replace(router, norm=norm, inner=inner)


def _kind_of(router: _Router) -> RouterKind:
    if isinstance(router, TopSoftmaxRouter):
        return RouterKind("top_softmax", router.top_k)
    if isinstance(router, SparseMixer):
        return RouterKind("mixer", 2, jitter=router.jitter)
    rest = router.top_k, router.renormalise, router.scale, router.groups or (1, 1)
    if isinstance(router, SoftmaxRouter):
        return RouterKind("softmax", *rest)
    return RouterKind("sigmoid", *rest)


_PIECES: dict[type, Callable[[Any, DeviceMath], object]] = {
    GqaCore: device_gqa,
    MlaCore: DeviceMla,
    RmsNorm: DeviceNorm,
    WideRmsNorm: DeviceNorm,
    HeadNorm: DeviceHeadNorm,
    LowRank: _low_rank,
    GatedMlp: DeviceMlp,
    NormedRouter: _normed,
    **dict.fromkeys((SoftmaxRouter, TopSoftmaxRouter, SigmoidRouter, SparseMixer), DeviceRouter),
}
