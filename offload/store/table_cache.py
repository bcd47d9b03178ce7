"""Read rows of a table from disk, with a cache of rows in RAM. Its size changes no row.

A row's place in the cache follows from its number alone, and a row that comes later replaces the
row in its place. That costs 8 bytes a row and a few operations on arrays; the reuse of rows is so
uneven that a better choice would gain little. If the whole table has room, each row has a place of
its own.

A row is read with its block, into a landing place, by the copy queue: a demand, so that many are
read at once. Two rows of one block are one read. `ahead` leaves blocks in their landing places, and
`rows` takes them from there:

    ahead     blocks of the first rows wanted ──queue──▶ landing places
    rows      cached rows, then blocks in landing places, then all others, in batches
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeinf.errors import problem
from moeinf.native import SHARD_DATA_OFFSET, SlotPool
from moeinf.offload.format.row_table import CRC_BYTES, KEY_BYTES, LANDING_BYTES, RowTable, checksum
from moeinf.offload.store.transfer import BlockReads, ExpertReadError

_READERS = 32
_SPREAD = 0x9E3779B1  # odd: neighbours get places far apart


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The distinct rows of some ids, ascending, and where each is stored.

    inverse: ids = rows[inverse]. places: in the cache. inside: places in the blocks.
    """

    ids: NDArray[np.int64]
    rows: NDArray[np.int64]
    inverse: NDArray[np.intp]
    places: NDArray[np.int64]
    blocks: NDArray[np.int64]
    inside: NDArray[np.int64]


class CachedTable:
    """A models.base.Table over the files of a model."""

    def __init__(
        self,
        table: RowTable,
        folder: Path,
        paths: Sequence[str],
        widen: Callable[[Tensor], Tensor],
        cache_bytes: int,
        *,
        direct_io: bool,
        model: str = "",
    ) -> None:
        """Open the queue. paths: of the files, in `folder`. widen: stored rows -> values."""
        self._table, self._paths, self._model, self._widen = table, paths, model, widen
        self._files = [str(folder / path) for path in paths]
        self._firsts = np.cumsum([0, *table.rows])  # the first row of each file, and the end
        blocks = [table.blocks(number) for number in range(len(table.rows))]
        self._first_blocks = np.cumsum([0, *blocks])
        landings = max(1, LANDING_BYTES // table.block_bytes)
        self._pool = SlotPool(landings, table.block_bytes)
        self._reads = BlockReads(self._pool, readers=min(_READERS, landings), direct_io=direct_io)
        self._landings = np.frombuffer(memoryview(self._pool), np.uint8).reshape(landings, -1)
        self._checked = [landing[:-CRC_BYTES].data for landing in self._landings]
        self._checksums = self._landings[:, -CRC_BYTES:].view("<u4")[:, 0]
        assert np.may_share_memory(self._checksums, self._landings)
        used = table.block_rows * table.row_bytes
        self._in_landings = self._landings[:, :used].reshape(landings, table.block_rows, -1)
        assert np.may_share_memory(self._in_landings, self._landings)  # [landing, row, byte]
        self._free = list(range(landings))
        self._hung: list[int] = []  # landings that an abandoned read may still write to
        self._flying: dict[int, tuple[int, int]] = {}  # block -> its landing and ticket
        most = (table.cache_bytes(cache_bytes) - LANDING_BYTES) // (table.row_bytes + KEY_BYTES)
        self._places = max(1, min(most, sum(table.rows)))
        self._keys = np.full(self._places, -1, np.int64)  # the row in each place
        self._cache = np.empty((self._places, table.row_bytes), np.uint8)
        self._last: _Wanted | None = None  # of `ahead`, mostly those of the next `rows`
        self.reads = self.hits = 0  # blocks, and rows that were in the cache

    def close(self) -> None:
        """End the readers, and free the landing places; no row may be read afterwards."""
        self._reads.close()
        self._pool.release_all()

    def ahead(self, ids: Tensor) -> None:
        """Start to read the blocks of rows ids [n] int64 that are not here, as many as land."""
        found = self._last = self._found(ids[: len(self._landings)].numpy())
        blocks = found.blocks[self._keys[found.places] != found.rows]
        wanted = blocks[_starts(blocks)]
        keep = set(wanted.tolist())
        for block in [block for block in self._flying if block not in keep]:
            self._drop(block)
        self._start(wanted)

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows ids [n] int64 as [n, width]. Raises ExpertReadError."""
        found, self._last = self._found(ids.numpy()), None
        places = found.places
        out = np.empty((len(found.rows), self._table.row_bytes), np.uint8)
        here = self._keys[places] == found.rows
        count = int(np.count_nonzero(here))
        self.hits += count
        if count:
            out[here] = self._cache[places[here]]
        if count < len(here):
            absent = np.flatnonzero(~here)
            self._fetch(found.blocks[absent], found.inside[absent], absent, out)
            places, rows = places[absent], found.rows[absent]
            self._keys[places] = rows
            kept = self._keys[places] == rows  # of two rows with one place, one
            self._cache[places[kept]] = out[absent[kept]]
        return self._widen(torch.from_numpy(out[found.inverse]))

    def _found(self, ids: NDArray[np.int64]) -> _Wanted:
        """Return where the rows of ids lie; those of `ahead` if the ids are the same."""
        if self._last is not None and np.array_equal(self._last.ids, ids):
            return self._last
        rows, inverse = np.unique(ids, return_inverse=True)
        file = np.searchsorted(self._firsts, rows, side="right") - 1
        block, inside = np.divmod(rows - self._firsts[file], self._table.block_rows)
        blocks = self._first_blocks[file] + block
        return _Wanted(ids.copy(), rows, inverse, self._places_of(rows), blocks, inside)

    def _places_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        if self._places == self._firsts[-1]:
            return rows
        return rows * _SPREAD % self._places

    def _fetch(
        self,
        blocks: NDArray[np.int64],
        inside: NDArray[np.int64],
        targets: NDArray[np.intp],
        out: NDArray[np.uint8],
    ) -> None:
        """Set out[targets] to the rows at `inside` of blocks, which ascend."""
        starts = _starts(blocks)
        distinct, counts = blocks[starts], np.diff(starts, append=len(blocks))
        wanted = set(distinct.tolist())
        for block in [block for block in self._flying if block not in wanted]:
            self._drop(block)
        done = 0
        while done < len(distinct):
            first = int(distinct[done])
            if first not in self._flying:
                self._make_room(first)
                self._start(distinct[done:])
            landed: list[int] = []
            try:
                self._land(distinct[done:], landed)
                stop = done + len(landed)
                at = slice(int(starts[done]), int(starts[stop - 1] + counts[stop - 1]))
                found = np.repeat(landed, counts[done:stop])
                out[targets[at]] = self._in_landings[found, inside[at]]
            finally:
                self._free += landed
            done += len(landed)

    def _start(self, blocks: NDArray[np.int64]) -> None:
        """Queue reads of the first blocks that are not in flight, as many as have a landing."""
        some = blocks[: len(self._free) + len(self._flying)].tolist()
        new = [block for block in some if block not in self._flying][: len(self._free)]
        if not new:
            return
        files = np.searchsorted(self._first_blocks, new, side="right") - 1
        offsets = SHARD_DATA_OFFSET + (new - self._first_blocks[files]) * self._table.block_bytes
        landings = self._free[-len(new) :]
        paths = [self._files[file] for file in files.tolist()]
        tickets = self._reads.start(landings, paths, offsets.tolist())
        del self._free[-len(new) :]
        self._flying |= dict(zip(new, zip(landings, tickets, strict=True), strict=True))
        self.reads += len(new)

    def _make_room(self, block: int) -> None:
        """Free a landing for a block, unless one is free. Raises ExpertReadError."""
        hung = [landing for landing in self._hung if self._reads.may_write(landing)]
        self._free += [landing for landing in self._hung if landing not in hung]
        self._hung = hung
        while not self._free and self._flying:
            self._drop(max(self._flying))
        if not self._free:
            raise self._failed(self._file_of(block), "reads that do not end hold every place")

    def _file_of(self, block: int) -> int:
        return int(np.searchsorted(self._first_blocks, block, side="right")) - 1

    def _land(self, blocks: NDArray[np.int64], landed: list[int]) -> None:
        """Wait for the first of these blocks, as many as are in flight, and check them.

        Their landings are appended to `landed`; the caller frees them.
        """
        files = np.searchsorted(self._first_blocks, blocks, side="right") - 1
        numbers = (blocks - self._first_blocks[files]).tolist()
        for block, file, number in zip(blocks.tolist(), files.tolist(), numbers, strict=True):
            if block not in self._flying:
                return
            landing, ticket = self._flying[block]
            try:
                self._reads.wait(ticket)
            except OSError as error:
                del self._flying[block]
                self._release(landing)
                raise self._failed(file, problem(error)) from error
            del self._flying[block]
            landed.append(landing)
            if checksum(self._checked[landing], number) != self._checksums[landing]:
                raise self._failed(file, f"block {number} has a wrong checksum")

    def _failed(self, file: int, words: str) -> ExpertReadError:
        return ExpertReadError(self._paths[file], words, self._model, "table")

    def _release(self, landing: int) -> None:
        """Free a landing; later, if a read that hangs may still write to it."""
        (self._hung if self._reads.may_write(landing) else self._free).append(landing)

    def _drop(self, block: int) -> None:
        """Forget a block that was prefetched and is not wanted."""
        landing, ticket = self._flying[block]
        self._reads.abandon(ticket)
        del self._flying[block]
        self._release(landing)


def _starts(ascending: NDArray[np.int64]) -> NDArray[np.intp]:
    """Return where each distinct value begins."""
    new = np.ones(len(ascending), np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=new[1:])
    return np.flatnonzero(new)
