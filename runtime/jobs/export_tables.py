"""Write the tables of rows of a model as tensors of a GGUF file.

Rows of F32 and BF16 stay as they are. Q8 and Q8_0 have the same blocks of 32 codes, with a scale of
bfloat16 and of float16: a scale below 2^-14 is rounded. A row that is not whole blocks becomes F32.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from moeinf.models.layers.kv_q8 import VALUES, widened
from moeinf.native import SHARD_DATA_OFFSET
from moeinf.offload.format.row_table import RowTable, is_intact
from moeinf.runtime.checkpoints.checkpoint import read_exactly
from moeinf.runtime.files.regular import open_regular
from moeinf.runtime.gguf.writing.writer import FileWriter, Kind, WrittenTensor
from moeinf.runtime.library.manifest import DamagedModel, Manifest

Bytes = NDArray[np.uint8]
_BLOCKS = 256  # read at once
_KINDS = {"F32": Kind.F32, "BF16": Kind.BF16, "Q8": Kind.Q8_0}


@dataclass(frozen=True)
class ExportedTable:
    """Table `number` of a model and its tensor."""

    number: int
    table: RowTable
    tensor: WrittenTensor


def exported_tables(manifest: Manifest, names: Mapping[str, str]) -> list[ExportedTable]:
    """Return the tables; names: of their tensors. Raises DamagedModel for one without a name."""
    found = []
    for number, table in enumerate(manifest.tables):
        if table.name not in names:
            raise DamagedModel(f"{manifest.model} has a table {table.name} that it does not use")
        split = table.form == "Q8" and table.width % VALUES
        kind = Kind.F32 if split else _KINDS[table.form]
        shape = (sum(table.rows), table.width)
        found.append(ExportedTable(number, table, WrittenTensor(names[table.name], kind, shape)))
    return found


def write_table(
    file: FileWriter,
    folder: Path,
    manifest: Manifest,
    one: ExportedTable,
    tell: Callable[[int], None],
) -> None:
    """Write all rows of a table. Raises DamagedModel for a block that is not what was pulled."""
    table, at = one.table, 0
    for count, record in zip(table.rows, manifest.table_files(one.number), strict=True):
        path = folder / record.path
        source = open_regular(path)
        try:
            for first in range(0, count, _BLOCKS * table.block_rows):
                rows = min(count - first, _BLOCKS * table.block_rows)
                number = first // table.block_rows
                blocks = -(-rows // table.block_rows)
                data = np.empty((blocks, table.block_bytes), np.uint8)
                start = SHARD_DATA_OFFSET + number * table.block_bytes
                read_exactly(source, data.data.cast("B"), start, path)
                for place, block in enumerate(data):
                    if not is_intact(block.data, number + place):
                        raise DamagedModel(
                            f"{manifest.model}: {record.path} is not what was pulled"
                        )
                found = data[:, : table.block_rows * table.row_bytes]
                found = np.ascontiguousarray(found).reshape(-1, table.row_bytes)[:rows]
                encoded = _encoded(found, table, one.tensor.kind)
                file.write(one.tensor, encoded, at * one.tensor.row_bytes)
                at += rows
                tell(data.nbytes)
        finally:
            os.close(source)


def _encoded(rows: Bytes, table: RowTable, kind: Kind) -> Bytes:
    """Return stored rows [n, row_bytes] as [n, bytes of a row] of `kind`."""
    if kind == _KINDS[table.form] and kind != Kind.Q8_0:
        return rows
    if kind == Kind.F32:
        values: Bytes = widened(torch.from_numpy(rows), table.width, torch.float32).numpy()
        return values.view(np.uint8).reshape(len(rows), -1)
    blocks = rows.reshape(len(rows), -1, 2 + VALUES).copy()
    scales = torch.from_numpy(blocks[..., :2].copy()).view(torch.bfloat16)
    blocks[..., :2] = scales.half().view(torch.uint8).numpy()
    return blocks.reshape(len(rows), -1)
