"""A `Device` without a GPU: its kernels run on the CPU in the order of the fake's streams.

Device tensors are CPU views of the fake libcuda's memory. Rows that no kernel has written are NaN,
so a read that comes too early is visible.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from moeinf.models.layers.attention import GqaCore, GqaShape, attend
from moeinf.models.layers.kv_cache import PassRows
from moeinf.models.layers.mla import MlaCore, MlaShape
from moeinf.models.layers.moe import Router, group
from moeinf.models.layers.norms import HeadNorm, RmsNorm, WideRmsNorm
from moeinf.models.layers.routing import SigmoidRouter, SoftmaxRouter, SparseMixer, TopSoftmaxRouter
from moeinf.native import OutOfDeviceMemory
from moeinf.offload.format.layout import ExpertLayout
from moeinf.offload.gpu_kernels.router_spec import RouterKind
from moeinf.offload.gpu_tier.arithmetic import RoutedRunner
from moeinf.offload.store.compute import ExpertRunner, SlotMath, TorchFfn
from moeinf.runtime.dense.cpu_backend import CpuMath
from moeinf.runtime.dense.graphed_step import Graphs
from moeinf.runtime.machine import gpu as gpus
from tests.native.fake_cuda import Fake


class FakeDevice(CpuMath):
    """A device that computes on the CPU.

    no_memory: how many of the next computations run out of memory. limits: the memory limits that
    torch was given.
    """

    def __init__(self, fake: Fake) -> None:
        self._fake = fake
        self.stream = 0
        self.out_of_memory: tuple[type[Exception], ...] = (OutOfDeviceMemory,)
        self.no_memory = 0
        self.limits: list[int] = []
        self.released = self.uploads = self.downloads = 0
        self._errors: list[Exception] = []

    def math(
        self, layout: ExpertLayout, address: int, shape: tuple[int, int], reference: TorchFfn
    ) -> RoutedRunner:
        kind = type("Arena", (ctypes.c_char * (shape[0] * shape[1]),), {"slots": 0})
        arena = kind.from_address(address)
        arena.slots, arena.slot_bytes = shape
        return self.later(SlotMath(layout, arena, reference))

    def later(self, math: ExpertRunner) -> RoutedRunner:
        """Return the same arithmetic, run when the stream reaches it."""
        return _FakeMath(math, self)

    def upload(self, *xs: Tensor) -> tuple[Tensor, ...]:
        self.uploads += 1
        return tuple(x.contiguous() for x in xs)

    def empty_rows(self, x: Tensor, count: int) -> Tensor:
        return torch.full((count, x.shape[1]), torch.nan, dtype=x.dtype)

    def download(self, *xs: Tensor) -> tuple[Tensor, ...]:
        self.downloads += 1
        self.synchronise()
        return xs

    def attend_newest(
        self, q: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float,
        window: int | None = None, sinks: Tensor | None = None, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend to the whole cache with a mask.

        Like the kernel, it does not read `position` on the host.
        """
        key = torch.arange(k.shape[1], device=position.device)
        seen = key <= position
        if window is not None:
            seen = seen & (key > position - window)
        heads = torch.unflatten(q.float() * scale, 0, (len(k), -1))  # [G, H/G, W]
        scores = (heads @ k.float().mT).masked_fill(~seen, -torch.inf)
        if sinks is not None:
            logits = torch.unflatten(sinks.float(), 0, (len(k), -1))[..., None]
            scores = torch.cat((scores, logits), -1)
        shares = scores.softmax(-1)[..., : k.shape[1]]
        # positions after the token may hold anything
        values = v.float().masked_fill(~seen[:, None], 0.0)
        found = (shares @ values).flatten(0, 1).to(q.dtype)
        return found if out is None else out.copy_(found)

    def attend_rows(
        self, q: Tensor, k: Tensor, v: Tensor, past: int, scale: float,
        window: int | None = None, sinks: Tensor | None = None, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        there = past + len(q)
        found = attend(q, k[:, :there], v[:, :there], scale, window, sinks)
        found = torch.unflatten(found, 1, (q.shape[1], -1))
        return found if out is None else out.copy_(found)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, wide: bool) -> Tensor:
        """Apply the models' norm; the following methods also use the models' functions."""
        return (WideRmsNorm if wide else RmsNorm)(weight, eps)(x)

    def gqa_heads(
        self, q: Tensor, k: Tensor, v: Tensor, row: int, angles: tuple[Tensor, Tensor],
        positions: Tensor, planes: tuple[Tensor, Tensor], out: Tensor,
        norms: tuple[tuple[Tensor, float], tuple[Tensor, float]] | None = None,
        wide: bool = False, clip: float | None = None,
    ) -> None:  # fmt: skip
        shape = GqaShape(out.shape[1], len(planes[0]), out.shape[2], clip=clip)
        kind = WideRmsNorm if wide else RmsNorm
        heads = [None, None] if norms is None else [HeadNorm(kind(*norm)) for norm in norms]
        at = slice(row, row + 1)
        rows = PassRows((), positions[at], *(x[at] for x in angles))
        turned, *new = GqaCore(0, shape, *heads).heads(q[at], k[at], v[at], rows)
        out[at] = turned
        for plane, x in zip(planes, new, strict=True):
            plane.index_copy_(1, rows.positions, x.transpose(0, 1))

    def mla_heads(
        self, q: Tensor, latent: Tensor, row: int, angles: tuple[Tensor, Tensor],
        positions: Tensor, memory: Tensor, out: Tensor, norm: tuple[Tensor, float],
    ) -> None:  # fmt: skip
        heads, kv_lora, rope = out.shape[1], len(norm[0]), 2 * angles[0].shape[1]
        shape = MlaShape(heads, q.shape[1] // heads - rope, rope, 1, kv_lora, None, 1.0)
        at = slice(row, row + 1)
        rows = PassRows((), positions[at], *(x[at] for x in angles))
        core = MlaCore(0, shape, RmsNorm(*norm), kv_b=norm[0])  # its heads do not need the norm
        _, turned, new = core.heads(q[at], latent[at], rows)
        out[at, :, kv_lora:] = turned
        memory.index_copy_(1, rows.positions, new.transpose(0, 1))

    def route(
        self, x: Tensor, weight: Tensor, kind: RouterKind, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return torch_router(kind, weight, bias)(x)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate) * up

    def graphs(self) -> Graphs | None:
        """Return None: the fake has no CUDA graphs."""
        return None

    def synchronise(self) -> None:
        """Wait until all queued work has run."""
        try:
            self._fake.synchronise(self.stream)
        except RuntimeError as error:
            raise RuntimeError(f"CUDA error: {error}") from error  # torch's message
        if self._errors:
            raise self._errors.pop()

    def limit(self, size_bytes: int) -> None:
        self.limits.append(size_bytes)

    def reserved_bytes(self) -> int:
        return 0  # its tensors are the CPU's

    def release(self) -> None:
        self.released += 1

    def launch(self, work: Callable[[], None]) -> None:
        """Queue a "kernel"."""
        if self.no_memory > 0:
            self.no_memory -= 1
            raise OutOfDeviceMemory("a test's: no memory")

        threads = torch.get_num_threads()

        def kernel() -> None:
            # OpenMP counts threads per calling thread, and float32 bits depend on the count
            torch.set_num_threads(threads)
            try:
                with torch.inference_mode():
                    work()
            except Exception as error:  # a callback cannot raise
                self._errors.append(error)

        self._fake.launch(self.stream, kernel)


def torch_router(kind: RouterKind, weight: Tensor, bias: Tensor | None) -> Router:
    """Return the models' router of a kind."""
    groups = kind.groups if kind.groups[0] > 1 else None
    if kind.score == "softmax":
        return SoftmaxRouter(weight, kind.top_k, kind.renormalise, kind.scale, groups)
    if kind.score == "mixer":
        return SparseMixer(weight, kind.jitter)
    assert bias is not None
    if kind.score == "top_softmax":
        return TopSoftmaxRouter(weight, bias, kind.top_k)
    return SigmoidRouter(weight, bias, kind.top_k, kind.renormalise, kind.scale, groups)


class _FakeMath:
    """Arithmetic that runs when the stream reaches it."""

    def __init__(self, math: ExpertRunner, device: FakeDevice) -> None:
        self._math, self._device = math, device

    def run(
        self, x: Tensor, experts: Sequence[tuple[int, list[int]]], top_k: int, rows: Tensor
    ) -> None:
        self._device.launch(lambda: self._math.run(x, experts, top_k, rows))

    def can_route(self, rows: int) -> bool:
        return True

    def run_routed(
        self, x: Tensor, ids: Tensor, table: Tensor, first_cell: int, rows: Tensor
    ) -> None:
        def work() -> None:
            places = group(ids, len(table) - first_cell)
            experts = [(int(table[first_cell + e]), some) for e, some in places]
            self._math.run(x, experts, ids.shape[1], rows)

        self._device.launch(work)

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        self._device.synchronise()  # the fake's torch does not wait for its turn in the stream
        return self._math.combine(rows, weights)


def pretend(library: str) -> None:
    """Use the fake GPU for the rest of this process."""
    gpus.missing_for_kernels = lambda: None
    gpus.torch_device = lambda *_: FakeDevice(Fake(Path(library)))
