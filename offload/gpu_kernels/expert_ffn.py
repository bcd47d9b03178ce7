"""Compute resident experts on the device, found through a slot table.

The kernels read the same bytes as the CPU's kernels and give the same bits. In tiles this holds for
any number of rows, in bf16 for up to 16 rows of an expert. For up to 16 tokens, each (token,
expert) pair is computed separately (expert_kernels.py). For more tokens, pairs that share an expert
in tiles go through tensor cores together (grouped_gemm.py).

Work is launched on torch's current stream. Nothing is read back, so the host never waits:
`run_routed` takes ids and slot table on the device. The caller must not change the slots' bytes
before the stream has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
import triton
from torch import Tensor

from moeinf.native import BLOCK_ROWS, GROUP, is_gated, tile_columns
from moeinf.offload.format.layout import ExpertLayout, is_tiled
from moeinf.offload.gpu_kernels.expert_kernels import (
    combine_rows,
    expert_down,
    expert_inner,
    quantise_rows,
)
from moeinf.offload.gpu_kernels.grouped_gemm import grouped_down, grouped_inner
from moeinf.offload.gpu_kernels.grouping import blocks_of
from moeinf.offload.gpu_kernels.tiles import FUSION
from moeinf.offload.store.compute import MOST_ROWS, TorchFfn, slot_views

INTERPRETED = not isinstance(quantise_rows, triton.JITFunction)
STAGES = 4  # stages of loads in flight per program: 16 KiB of q4 in `expert_inner`
LANES = 128  # outputs of a program on tensor cores
_OUTPUTS = 32  # outputs of a program of `expert_down`, columns of F of one of `expert_inner`
_GROUPS = 8  # groups that one program quantises
_COLUMNS = 512  # columns that one program combines


class Activations:
    """Rows [T, K] in the form of the kernels: quantised in groups of 32, or bf16."""

    def __init__(self, rows: int, columns: int, form: str, device: torch.device) -> None:
        self.columns, self.form = columns, form
        if form == "bf16":
            self.codes = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
            self.starts = self.scales = self.codes  # not read
            return
        self.groups = padded_groups(columns, form)
        shape = (rows, self.groups)
        self.codes = torch.empty(*shape, GROUP, dtype=torch.int8, device=device)
        self.starts = torch.empty(shape, dtype=torch.int32, device=device)
        self.scales = torch.empty(shape, dtype=torch.float32, device=device)

    @classmethod
    def of(cls, x: Tensor, form: str) -> Activations:
        """Convert x [T, K], bf16 or float32."""
        found = cls(0 if form == "bf16" else len(x), x.shape[1], form, x.device)
        if form == "bf16":
            found.codes = x.contiguous().bfloat16()
            return found
        quantise_rows[(len(x), triton.cdiv(found.groups, _GROUPS))](
            x.contiguous(), found.codes, found.starts, found.scales,
            x.shape[1], found.groups, FORM=form, GROUPS=_GROUPS, num_warps=1, **FUSION,
        )  # fmt: skip
        return found

    @property
    def words(self) -> Tensor:
        """The codes as words of four codes, or the rows in bf16."""
        return self.codes if self.form == "bf16" else self.codes.view(torch.int32)


def padded_groups(columns: int, form: str) -> int:
    """Return the groups of a row of activations, rounded up to whole tiles."""
    return tiles_of(columns, form) * _tile_columns(form) // GROUP


class DeviceMath:
    """Computes with the slots of one arena: uint8 [slots, slot_bytes] on the device."""

    def __init__(
        self,
        layout: ExpertLayout,
        arena: Tensor,
        reference: TorchFfn,
        upload: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Use the arena. upload: copies a tensor to the device; None: torch's way."""
        self._upload = upload or (lambda x: x.to(arena.device, non_blocking=True))
        assert arena.dtype == torch.uint8
        assert arena.is_contiguous()
        assert arena.shape[1] % 16 == 0
        self._layout, self._reference = layout, reference
        self._form, self._down_form = layout.dtype.lower(), layout.down.lower()
        self._gated = is_gated(layout.activation)
        self._views = [] if is_tiled(layout.dtype) else slot_views(layout, arena)
        self._slots = torch.arange(len(arena), dtype=torch.int32, device=arena.device)
        self._words, self._plain = arena.view(torch.int32), arena.view(torch.bfloat16)
        offsets = {span.name: span.offset_bytes for span in layout.spans}
        self._down, self._matrix = offsets["down"], offsets.get("up", 0)  # up comes after gate
        self._inner_bias = offsets.get("gate_up_bias" if self._gated else "up_bias", 0)
        self._down_bias = offsets.get("down_bias", 0)

    def run(
        self, x: Tensor, experts: Sequence[tuple[int, list[int]]], top_k: int, rows: Tensor
    ) -> None:
        """Fill the rows of some experts: x [T, D], (slot, places t·K + k), rows [T·K, D]."""
        slots = torch.full((len(rows),), -1, dtype=torch.int32)
        for slot, places in experts:
            if self._views and (self._form == "f32" or len(places) > MOST_ROWS):
                at = self._upload(torch.tensor(places))
                rows[at] = self._reference.ffn(x[at // top_k], *self._views[slot])
            else:
                slots[places] = slot
        if self._form == "f32" or not (slots >= 0).any():
            return
        ids = self._upload(slots).view(-1, top_k)
        self.run_routed(x, ids, self._slots, 0, rows, len(experts))

    def can_route(self, rows: int) -> bool:
        """Return True if run_routed gives this many rows the same bits as `run`: see MOST_ROWS."""
        return self._form != "f32" and (not self._views or rows <= MOST_ROWS)

    def run_routed(
        self,
        x: Tensor,
        ids: Tensor,
        table: Tensor,
        first_cell: int,
        rows: Tensor,
        experts: int | None = None,
    ) -> None:
        """Fill the rows of pairs whose expert is on the device, and leave the others unchanged.

        x: [T, D] bf16 or float32. ids: [T, K] int32 or int64, -1 for no expert.
        rows: [T·K, D] of x's type.
        table: int32; at first_cell + e, the slot of expert e of the layer, or -1 if not resident.
        experts: upper bound on the number of different experts in ids; it saves empty programs.
        """
        if self._form == "bf16" or len(x) <= MOST_ROWS:
            self._run_pairs(x, ids, table, first_cell, rows)
            return
        most = min(len(table) - first_cell, len(self._slots))
        self._run_blocks(x, ids, table[first_cell:], rows, min(most, experts or most))

    def _run_blocks(
        self, x: Tensor, ids: Tensor, table: Tensor, rows: Tensor, experts: int
    ) -> None:
        """Compute pairs that share an expert together, for any number of tokens."""
        shape, form = self._layout, self._form
        d, f, pairs, ids = shape.hidden, shape.intermediate, ids.numel(), ids.flatten()
        slots = torch.where(ids < 0, -1, table[ids.clamp(min=0)])
        most = min(rows_of_block(pairs, experts, of) for of in (form, self._down_form))
        blocks = blocks_of(slots, experts, most)
        inputs = Activations.of(x, form)
        middle = Activations(pairs, f, self._down_form, x.device)
        shared = (
            blocks.begins, blocks.slots, blocks.order,
            self._words, self._plain, self._words.shape[1],
        )  # fmt: skip
        fixed = {"BIASED": shape.biased, "STAGES": STAGES, "ROWS": blocks.rows}
        warps = warps_of(blocks.rows)
        grouped_inner[(padded_groups(f, self._down_form) // 2, blocks.most)](
            *shared, self._matrix // 4, self._inner_bias // 2,
            d, f, tiles_of(d, form), padded_groups(f, self._down_form), len(ids) // len(x), pairs,
            inputs.codes, inputs.scales, middle.codes, middle.scales,
            FORM=form, DOWN=self._down_form, ACTIVATION=shape.activation, num_warps=warps,
            **fixed, **FUSION,
        )  # fmt: skip
        grouped_down[(triton.cdiv(d, LANES), blocks.most)](
            *shared, self._down // 4, self._down_bias // 2, d, tiles_of(f, self._down_form), pairs,
            middle.codes, middle.scales, rows,
            FORM=self._down_form, LANES=LANES, num_warps=warps, **fixed, **FUSION,
        )  # fmt: skip

    def _run_pairs(
        self, x: Tensor, ids: Tensor, table: Tensor, first_cell: int, rows: Tensor
    ) -> None:
        """Compute every pair separately."""
        shape, form, place = self._layout, self._form, ids.contiguous()
        d, f, pairs = shape.hidden, shape.intermediate, ids.numel()
        inputs = Activations.of(x, form)
        middle = Activations(pairs, f, self._down_form, x.device)
        shared = (place, table, first_cell, self._words, self._plain, self._words.shape[1])
        fixed = {"BIASED": shape.biased, "STAGES": STAGES, "EMULATE": INTERPRETED}
        expert_inner[(pairs, padded_groups(f, self._down_form))](
            *shared, self._matrix // 4, self._inner_bias // 2,
            d, f, tiles_of(d, form), padded_groups(f, self._down_form), ids.shape[1],
            inputs.words, inputs.starts, inputs.scales, middle.codes, middle.starts, middle.scales,
            FORM=form, DOWN=self._down_form, ACTIVATION=shape.activation, num_warps=4,
            **fixed, **FUSION,
        )  # fmt: skip
        expert_down[(pairs, triton.cdiv(d, _OUTPUTS))](
            *shared, self._down // 4, self._down_bias // 2, d, f, tiles_of(f, self._down_form),
            middle.words, middle.starts, middle.scales, rows,
            FORM=self._down_form, num_warps=4, **fixed, **FUSION,
        )  # fmt: skip

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Sum rows [T, K, D] by weights [T, K] -> [T, D], in the order of the reference."""
        if self._form == "f32" or weights.dtype != torch.float32:
            return self._reference.combine(rows, weights)
        tokens, top_k, width = rows.shape
        out = rows.new_empty(tokens, width)
        combine_rows[(tokens, triton.cdiv(width, _COLUMNS))](
            rows.contiguous(), weights.contiguous(), out, top_k, width,
            COLUMNS=_COLUMNS, num_warps=4, **FUSION,
        )  # fmt: skip
        return out


def tiles_of(columns: int, form: str) -> int:
    """Return the number of tiles of a row block; bf16 counts like q8."""
    return -(-columns // _tile_columns(form))


def _tile_columns(form: str) -> int:
    return tile_columns("q8" if form == "bf16" else form)


def rows_of_block(rows: int, experts: int = 1, form: str = "q4") -> int:
    """Return the rows of a program on tensor cores: the mean per expert, as 16, 32 or 64.

    q6k gets at most 32: its programs of 64 rows spill registers.
    """
    most = min(_most_rows(), 32) if form == "q6k" else _most_rows()
    return int(min(most, max(16, triton.next_power_of_2(triton.cdiv(rows, max(1, experts))))))


@cache
def _most_rows() -> int:
    """Return 64, or 32 on compute capability 10.0, where Triton 3.9 cannot compile more."""
    there = torch.cuda.is_available() and torch.cuda.get_device_capability() == (10, 0)
    return 32 if there else 64


def warps_of(rows: int) -> int:
    """Return the warps of a program of `rows` by LANES outputs: up to 32 sums per thread."""
    return 4 if rows <= 32 else 8


assert 2 * BLOCK_ROWS == GROUP == _OUTPUTS
