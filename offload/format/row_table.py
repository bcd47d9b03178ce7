"""Tables of rows on disk, of which a token uses a few: blocks of whole pages with a checksum each.

    byte 0      length of the JSON header (u64, little endian), then the header and spaces
    byte 4096   block 0, block 1, …

    block       | row | row | … | zeros | CRC-32C |        one or more pages
                  row_bytes each          u32, little endian

No row is in two blocks, so one aligned read fetches a row. The checksum is that of the block's
other bytes, begun with the block's number: a block that was read from another place is wrong. A
table may have several files, one for each tensor of the checkpoint. Rows are F32, BF16, or Q8: rows
of the KV cache in q8 (models/layers/kv_q8.py).
"""

from __future__ import annotations

import struct
from typing import Annotated, Literal

from msgspec import Meta, Struct

from moeinf.native import PAGE_BYTES, SHARD_DATA_OFFSET, crc32c, kv_q8_row_bytes
from moeinf.offload.format.shards import padded_header

RowForm = Literal["F32", "BF16", "Q8"]
TABLE_VERSION = 1
LANDING_BYTES = 1 << 20  # of RAM for blocks that are read
KEY_BYTES = 8  # of RAM for each row that is cached, beside the row
CRC_BYTES = 4
_ITEM_BYTES = {"F32": 4, "BF16": 2}
_Count = Annotated[int, Meta(ge=1, lt=1 << 48)]
_Width = Annotated[int, Meta(ge=1, le=1 << 20)]


class RowTable(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of a model, as its manifest has it. rows: of each of its files, in order."""

    name: str
    width: _Width
    form: RowForm
    rows: tuple[_Count, ...]
    layout: int = TABLE_VERSION

    @property
    def row_bytes(self) -> int:
        if self.form == "Q8":
            return kv_q8_row_bytes(self.width)
        return self.width * _ITEM_BYTES[self.form]

    @property
    def block_bytes(self) -> int:
        """The least whole pages that hold a row and the checksum."""
        return -(-(self.row_bytes + CRC_BYTES) // PAGE_BYTES) * PAGE_BYTES

    @property
    def block_rows(self) -> int:
        return (self.block_bytes - CRC_BYTES) // self.row_bytes

    def blocks(self, number: int) -> int:
        """Return the number of blocks of file `number`."""
        return -(-self.rows[number] // self.block_rows)

    def file_bytes(self, number: int) -> int:
        """Return the size of file `number`, header included."""
        return SHARD_DATA_OFFSET + self.blocks(number) * self.block_bytes

    def cache_bytes(self, budget: int) -> int:
        """Return the bytes of RAM for reading the table within a budget; at most what it needs."""
        all_rows = LANDING_BYTES + sum(self.rows) * (self.row_bytes + KEY_BYTES)
        return min(all_rows, max(budget, LANDING_BYTES))

    @property
    def disk_bytes(self) -> int:
        return sum(self.file_bytes(number) for number in range(len(self.rows)))


def table_path(table: int, number: int) -> str:
    """Return the path of file `number` of a model's table, relative to the model's folder."""
    return f"tables/T{table:03d}/{number:04d}.rows"


def table_header(table: RowTable, number: int) -> bytes:
    """Return the first SHARD_DATA_OFFSET bytes of file `number`."""
    about = {"format": "moeinf", "layout": table.layout, "table": table.name[:1024], "file": number}
    shape = {"form": table.form, "width": table.width, "rows": table.rows[number]}
    return padded_header({**about, **shape}, SHARD_DATA_OFFSET)


def checksum(data: memoryview, number: int) -> int:
    """Return the checksum of block `number`, whose last CRC_BYTES are not in `data`."""
    return crc32c(data, number & 0xFFFFFFFF)


def is_intact(block: memoryview, number: int) -> bool:
    """Return whether a block's checksum is right."""
    (stored,) = struct.unpack_from("<I", block, len(block) - CRC_BYTES)
    return bool(checksum(block[:-CRC_BYTES], number) == stored)
