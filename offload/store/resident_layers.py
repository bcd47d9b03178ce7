"""Layers whose experts are all in host slots, without prefetches.

This is each layer of a decoded token once the model fits. No expert leaves between `submit` and
`result`, so they need no pins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from moeinf.native import SlotKernel
from moeinf.offload.store.compute import MOST_ROWS, SlotMath
from moeinf.offload.store.residency import Residency
from moeinf.offload.store.tier import Work


class ResidentLayer:
    """One submitted layer whose rows have been grouped by expert."""

    __slots__ = ("_cells", "_work")

    def __init__(self, work: Work, cells: list[int]) -> None:
        self._work, self._cells = work, cells

    def result(self) -> Tensor:
        """Return [T, D]."""
        self._work.compute(self._cells)
        return self._work.result()


class NativeLayerExperts(ABC):
    """`Experts` that may leave a layer to one native call, which also computes what is around them.

    The call finds all experts of a layer in their slots, or reports that one is absent. Only then
    the layer is submitted.
    """

    @abstractmethod
    def slots(self, layer: int) -> SlotKernel | None:
        """Return what finds and computes the experts of a layer; None: submit the layer."""

    @abstractmethod
    def computed(self, layer: int, ids: Tensor, weights: Tensor, events: int) -> None:
        """Report the routing [T, K] of a layer that was computed with `slots`.

        events: the number of ids that are experts.
        """


class SlotKernels:
    """The layers that native code computes from ids alone, for few rows: one call a layer."""

    def __init__(self, maths: Sequence[SlotMath], table: Residency, experts: int) -> None:
        """Set up the layers. maths: of every cell. Layers of several layouts have no kernel."""
        kernels = {math: math.slot_kernel(table, experts) for math in dict.fromkeys(maths)}
        self._kernels = [
            kernels[maths[first]] if len(set(maths[first : first + experts])) == 1 else None
            for first in range(0, len(maths), experts)
        ]

    def kernel(self, layer: int) -> SlotKernel | None:
        """Return what computes a layer from ids alone; None: nothing does."""
        return self._kernels[layer]

    def routed(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> NativeLayer | None:
        """Return the layer if its rows are few and all its experts are there."""
        kernel = self._kernels[layer]
        few = len(x) <= MOST_ROWS and ids.dtype == torch.int64 and weights.dtype == torch.float32
        if kernel is None or not few:
            return None
        ids = ids.contiguous()
        events = kernel.count(layer, ids.data_ptr(), *ids.shape)
        return None if events < 0 else NativeLayer(kernel, layer, x, ids, weights, events)


class NativeLayer:
    """One submitted layer that one native call computes."""

    __slots__ = ("_ids", "_kernel", "_layer", "_weights", "_x", "events")

    def __init__(
        self,
        kernel: SlotKernel,
        layer: int,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        events: int,
    ) -> None:
        """Set up x [T, D], ids and weights [T, K]; events: the number of ids that are experts."""
        self._kernel, self._layer, self._x = kernel, layer, x.contiguous()
        self._ids, self._weights, self.events = ids, weights.contiguous(), events

    def result(self) -> Tensor:
        """Return [T, D]."""
        x, out = self._x, torch.empty_like(self._x)
        self._kernel.run(
            self._layer, x.data_ptr(), len(x), self._ids.data_ptr(), self._weights.data_ptr(),
            self._ids.shape[1], out.data_ptr(), x.dtype == torch.float32,
        )  # fmt: skip
        return out
