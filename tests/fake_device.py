"""A `Device` without a GPU: kernels are the CPU's, run when the fake's streams come to them.

Does not know tiers. Device tensors are CPU views of the fake libcuda's memory; rows that no kernel
has written are NaN, so that whoever reads too early sees it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from moeinf.models.moe import group
from moeinf.native import OutOfDeviceMemory
from moeinf.offload.device_tier import RoutedRunner
from moeinf.offload.layout import ExpertLayout
from moeinf.offload.slot_math import ExpertRunner, SlotMath, TorchFfn
from moeinf.runtime import gpu as gpus
from moeinf.runtime.cpu_math import CpuMath
from moeinf.runtime.graphs import Graphs
from tests.native.fake_cuda import Fake


class FakeDevice(CpuMath):
    """`no_memory`: how many computations from now on find none. limits: what torch was told."""

    def __init__(self, fake: Fake) -> None:
        self._fake = fake
        self.stream = 0
        self.out_of_memory: tuple[type[Exception], ...] = (OutOfDeviceMemory,)
        self.no_memory = 0
        self.limits: list[int] = []
        self.released = 0
        self._errors: list[Exception] = []

    def math(
        self, layout: ExpertLayout, address: int, shape: tuple[int, int], reference: TorchFfn
    ) -> RoutedRunner:
        kind = type("Arena", (ctypes.c_char * (shape[0] * shape[1]),), {"slots": 0})
        arena = kind.from_address(address)
        arena.slots, arena.slot_bytes = shape
        return self.later(SlotMath(layout, arena, reference))

    def later(self, math: ExpertRunner) -> RoutedRunner:
        """The same arithmetic, when the stream comes to it."""
        return _FakeMath(math, self)

    def upload(self, x: Tensor) -> Tensor:
        return x.contiguous()

    def empty_rows(self, x: Tensor, count: int) -> Tensor:
        return torch.full((count, x.shape[1]), torch.nan, dtype=x.dtype)

    def download(self, rows: Tensor) -> Tensor:
        self.synchronise()
        return rows

    def attend_newest(
        self, q: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float,
        window: int | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Over all of the cache, masked: like the kernel it does not ask where the token is."""
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
        values = v.float().masked_fill(~seen[:, None], 0.0)  # beyond, there may be anything
        return (shares @ values).flatten(0, 1).to(q.dtype)

    def graphs(self) -> Graphs | None:
        """There are none."""
        return None

    def synchronise(self) -> None:
        """What is queued has run."""
        self._fake.synchronise(self.stream)
        if self._errors:
            raise self._errors.pop()

    def limit(self, size_bytes: int) -> None:
        self.limits.append(size_bytes)

    def reserved_bytes(self) -> int:
        return 0  # its tensors are the CPU's

    def release(self) -> None:
        self.released += 1

    def launch(self, work: Callable[[], None]) -> None:
        """Queues a "kernel"."""
        if self.no_memory > 0:
            self.no_memory -= 1
            raise OutOfDeviceMemory("a test's: no memory")

        threads = torch.get_num_threads()

        def kernel() -> None:
            torch.set_num_threads(threads)  # OpenMP counts per thread, and float32 bits follow it
            try:
                with torch.inference_mode():
                    work()
            except Exception as error:  # a callback cannot raise
                self._errors.append(error)

        self._fake.launch(self.stream, kernel)


class _FakeMath:
    """Some arithmetic, later."""

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
        self._device.synchronise()  # in the fake, torch does not wait for its turn in the stream
        return self._math.combine(rows, weights)


def pretend(library: str) -> None:
    """From here on this process computes with the fake where it is asked for a GPU."""
    gpus.missing_for_kernels = lambda: None
    gpus.torch_device = lambda: FakeDevice(Fake(Path(library)))
