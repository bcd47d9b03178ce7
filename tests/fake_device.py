"""A `Device` without a GPU: kernels are the CPU's, run when the fake's streams come to them.

Does not know tiers. Device tensors are CPU views of the fake libcuda's memory; rows that no kernel
has written are NaN, so that whoever reads too early sees it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from moeinf.native import OutOfDeviceMemory
from moeinf.offload.layout import ExpertLayout
from moeinf.offload.slot_math import ExpertRunner, SlotMath, TorchFfn
from moeinf.runtime import gpu as gpus
from tests.native.fake_cuda import Fake


class FakeDevice:
    """`no_memory`: how many computations from now on find none."""

    def __init__(self, fake: Fake) -> None:
        self._fake = fake
        self.stream = 0
        self.out_of_memory: tuple[type[Exception], ...] = (OutOfDeviceMemory,)
        self.no_memory = 0
        self.released = 0
        self._errors: list[Exception] = []

    def math(
        self, layout: ExpertLayout, address: int, shape: tuple[int, int], reference: TorchFfn
    ) -> ExpertRunner:
        kind = type("Arena", (ctypes.c_char * (shape[0] * shape[1]),), {"slots": 0})
        arena = kind.from_address(address)
        arena.slots, arena.slot_bytes = shape
        return self.later(SlotMath(layout, arena, reference))

    def later(self, math: ExpertRunner) -> ExpertRunner:
        """The same arithmetic, when the stream comes to it."""
        return _FakeMath(math, self)

    def upload(self, x: Tensor) -> Tensor:
        return x.contiguous()

    def empty_rows(self, x: Tensor, count: int) -> Tensor:
        return torch.full((count, x.shape[1]), torch.nan, dtype=x.dtype)

    def download(self, rows: Tensor) -> Tensor:
        self._fake.synchronise(self.stream)
        if self._errors:
            raise self._errors.pop()
        return rows

    def release(self) -> None:
        self.released += 1

    def launch(
        self, math: ExpertRunner, x: Tensor, experts: Sequence[tuple[int, list[int]]], top_k: int,
        rows: Tensor,
    ) -> None:  # fmt: skip
        if self.no_memory > 0:
            self.no_memory -= 1
            raise OutOfDeviceMemory("a test's: no memory")

        threads = torch.get_num_threads()

        def kernel() -> None:
            torch.set_num_threads(threads)  # OpenMP counts per thread, and float32 bits follow it
            try:
                math.run(x, experts, top_k, rows)
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
        self._device.launch(self._math, x, experts, top_k, rows)

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        return self._math.combine(rows, weights)


def pretend(library: str) -> None:
    """From here on this process computes with the fake where it is asked for a GPU."""
    gpus.missing_for_kernels = lambda: None
    gpus.torch_device = lambda: FakeDevice(Fake(Path(library)))
