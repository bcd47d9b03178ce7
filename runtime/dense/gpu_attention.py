"""Attention's cores and norms on a device, for passes of few rows.

A token's position is read from a tensor, so a decode step can be replayed without the host
(graphed_step.py). In passes of more rows only attention runs here and the rest in torch, because
the rest then takes little of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from moeinf.models.layers.attention import GqaCore
from moeinf.models.layers.kv_cache import PassRows
from moeinf.models.layers.mla import MlaCore
from moeinf.models.layers.norms import HeadNorm, RmsNorm, WideRmsNorm
from moeinf.offload.store.compute import MOST_ROWS

_Norm = tuple[Tensor, float]  # a weight, and eps


class CoreMath(Protocol):
    """The device operations that these pieces use."""

    def attend_newest(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position: Tensor,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the attention [H, V] of one token, in `out` if it is given.

        q [H, W] of the token at `position` [1], over a cache k [G, S, W], v [G, S, V]. See
        offload/gpu_kernels/decode_attention.py.
        """
        ...

    def attend_rows(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        past: int,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the attention [T, H, V] of the tokens from `past` on, with q [T, H, W].

        Other arguments as for attend_newest. See offload/gpu_kernels/prefill_attention.py.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, wide: bool) -> Tensor:
        """Apply a norm of models/layers/norms.py; see offload/gpu_kernels/elementwise.py."""
        ...

    def gqa_heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        row: int,
        angles: tuple[Tensor, Tensor],
        positions: Tensor,
        planes: tuple[Tensor, Tensor],
        out: Tensor,
        norms: tuple[_Norm, _Norm] | None = None,
        wide: bool = False,
        clip: float | None = None,
    ) -> None:
        """Compute a row of GqaCore.heads, into out [T, H, W] and the cache.

        See offload/gpu_kernels/elementwise.py.
        """
        ...

    def mla_heads(
        self,
        q: Tensor,
        latent: Tensor,
        row: int,
        angles: tuple[Tensor, Tensor],
        positions: Tensor,
        memory: Tensor,
        out: Tensor,
        norm: _Norm,
    ) -> None:
        """Compute a row of MlaCore.heads, into the last columns of out and the cache.

        out is [T, H, C + rope]. See offload/gpu_kernels/elementwise.py.
        """
        ...


class DeviceNorm:
    """RmsNorm and WideRmsNorm for few rows."""

    def __init__(self, norm: RmsNorm | WideRmsNorm, device: CoreMath) -> None:
        self._torch, self._run, self._wide = norm, device.rms_norm, type(norm) is WideRmsNorm

    def __call__(self, x: Tensor) -> Tensor:
        norm = self._torch
        if x.numel() > MOST_ROWS * len(norm.weight):
            return norm(x)
        if not self._wide and x.dtype != norm.weight.dtype:
            return norm(x)  # torch's result has another dtype
        return self._run(x, norm.weight, norm.eps, self._wide)


class DeviceHeadNorm:
    """HeadNorm for few rows, however many heads they have."""

    def __init__(self, norm: HeadNorm, device: CoreMath) -> None:
        inner = norm.norm
        self._torch, self._run = norm, device.rms_norm
        self._weight, self._eps, self._wide = inner.weight, inner.eps, type(inner) is WideRmsNorm

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, heads·W] to [T, heads·W]."""
        if len(x) > MOST_ROWS or not (self._wide or x.dtype == self._weight.dtype):
            return self._torch(x)
        heads = x.view(len(x), -1, len(self._weight))
        return self._run(heads, self._weight, self._eps, self._wide).flatten(1)


class DeviceGqa:
    """GqaCore: passes of one token per request, and attention of all others."""

    def __init__(self, core: GqaCore, device: CoreMath) -> None:
        self._torch = replace(core, attend=_over_rows(device))
        self._attend, self._heads = device.attend_newest, device.gqa_heads
        self._before: list[Callable[[Tensor], Tensor] | None] = [None, None]  # of whole projections
        self._norms: tuple[_Norm, _Norm] | None = None  # of heads
        self._wide = False
        inner = [norm.norm for norm in (core.q_norm, core.k_norm) if isinstance(norm, HeadNorm)]
        if len(inner) == 2 and type(inner[0]) is type(inner[1]):
            q_norm, k_norm = inner
            self._norms = (q_norm.weight, q_norm.eps), (k_norm.weight, k_norm.eps)
            self._wide = type(q_norm) is WideRmsNorm
        else:
            self._before = [_few_rows(norm, device) for norm in (core.q_norm, core.k_norm)]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rows: PassRows) -> Tensor:
        if any(span.count > 1 for span in rows.spans):
            return self._torch(q, k, v, rows)
        core, shape = self._torch, self._torch.shape
        q_norm, k_norm = self._before
        q, k = q if q_norm is None else q_norm(q), k if k_norm is None else k_norm(k)
        turned = q.new_empty(len(q), shape.heads, shape.head_dim)
        out, angles = torch.empty_like(turned), (rows.cos, rows.sin)
        for span in rows.spans:
            at, (keys, values) = span.rows.start, span.cache.planes(core.layer)
            self._heads(
                q, k, v, at, angles, rows.positions, (keys, values), turned,
                self._norms, self._wide, shape.clip,
            )  # fmt: skip
            self._attend(
                turned[at], keys, values, rows.positions[span.rows],
                shape.softmax_scale, shape.window, core.sinks, out[at],
            )  # fmt: skip
        return out.flatten(1)


def device_gqa(core: GqaCore, device: CoreMath) -> DeviceGqa | GqaCore:
    """Return the core's replacement; in torch but for attention if values have another width."""
    if core.shape.value_width != core.shape.head_dim:
        return replace(core, attend=_over_rows(device))
    return DeviceGqa(core, device)


class DeviceMla:
    """MlaCore: passes of one token per request, and attention of all others."""

    def __init__(self, core: MlaCore, device: CoreMath) -> None:
        self._torch = replace(core, attend=_over_rows(device), equal_widths=False)
        self._attend, self._heads = device.attend_newest, device.mla_heads
        self._norm = core.kv_norm.weight, core.kv_norm.eps
        self._w_uk = core.kv_b[:, : core.shape.nope]  # [H, nope, kv_lora]
        self._w_uv = core.kv_b[:, core.shape.nope :].mT  # [H, kv_lora, v]

    def __call__(self, q: Tensor, latent: Tensor, rows: PassRows) -> Tensor:
        if any(span.count > 1 for span in rows.spans):
            return self._torch(q, latent, rows)
        core, shape, angles = self._torch, self._torch.shape, (rows.cos, rows.sin)
        absorbed = q.new_empty(len(q), shape.heads, shape.kv_lora + shape.rope)
        q_nope = q.view(len(q), shape.heads, -1)[..., : shape.nope]
        # A GPU's product can write into this view: rows have a stride, but each is contiguous.
        place = absorbed[..., : shape.kv_lora].transpose(0, 1)  # [H, T, kv_lora]
        mixed = q.new_empty(len(q), shape.heads, shape.kv_lora)
        out = q.new_empty(len(q), shape.heads, shape.value)
        for span in rows.spans:
            at, (memory,) = span.rows.start, span.cache.planes(core.layer)
            # Row by row: the result of torch's products may depend on the number of rows.
            torch.bmm(q_nope[span.rows].transpose(0, 1), self._w_uk, out=place[:, span.rows])
            self._heads(q, latent, at, angles, rows.positions, memory, absorbed, self._norm)
            self._attend(
                absorbed[at], memory, memory[..., : shape.kv_lora], rows.positions[span.rows],
                shape.scale, None, None, mixed[at],
            )  # fmt: skip
            value = out[span.rows].transpose(0, 1)  # [H, 1, V]
            torch.bmm(mixed[span.rows].transpose(0, 1), self._w_uv, out=value)
        return out.flatten(1)


def _over_rows(device: CoreMath) -> Callable[..., Tensor]:
    """Return the device's equivalent of `attend` in models/layers/attention.py."""

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        past = k.shape[1] - len(q)
        return device.attend_rows(q, k, v, past, scale, window, sinks).flatten(1)

    return attend


def _few_rows(
    norm: Callable[[Tensor], Tensor] | None, device: CoreMath
) -> Callable[[Tensor], Tensor] | None:
    return DeviceNorm(norm, device) if isinstance(norm, RmsNorm | WideRmsNorm) else norm
