"""What a device tier needs of a device: memory, a stream, and arithmetic over an arena of slots.

Does not know tiers, nor which device it is.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from moeinf.offload.format.layout import ExpertLayout
from moeinf.offload.store.compute import ExpertRunner, TorchFfn


class RoutedRunner(ExpertRunner, Protocol):
    """Arithmetic that can find its experts by itself."""

    def can_route(self, rows: int) -> bool:
        """Whether run_routed gives so many rows what `run` would give them."""
        ...

    def run_routed(
        self, x: Tensor, ids: Tensor, table: Tensor, first_cell: int, rows: Tensor
    ) -> None:
        """Fills the rows of all pairs whose expert has a slot: ids [T, K] and the int32 table of
        slots, expert e at first_cell + e, lie on the device, and so do x and rows [T·K, D]."""
        ...


class Device(Protocol):
    """What computes on the device: torch, with kernels on a stream."""

    @property
    def stream(self) -> int:
        """The handle of the stream that everything below is queued to."""
        ...

    @property
    def out_of_memory(self) -> tuple[type[Exception], ...]:
        """What is raised when there is no memory left for a computation."""
        ...

    def math(
        self, layout: ExpertLayout, address: int, shape: tuple[int, int], reference: TorchFfn
    ) -> RoutedRunner:
        """The arithmetic over an arena of shape (slots, slot_bytes) at a device address."""
        ...

    def limit(self, size_bytes: int) -> None:
        """What torch may hold of the device's memory for this engine from now on, beside others'
        shares; more is out of memory. 0: the engine has ended."""
        ...

    def reserved_bytes(self) -> int:
        """What torch has taken of the device, used or not, for whomever."""
        ...

    def upload(self, x: Tensor) -> Tensor:
        """x on the device; the host's may be changed as soon as this returns."""
        ...

    def empty_rows(self, x: Tensor, count: int) -> Tensor:
        """[count, D] on the device for x [T, D] there; unspecified."""
        ...

    def download(self, rows: Tensor) -> Tensor:
        """rows in host memory, after everything that is queued has run."""
        ...

    def release(self) -> None:
        """Gives cached memory back to the device."""
        ...
