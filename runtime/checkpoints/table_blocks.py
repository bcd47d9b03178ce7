"""Convert a tensor to the blocks of a table of rows, some at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from moeinf.models.layers.kv_q8 import quantised
from moeinf.offload.format.row_blocks import packed
from moeinf.offload.format.row_table import RowTable
from moeinf.runtime.checkpoints.checkpoint import TORCH_DTYPE, SourceTensor
from moeinf.runtime.checkpoints.encode import Look, encoded, unseen

_STEP_BYTES = 1 << 20  # of blocks


def table_blocks(
    tensor: SourceTensor, table: RowTable, look: Look = unseen
) -> Iterator[memoryview]:
    """Yield a matrix [rows, width] as blocks of the table. look: see encode.encoded."""
    plain = "F32" if table.form == "Q8" else table.form
    row_bytes = table.width * TORCH_DTYPE[plain].itemsize
    blocks = max(1, _STEP_BYTES // table.block_bytes)
    step, first, held = blocks * table.block_rows * row_bytes, 0, bytearray()
    for piece in encoded(tensor, plain, look):
        held += piece
        while len(held) >= step:
            yield memoryview(_packed(held[:step], table, first))
            del held[:step]
            first += blocks
    if held:
        yield memoryview(_packed(held, table, first))


def _packed(values: bytearray, table: RowTable, first: int) -> bytearray:
    """Return whole rows of plain values as blocks from number `first` on."""
    rows = np.frombuffer(values, np.uint8)
    if table.form == "Q8":
        wide = torch.frombuffer(values, dtype=torch.float32).view(-1, table.width)
        rows = quantised(wide).numpy()
    return packed(rows.reshape(-1, table.row_bytes), table, first)
