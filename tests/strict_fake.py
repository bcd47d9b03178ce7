"""The fake device in strict mode: its tensors count as device tensors inside kernels too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moeinf.models.base import Linear
from moeinf.native import OutOfDeviceMemory
from moeinf.offload.format.layout import ExpertLayout
from moeinf.offload.gpu_tier.arithmetic import RoutedRunner
from moeinf.offload.store.compute import TorchFfn
from moeinf.runtime.dense import cpu_linear
from tests.fake_device import FakeDevice
from tests.native.fake_cuda import Fake
from tests.strict_device import PLACE, laid_there, lies_there
from tests.written_down import WritingGraphs


class StrictFake(FakeDevice):
    """A strict device; between the products it runs the models' torch code, like a GPU.

    scarce: how many of the next products of dense weights run out of memory. faults: the errors
    that the next ones raise.
    """

    place = PLACE

    def __init__(self, fake: Fake) -> None:
        super().__init__(fake)
        self.scarce = 0
        self.faults: list[Exception] = []
        self.writing = WritingGraphs()

    def upload(self, *xs: Tensor) -> tuple[Tensor, ...]:
        self.uploads += 1
        return tuple(x.to(PLACE) for x in xs)

    def empty_rows(self, x: Tensor, count: int) -> Tensor:
        return x.new_full((count, x.shape[1]), torch.nan)

    def download(self, *xs: Tensor) -> tuple[Tensor, ...]:
        super().download(*xs)
        return tuple(x.cpu() for x in xs)

    def graphs(self) -> WritingGraphs | None:
        return self.writing

    def tiled_linear(self, *given: Any) -> Linear:
        return self.made_there(cpu_linear.tiled_linear, *given)

    def plain_linear(self, *given: Any) -> Linear:
        linear = self.made_there(cpu_linear.plain_linear, *given)

        def compute(x: Tensor) -> Tensor:
            if self.scarce > 0:
                self.scarce -= 1
                raise OutOfDeviceMemory("a test's: no memory")
            if self.faults:
                raise self.faults.pop()
            return linear(x)

        return compute

    def tiled_embedding(self, *given: Any) -> cpu_linear.Rows:
        return self.made_there(cpu_linear.tiled_embedding, *given)

    def made_there(
        self, make: Callable[..., Callable[[Tensor], Tensor]], *given: Any
    ) -> Callable[[Tensor], Tensor]:
        """Return the CPU's function for weights and rows on the device."""
        assert all(lies_there(x) for x in given if isinstance(x, Tensor))
        with torch._C.DisableTorchFunction():
            made = make(*given)

        def compute(x: Tensor) -> Tensor:
            assert lies_there(x)
            with torch._C.DisableTorchFunction():
                found = self.writing.opaque(lambda: made(x), x)
            return laid_there(found)

        return compute

    def math(
        self, layout: ExpertLayout, address: int, shape: tuple[int, int], reference: TorchFfn
    ) -> RoutedRunner:
        return _There(super().math(layout, address, shape, reference), self)

    def launch(self, work: Callable[[], None]) -> None:
        def unseen() -> None:
            with torch._C.DisableTorchFunction():
                work()

        queue = super().launch
        self.writing.queued(lambda: queue(unseen))


class _There:
    """A function that accepts only device tensors."""

    def __init__(self, math: RoutedRunner, device: StrictFake) -> None:
        self._math, self._device = math, device
        self.can_route = math.can_route

    def run(
        self, x: Tensor, experts: Sequence[tuple[int, list[int]]], top_k: int, rows: Tensor
    ) -> None:
        assert lies_there(x)
        assert lies_there(rows)
        self._math.run(x, experts, top_k, rows)

    def run_routed(
        self, x: Tensor, ids: Tensor, table: Tensor, first_cell: int, rows: Tensor
    ) -> None:
        assert all(map(lies_there, (x, ids, table, rows)))
        self._math.run_routed(x, ids, table, first_cell, rows)

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        assert lies_there(rows)
        assert lies_there(weights)
        found = self._device.writing.opaque(
            lambda: self._math.combine(rows, weights), rows, weights
        )
        return laid_there(found)
