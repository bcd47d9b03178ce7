"""Pack rows into the blocks of row_table.py, whose sizes are known without NumPy."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.format.row_table import CRC_BYTES, RowTable, checksum


def packed(rows: NDArray[np.uint8], table: RowTable, first: int) -> bytearray:
    """Return rows [n, row_bytes] as blocks, of which the first has the number `first`.

    Only the last block of a file may lack rows.
    """
    count = -(-len(rows) // table.block_rows)
    data = bytearray(count * table.block_bytes)
    blocks = np.frombuffer(data, np.uint8).reshape(count, table.block_bytes)
    used = table.block_rows * table.row_bytes
    whole = len(rows) // table.block_rows
    blocks[:whole, :used] = rows[: whole * table.block_rows].reshape(whole, used)
    if whole < count:
        rest = rows[whole * table.block_rows :].reshape(-1)
        blocks[whole, : len(rest)] = rest
    size, view = table.block_bytes, memoryview(data)
    for number in range(count):
        end = (number + 1) * size - CRC_BYTES
        struct.pack_into("<I", data, end, checksum(view[number * size : end], first + number))
    return data
