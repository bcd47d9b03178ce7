"""Compute experts in their slots: one native call for all that are resident.

Does not know routing, nor which experts are in the slots. The float32 format is the reference and
stays in torch. So do bf16 experts of many rows, for which torch's matrix products are faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from moeinf.native import ExpertKernel, SlotKernel, SlotPool, combine_rows
from moeinf.offload.format.layout import ExpertLayout, is_tiled
from moeinf.offload.store.residency import Residency

Math = TypeVar("Math", bound="ExpertRunner")
# bf16 rows that our kernels compute, on any device: more are faster in torch, where rows interact.
MOST_ROWS = 16
_TORCH_DTYPE = {"F32": torch.float32, "BF16": torch.bfloat16}


class TorchFfn(Protocol):
    """The reference arithmetic, which the models define."""

    def ffn(self, x: Tensor, *weights: Tensor) -> Tensor:
        """Return one expert's output for its rows, [t, D] -> [t, D]; weights in stored order."""
        ...

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Sum rows [T, K, D] by weights [T, K] -> [T, D], in a fixed order over K."""
        ...


class ExpertRunner(Protocol):
    """The arithmetic over the slots of one tier."""

    def run(
        self, x: Tensor, experts: Sequence[tuple[int, list[int]]], top_k: int, rows: Tensor
    ) -> None:
        """Fill the rows of some experts: x [T, D], (slot, places t·K + k), rows [T·K, D]."""
        ...

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Sum rows [T, K, D] by weights [T, K] -> [T, D], like the reference."""
        ...


def by_math(
    experts: Sequence[tuple[int, list[int]]], maths: Sequence[Math]
) -> Iterable[tuple[Math, list[tuple[int, list[int]]]]]:
    """Divide (cell, places) by the arithmetic of their cells; `maths` has that of every cell."""
    found: dict[Math, list[tuple[int, list[int]]]] = {}
    for pair in experts:
        found.setdefault(maths[pair[0]], []).append(pair)
    return found.items()


class SlotMath:
    """The arithmetic over the slots of one pool, for experts of one layout."""

    def __init__(self, layout: ExpertLayout, pool: SlotPool, reference: TorchFfn) -> None:
        assert layout.data_bytes <= pool.slot_bytes
        self._reference = reference
        self._arena = torch.frombuffer(pool, dtype=torch.uint8)  # keeps the pool alive
        self._base = self._arena.data_ptr()
        self._slot_bytes = pool.slot_bytes
        self._kernel: ExpertKernel | None = None
        self._weights: list[tuple[Tensor, ...]] = []
        if layout.dtype != "F32":
            self._kernel = ExpertKernel(
                layout.dtype.lower(), layout.hidden, layout.intermediate, layout.activation,
                layout.biased, layout.down.lower(),
            )  # fmt: skip
            assert self._kernel.expert_bytes == layout.data_bytes
        if not is_tiled(layout.dtype):
            self._weights = slot_views(layout, self._arena.view(pool.slots, pool.slot_bytes))

    def slot_kernel(self, table: Residency, experts: int) -> SlotKernel | None:
        """Return what computes layers of `experts` from ids and the table of these slots."""
        if self._kernel is None:
            return None
        layers = table.cells // experts
        return SlotKernel(
            self._kernel, table.address, layers, experts, self._base, self._slot_bytes
        )

    @property
    def rows_interact(self) -> bool:
        """True if an expert's rows may depend on the other rows: torch computes them together."""
        return bool(self._weights)

    def run(
        self, x: Tensor, experts: Sequence[tuple[int, list[int]]], top_k: int, rows: Tensor
    ) -> None:
        """Fill the rows of some experts: x [T, D], (slot, places t·K + k), rows [T·K, D]."""
        if self._kernel is not None and not self._weights:
            self._run_native(x.contiguous(), experts, top_k, rows)
            return
        few = [pair for pair in experts if self._is_native(len(pair[1]))]
        if few:
            self._run_native(x.contiguous(), few, top_k, rows)
        for slot, places in experts:
            if not self._is_native(len(places)):
                at = torch.tensor(places)
                rows[at] = self._reference.ffn(x[at // top_k], *self._weights[slot])

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Sum rows [T, K, D] by weights [T, K] -> [T, D], like the reference."""
        if self._kernel is None or weights.dtype != torch.float32:
            return self._reference.combine(rows, weights)
        rows, weights = rows.contiguous(), weights.contiguous()
        tokens, top_k, width = rows.shape
        out = rows.new_empty(tokens, width)
        combine_rows(
            rows.data_ptr(), weights.data_ptr(), tokens, top_k, width, out.data_ptr(),
            rows.dtype == torch.float32,
        )  # fmt: skip
        return out

    def _is_native(self, count: int) -> bool:
        return self._kernel is not None and count <= MOST_ROWS

    def _run_native(
        self, x: Tensor, experts: Sequence[tuple[int, list[int]]], top_k: int, rows: Tensor
    ) -> None:
        assert self._kernel is not None
        self._kernel.run(
            [self._base + slot * self._slot_bytes for slot, _ in experts],
            [places for _, places in experts],
            x.data_ptr(), len(x), top_k, rows.data_ptr(),
            x.dtype == torch.float32,
        )  # fmt: skip


def slot_views(layout: ExpertLayout, slots: Tensor) -> list[tuple[Tensor, ...]]:
    """Return views of every slot as its tensors; no bytes are copied or touched."""
    return [
        tuple(
            slot[span.offset_bytes : span.offset_bytes + span.size_bytes]
            .view(_TORCH_DTYPE[span.dtype])
            .view(span.shape)
            for span in layout.spans
        )
        for slot in slots
    ]
