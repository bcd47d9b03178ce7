"""Copy tokens of a KV cache into one buffer, and back.

A buffer holds the recurrent layers' memory after its last token, if it is a snapshot. Then come the
planes [heads, tokens, width], layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeinf.models.layers.kv_cache import CacheLayout, KvCache
from moeinf.offload.format.direct_io import BLOCK_BYTES


def buffer_bytes(layout: CacheLayout, start: int, stop: int, snapshot: bool) -> int:
    """Return the size of the buffer for the tokens `start` … `stop`."""
    memory = layout.recurrent.slot_bytes if snapshot and layout.recurrent else 0
    return memory + layout.bytes_of(start, stop)


def copied_out(state: KvCache, start: int, stop: int, snapshot: bool) -> Tensor:
    """Return a buffer [bytes] uint8 with the tokens `start` … `stop` of a state.

    A snapshot must stop at one of the state's cuts.
    """
    parts = state.memory_at(stop) if snapshot else []
    parts = [*parts, *state.columns(start, stop)]
    buffer = torch.empty(buffer_bytes(state.layout, start, stop, snapshot), dtype=torch.uint8)
    for part, target in zip(parts, _views(buffer, parts), strict=True):
        target.copy_(part)
    return buffer


class Part(NamedTuple):
    """Where bytes of a buffer go: some heads of a plane, maybe not all of its tokens.

    target: [heads, rows, width] bytes. held: rows in the buffer.
    """

    target: NDArray[np.uint8]
    held: int

    @property
    def size_bytes(self) -> int:
        """The part's bytes in the buffer."""
        heads, _, width = self.target.shape
        return int(heads * self.held * width)

    def take(self, data: memoryview) -> None:
        """Copy from the part's bytes. Releases the interpreter, and uses no other thread."""
        heads, rows, width = self.target.shape
        source = np.frombuffer(data, np.uint8).reshape(heads, self.held, width)
        np.copyto(self.target, source[:, :rows])


def parts_of(state: KvCache, start: int, tokens: int, held: int) -> list[Part]:
    """Return the parts for the first `tokens` of the `held` tokens of a buffer, in its order.

    They are the columns from `start`. No part is larger than a block of direct I/O.
    """
    found = []
    whole = state.layout.rows_of(start, start + held)
    for column, rows in zip(state.columns(start, start + tokens), whole, strict=True):
        plane = column.view(torch.uint8).numpy()
        heads = max(1, BLOCK_BYTES // max(1, rows * plane.shape[2]))
        steps = range(0, len(plane), heads) if rows else ()
        found += [Part(plane[at : at + heads], rows) for at in steps]
    return found


def parts_of_buffer(buffer: Tensor) -> list[Part]:
    """Return parts that follow each other in a buffer [bytes] uint8."""
    pieces = torch.split(buffer, BLOCK_BYTES)
    return [Part(piece.numpy()[None, None], 1) for piece in pieces]


def copy_in(state: KvCache, start: int, tokens: int, buffer: Tensor, held: int) -> None:
    """Write the first `tokens` of the `held` tokens of a buffer into the columns from `start`."""
    data = buffer.numpy().data
    at = len(data) - state.layout.bytes_of(start, start + held)
    for part in parts_of(state, start, tokens, held):
        part.take(data[at : at + part.size_bytes])
        at += part.size_bytes


def copy_memory(buffer: Tensor, memory: Sequence[Tensor]) -> None:
    """Write the recurrent memory that a snapshot's buffer holds into `memory`."""
    for target, source in zip(memory, _views(buffer, memory), strict=True):
        target.copy_(source)


def _views(buffer: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a buffer, one after the other, in the shapes and types of `parts`."""
    found, at = [], 0
    for part in parts:
        end = at + part.shape.numel() * part.dtype.itemsize
        found.append(buffer[at:end].view(part.dtype).view(part.shape))
        at = end
    return found
