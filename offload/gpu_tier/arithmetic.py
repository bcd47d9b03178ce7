"""A device tier's needs of a device: memory, a stream, and arithmetic over an arena of slots."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from moeinf.offload.format.layout import ExpertLayout
from moeinf.offload.store.compute import ExpertRunner, TorchFfn


class RoutedRunner(ExpertRunner, Protocol):
    """Arithmetic that can find its experts by itself."""

    def can_route(self, rows: int) -> bool:
        """Return whether run_routed gives the same result as `run` for that many rows."""
        ...

    def run_routed(
        self, x: Tensor, ids: Tensor, table: Tensor, first_cell: int, rows: Tensor
    ) -> None:
        """Fill the rows of all pairs whose expert has a slot.

        ids [T, K], the int32 table of slots (expert e at first_cell + e), x and rows [T·K, D] are
        on the device.
        """
        ...


class Device(Protocol):
    """The device's arithmetic: torch, with kernels on a stream."""

    @property
    def stream(self) -> int:
        """The handle of the stream that everything below is queued to."""
        ...

    @property
    def out_of_memory(self) -> tuple[type[Exception], ...]:
        """The exceptions raised when a computation is out of memory."""
        ...

    def math(
        self, layout: ExpertLayout, address: int, shape: tuple[int, int], reference: TorchFfn
    ) -> RoutedRunner:
        """Return the arithmetic over an arena of shape (slots, slot_bytes) at a device address."""
        ...

    def limit(self, size_bytes: int) -> None:
        """Limit the device memory that torch may hold for this engine, beside others' shares.

        A larger allocation is out of memory. 0: the engine has ended.
        """
        ...

    def reserved_bytes(self) -> int:
        """Return the device memory that torch has reserved for all users, whether used or not."""
        ...

    def upload(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Return xs on the device, in one copy if they are small.

        The host's tensors may change once this returns.
        """
        ...

    def empty_rows(self, x: Tensor, count: int) -> Tensor:
        """Return unspecified rows [count, D] on the device for x [T, D] there."""
        ...

    def download(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Return xs in host memory, after everything that is queued has run, in one wait."""
        ...

    def release(self) -> None:
        """Give cached memory back to the device."""
        ...
