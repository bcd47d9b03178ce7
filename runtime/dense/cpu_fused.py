"""Native equivalents of the torch pieces between the products of a layer.

Only bfloat16 on the CPU is replaced: float32 is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moeinf.models.base import Piece
from moeinf.models.layers.attention import (
    GqaCore,
    InterleavedRopeCore,
    NormAfterRopeCore,
    NoRopeCore,
)
from moeinf.models.layers.ffn import GatedMlp, SigmoidGate
from moeinf.models.layers.kv_cache import KvCache, PassRows, Span
from moeinf.models.layers.mla import LowRank, MlaCore
from moeinf.models.layers.norms import RmsNorm, WideRmsNorm
from moeinf.models.layers.routing import (
    BiasedSoftmaxRouter,
    HashRouter,
    NormedRouter,
    SigmoidRouter,
    SoftmaxRouter,
    SparseMixer,
    SqrtSoftplusRouter,
    TopSoftmaxRouter,
)
from moeinf.native import GqaStep, MlaStep, RouterKernel, rms_norm
from moeinf.offload.store.compute import MOST_ROWS
from moeinf.runtime.dense.cpu_mlp import NativeGate, native_mlp

_Planes = tuple[int, int, int, int, int, int]  # of a layer: addresses and strides
_Norm = tuple[int, int, float, bool]  # address of the weight, width, eps, and if it is wide
_Request = tuple[int, int, int, int, int, int, int]
_WIDE = (torch.float32, "cpu")
_planes: WeakKeyDictionary[KvCache, list[_Planes]] = WeakKeyDictionary()  # by layer


_SCORING: dict[type, str] = {
    SoftmaxRouter: "softmax",
    BiasedSoftmaxRouter: "softmax",
    SigmoidRouter: "sigmoid",
    TopSoftmaxRouter: "top_softmax",
}
_ROTATION: dict[type, Literal["half", "pairs", "none"]] = {
    GqaCore: "half",
    NormAfterRopeCore: "half",
    InterleavedRopeCore: "pairs",
    NoRopeCore: "none",
}


def tuned(piece: Piece) -> Piece:
    """See models.base.Parts.tuned."""
    make = _NATIVE.get(type(piece))
    return piece if make is None else cast(Piece, make(piece))


class NativeNorm:
    """RmsNorm for few rows, and WideRmsNorm for any, which have the same bits then."""

    def __init__(self, torch_norm: RmsNorm | WideRmsNorm) -> None:
        self.torch_norm = held(torch_norm)
        self.native = native_norm(self.torch_norm)
        self._wide, self._width = isinstance(torch_norm, WideRmsNorm), len(torch_norm.weight)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.numel() // self._width
        if (rows > MOST_ROWS and not self._wide) or x.dtype != torch.bfloat16:
            return self.torch_norm(x)
        x = x.contiguous()
        out = torch.empty_like(x)
        rms_norm(self.native, x.data_ptr(), rows, out.data_ptr())
        return out


class NativeRouter:
    """A router for few rows. A row's result does not depend on the others, unlike torch's."""

    def __init__(self, torch_router: SoftmaxRouter | SigmoidRouter | TopSoftmaxRouter) -> None:
        self.torch_router, weight = torch_router, torch_router.weight
        scoring = _SCORING[type(torch_router)]
        bias = None if isinstance(torch_router, SoftmaxRouter) else torch_router.bias
        self._bias = None if bias is None else bias.float().contiguous()
        if isinstance(torch_router, TopSoftmaxRouter):
            renormalise, scale, (groups, kept) = False, 1.0, (1, 1)
        else:
            renormalise, scale = torch_router.renormalise, torch_router.scale
            groups, kept = torch_router.groups or (1, 1)
        experts, hidden = weight.shape
        self.top_k = torch_router.top_k
        self.kernel = RouterKernel(
            weight.data_ptr(), experts, hidden, self.top_k, renormalise, scale, groups, kept,
            scoring, 0 if self._bias is None else self._bias.data_ptr(),
        )  # fmt: skip

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if len(x) > MOST_ROWS or x.dtype != torch.bfloat16:
            return self.torch_router(x)
        x = x.contiguous()
        ids = torch.empty(len(x), self.top_k, dtype=torch.int64)
        weights = torch.empty(len(x), self.top_k)
        self.kernel.run(x.data_ptr(), len(x), ids.data_ptr(), weights.data_ptr())
        return ids, weights


class RowRouter:
    """A router in torch for few rows, one by one: torch's products depend on their number."""

    def __init__(self, torch_router: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        self.torch_router = torch_router

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return _row_by_row(self.torch_router, x)


@dataclass(frozen=True)
class RowHashRouter(HashRouter):
    """A HashRouter that weighs few rows one by one, as RowRouter does."""

    def __call__(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return _row_by_row(super().__call__, x, tokens)


def _row_by_row(
    route: Callable[..., tuple[Tensor, Tensor]], x: Tensor, *more: Tensor
) -> tuple[Tensor, Tensor]:
    """Return route(x, *more), of few rows [T, …] each alone."""
    if not 1 < len(x) <= MOST_ROWS or x.dtype != torch.bfloat16:
        return route(x, *more)
    rows = (route(*(y[at : at + 1] for y in (x, *more))) for at in range(len(x)))
    ids, weights = zip(*rows, strict=True)
    return torch.cat(ids), torch.cat(weights)


class NativeGqa:
    """GqaCore for the rows of requests that bring one token."""

    def __init__(self, core: GqaCore) -> None:
        shape = core.shape
        self._torch, self.layer = core, core.layer
        self._norms = [None if norm is None else held(norm) for norm in (core.q_norm, core.k_norm)]
        q_norm, k_norm = (None if norm is None else native_norm(norm) for norm in self._norms)
        self._sinks = None if core.sinks is None else core.sinks.float().contiguous()
        self.step = GqaStep(
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.softmax_scale,
            shape.window or 0,
            q_norm,
            k_norm,
            shape.clip or 0.0,
            0 if self._sinks is None else self._sinks.data_ptr(),
            value_width=shape.value_width,
            rotation=_ROTATION[type(core)],
            norms_last=isinstance(core, NormAfterRopeCore),
        )
        self._width = shape.heads * shape.value_width

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rows: PassRows) -> Tensor:
        if q.dtype != torch.bfloat16:
            return self._torch(q, k, v, rows)
        in_q8 = is_q8(rows)

        def step(rows: PassRows, out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
            self.step(
                q.data_ptr(),
                k.data_ptr(),
                v.data_ptr(),
                rows.cos.data_ptr(),
                rows.sin.data_ptr(),
                rows.cos.shape[-1],
                out.data_ptr(),
                requests(rows.spans, self.layer),
                in_q8,
            )

        if all(span.count == 1 for span in rows.spans):
            out = q.new_empty(len(q), self._width)
            step(rows, out, q.contiguous(), k.contiguous(), v.contiguous())
            return out
        return _mixed(step, self._torch, rows, q, k, v)


class NativeMla:
    """MlaCore for the rows of requests that bring one token."""

    def __init__(self, core: MlaCore) -> None:
        shape = core.shape
        self._torch, self.layer = core, core.layer
        self.pairs = shape.rope // 2  # of a row that rotate
        self._kv_b = core.kv_b.contiguous()
        self.step = MlaStep(
            shape.heads,
            shape.nope,
            shape.rope,
            shape.value,
            shape.kv_lora,
            shape.scale,
            native_norm(core.kv_norm),
            self._kv_b.data_ptr(),
        )

    def __call__(self, q: Tensor, latent: Tensor, rows: PassRows) -> Tensor:
        if q.dtype != torch.bfloat16:
            return self._torch(q, latent, rows)
        in_q8 = is_q8(rows)

        def step(rows: PassRows, out: Tensor, q: Tensor, latent: Tensor) -> None:
            self.step(
                q.data_ptr(),
                latent.data_ptr(),
                rows.cos.data_ptr(),
                rows.sin.data_ptr(),
                rows.cos.shape[-1],
                out.data_ptr(),
                requests(rows.spans, self.layer),
                in_q8,
            )

        if all(span.count == 1 for span in rows.spans):
            out = q.new_empty(len(q), self._torch.shape.heads * self._torch.shape.value)
            step(rows, out, q.contiguous(), latent.contiguous())
            return out
        return _mixed(step, self._torch, rows, q, latent)


def _mixed(
    step: Callable[..., None], torch_core: Callable[..., Tensor], rows: PassRows, *inputs: Tensor
) -> Tensor:
    """Run requests of one token by `step`, as if they were alone, and the others in torch."""
    single = tuple(span for span in rows.spans if span.count == 1)
    others = tuple(span for span in rows.spans if span.count > 1)
    out = torch_core(*inputs, replace(rows, spans=others))
    if single:
        at = [span.rows.start for span in single]
        some = PassRows(single, rows.positions[at], rows.cos[at], rows.sin[at])
        done = out[at]  # a copy
        step(some, done, *(x[at] for x in inputs))
        out[at] = done
    return out


def is_q8(rows: PassRows) -> bool:
    """Return True if the caches hold q8; all have one layout."""
    return rows.spans[0].cache.layout.form == "q8"


def held(norm: Callable[[Tensor], Tensor]) -> RmsNorm | WideRmsNorm:
    """Return the norm, for a HeadNorm its inner one, with the weight that `native_norm` takes."""
    found = getattr(norm, "norm", norm)
    assert isinstance(found, RmsNorm | WideRmsNorm), type(found)
    assert found.weight.is_contiguous()
    return found if isinstance(found, RmsNorm) else replace(found, weight=found.weight.float())


def native_norm(norm: RmsNorm | WideRmsNorm) -> _Norm:
    """Return the norm as native steps take it: `held`, and kept as long as they."""
    return norm.weight.data_ptr(), len(norm.weight), norm.eps, isinstance(norm, WideRmsNorm)


def requests(spans: Sequence[Span], layer: int) -> list[_Request]:
    """Return the caches of spans that bring one token each, as native steps take them."""
    found: list[_Request] = []
    for span in spans:
        assert span.past < span.cache.capacity
        planes = _planes.get(span.cache)
        if planes is None:
            layers = range(span.cache.layout.layers)
            planes = _planes[span.cache] = [_addresses(span.cache, layer) for layer in layers]
        found.append((*planes[layer], span.past + 1))
    return found


def _addresses(cache: KvCache, layer: int) -> _Planes:
    planes = cache.planes(layer)
    k, v = planes[0], planes[-1]  # MLA has one plane: its values are its first columns
    return k.data_ptr(), v.data_ptr(), k.stride(0), k.stride(1), v.stride(0), v.stride(1)


def _gqa(core: GqaCore) -> object:
    fits = all(norm is None or _fits_norm(norm) for norm in (core.q_norm, core.k_norm))
    return NativeGqa(core) if fits else core


def _mla(core: MlaCore) -> object:
    return NativeMla(core) if _fits(core.kv_b) else core


def _rms_norm(norm: RmsNorm | WideRmsNorm) -> object:
    return NativeNorm(norm) if _fits_norm(norm) else norm


def _router(router: SoftmaxRouter | SigmoidRouter | TopSoftmaxRouter) -> object:
    return NativeRouter(router) if _fits(router.weight) else RowRouter(router)


def _low_rank(projection: LowRank) -> LowRank:
    return replace(projection, norm=tuned(projection.norm))


def _normed(router: NormedRouter) -> NormedRouter:
    return replace(router, inner=tuned(router.inner))


def _fits_norm(norm: Callable[[Tensor], Tensor]) -> bool:
    """Return True if the norm, or the inner one of a HeadNorm, has a native replacement."""
    found = getattr(norm, "norm", norm)
    if not isinstance(found, WideRmsNorm):
        return isinstance(found, RmsNorm) and _fits(found.weight)
    return _fits(found.weight) or (found.weight.dtype, found.weight.device.type) == _WIDE


def _fits(weight: Tensor) -> bool:
    """Return True if a piece with this weight has a native replacement."""
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu"


_NATIVE: dict[type, Callable[[Any], object]] = {
    **dict.fromkeys(_ROTATION, _gqa),
    MlaCore: _mla,
    RmsNorm: _rms_norm,
    WideRmsNorm: _rms_norm,
    LowRank: _low_rank,
    GatedMlp: native_mlp,
    SigmoidGate: NativeGate,
    SoftmaxRouter: _router,
    NormedRouter: _normed,
    TopSoftmaxRouter: _router,
    SigmoidRouter: _router,
    BiasedSoftmaxRouter: _router,
    SqrtSoftplusRouter: RowRouter,
    HashRouter: lambda router: RowHashRouter(router.inner, router.table),
    SparseMixer: RowRouter,
}
