"""Read experts and blocks of tables into slots. Only this module imports the native copy queue.

Does not know which experts are needed, nor which are evicted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from moeinf.errors import Failure, problem
from moeinf.native import DEMAND, MAX_READERS, CopyQueue, SlotPool
from moeinf.offload.format.drives import named
from moeinf.offload.format.shards import FileRecord
from moeinf.offload.store.prefetch_gate import Calls

PIECE_BYTES = 512 << 10  # of a prefetch, which yields to demand between two pieces
_ENOUGH_CALLS = 32


class ExpertReadError(Failure, OSError):
    """Reading an expert's bytes failed. shard: the file, relative to the folder of `model`.

    That of a further drive is followed by the drive's home.
    """

    code = "unreadable_shard"
    hint = "`moeinf verify MODEL --repair`"

    def __init__(
        self, shard: str, problem: str, model: str = "", what: str = "expert shard"
    ) -> None:
        super().__init__(problem)
        self.what = what
        self.shard = shard
        self.problem = problem
        self.model = model

    def __str__(self) -> str:
        words = f"the {self.what} {self.shard} cannot be read: {self.problem}"
        return f"{self.model}: {words}" if self.model else words


class Transfer:
    """Reads experts by cell (layer · E + expert) into the slots of `pool`, several at a time.

    `shards` has the record of each cell, by cell.
    """

    def __init__(
        self,
        folder: Path,
        shards: Sequence[FileRecord],
        pool: SlotPool,
        *,
        readers: int,
        direct_io: bool,
        block_bytes: int = 1 << 30,
        busy: int = MAX_READERS,
        model: str = "",
    ) -> None:
        """Open the queue and add every shard.

        model: its name, for errors.
        busy: number of reads that keep the drive busy; at most so many prefetches run at once.
        """
        self._queue = CopyQueue(
            pool,
            readers=readers,
            direct=direct_io,
            block_bytes=block_bytes,
            busy=busy,
            piece_bytes=PIECE_BYTES,
        )
        self._pool = pool
        self.telling_seconds = 0.0  # spent in `demand` and `ahead`
        self._folder, self._shards, self._model = folder, shards, model
        self._sources = [
            self._queue.add_source(
                str(folder / shard.path), shard.data_offset, shard.data_bytes, shard.crc32c
            )
            for shard in shards
        ]

    def demand(self, cells: Sequence[int], slots: Sequence[int]) -> list[int]:
        """Queue reads of cells that a layer waits for; return one ticket each, in order.

        If a slot still holds the bytes of its cell, its ticket needs no wait.
        """
        return self._submit(cells, slots, DEMAND)

    def wait(self, ticket: int, cell: int) -> None:
        """Return when the cell's bytes are in its slot. Raises ExpertReadError."""
        try:
            self._queue.wait(ticket)
        except OSError as error:
            raise self._error(cell, problem(error)) from error

    def ahead(self, cells: Sequence[int], slots: Sequence[int], priority: float) -> list[int]:
        """Queue prefetches: they run after all demand reads, larger priorities first."""
        return self._submit(cells, slots, priority)

    def hasten(self, ticket: int) -> None:
        """Raise a prefetch to a demand read; no byte of it is read a second time."""
        self._queue.raise_priority(ticket, DEMAND)

    def cancel(self, ticket: int, half_read: bool = False) -> bool:
        """Cancel a read; return True if it had not begun, so that its slot is unchanged.

        half_read: also cancel one that has yielded to demand, and return True.
        """
        return self._queue.cancel(ticket, half_read)

    def ended(self) -> list[tuple[int, Exception | None]]:
        """Return the tickets that ended since the last call, each once, with its error or None.

        Call it only when every ticket of `demand` has been waited for.
        """
        return self._queue.collect()

    def calls(self) -> Calls:
        """Return the calls that have read, since the queue opened."""
        n = self._queue.counters()
        return Calls(n.whole_calls, n.whole_seconds, n.piece_calls, n.piece_seconds)

    def call_bytes_per_s(self) -> float | None:
        """Return the bytes per second inside calls that read whole experts; None for a few."""
        n = self._queue.counters()
        if n.whole_calls < _ENOUGH_CALLS:
            return None
        return n.bytes_read / n.reads * n.whole_calls / n.whole_seconds

    def abandon(self, ticket: int) -> None:
        """Cancel a ticket and wait until it has ended; only a hung read may still write."""
        self._queue.cancel(ticket, half_read=True)
        # RuntimeError: cancelled, or a reader failed; ValueError: its failure was reported.
        with suppress(OSError, RuntimeError, ValueError):
            self._queue.wait(ticket)

    @property
    def direct_io(self) -> bool:
        """True if all reads bypassed the page cache: requested, and never refused."""
        return self._queue.direct and self._queue.direct_refusals == 0

    def no_slot(self, cell: int) -> ExpertReadError:
        """Return the error for a cell whose read cannot be queued."""
        return self._error(cell, "reads that do not end hold every slot")

    def may_write(self, slot: int) -> bool:
        """Return True if an abandoned read may still write into the slot."""
        return not self._queue.can_submit(slot)

    def release(self, slot: int) -> None:
        """Give the memory of a slot back to the system. No read may write to it."""
        self._queue.invalidate(slot)  # its bytes are gone
        self._pool.release(slot)

    def bytes_of(self, cell: int) -> int:
        return self._shards[cell].data_bytes

    def _error(self, cell: int, problem: str) -> ExpertReadError:
        return ExpertReadError(named(self._folder, self._shards[cell].path), problem, self._model)

    def _submit(self, cells: Sequence[int], slots: Sequence[int], priority: float) -> list[int]:
        begin = time.perf_counter()
        tickets = self._queue.submit_many([self._sources[c] for c in cells], list(slots), priority)
        self.telling_seconds += time.perf_counter() - begin
        return tickets

    def close(self) -> None:
        self._queue.close()


class BlockReads:
    """Reads blocks of equal size from any files into the slots of `pool`, several at a time."""

    def __init__(self, pool: SlotPool, *, readers: int, direct_io: bool) -> None:
        """Open the queue. Slot n has the source n, which moves with every read."""
        self._queue = CopyQueue(pool, readers=readers, direct=direct_io)
        self._bytes = pool.slot_bytes
        for _ in range(pool.slots):
            self._queue.add_source("", 0, pool.slot_bytes)

    def start(self, slots: list[int], paths: list[str], offsets: list[int]) -> list[int]:
        """Queue a read into each slot; return its ticket."""
        self._queue.replace_sources(slots, paths, offsets, self._bytes)
        return self._queue.submit_many(slots, slots, DEMAND)

    def wait(self, ticket: int) -> None:
        """Return when the block is in its slot. Raises OSError."""
        self._queue.wait(ticket)

    def abandon(self, ticket: int) -> None:
        """Cancel a ticket and wait until it has ended; only a hung read may still write."""
        self._queue.cancel(ticket)
        with suppress(OSError, RuntimeError):  # failed, or cancelled
            self._queue.wait(ticket)

    def may_write(self, slot: int) -> bool:
        """Return True if a read that hangs may still write into the slot."""
        return not self._queue.can_submit(slot)

    def close(self) -> None:
        """End the readers."""
        self._queue.close()
