"""Copy tokens of a KV cache into one buffer, and back.

A buffer holds the recurrent layers' memory after its last token, if it is a snapshot. Then come the
planes [heads, tokens, width], layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeinf.models.layers.kv_cache import CacheLayout, KvCache


def buffer_bytes(layout: CacheLayout, tokens: int, snapshot: bool) -> int:
    """Return the size of the buffer for so many tokens."""
    memory = layout.recurrent.slot_bytes if snapshot and layout.recurrent else 0
    return memory + tokens * layout.bytes_per_token


def copied_out(state: KvCache, start: int, stop: int, snapshot: bool) -> Tensor:
    """Return a buffer [bytes] uint8 with the tokens `start` … `stop` of a state.

    A snapshot must stop at one of the state's cuts.
    """
    parts = state.memory_at(stop) if snapshot else []
    parts = [*parts, *state.columns(start, stop)]
    buffer = torch.empty(buffer_bytes(state.layout, stop - start, snapshot), dtype=torch.uint8)
    for part, target in zip(parts, _views(buffer, parts), strict=True):
        target.copy_(part)
    return buffer


def copy_in(state: KvCache, start: int, tokens: int, buffer: Tensor, held: int) -> None:
    """Write the first `tokens` of the `held` tokens of a buffer into the columns from `start`."""
    columns = state.columns(start, start + tokens)
    whole = [_Shape((len(part), held, part.shape[2]), part.dtype) for part in columns]
    skipped = len(buffer) - held * state.layout.bytes_per_token
    for part, source in zip(columns, _views(buffer[skipped:], whole), strict=True):
        part.copy_(source[:, :tokens])


def copy_memory(buffer: Tensor, memory: Sequence[Tensor]) -> None:
    """Write the recurrent memory that a snapshot's buffer holds into `memory`."""
    for target, source in zip(memory, _views(buffer, memory), strict=True):
        target.copy_(source)


class _Shape:
    """The shape and type of a tensor that does not exist."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = torch.Size(shape), dtype


def _views(buffer: Tensor, parts: Sequence[Tensor | _Shape]) -> list[Tensor]:
    """Return views of a buffer, one after the other, in the shapes and types of `parts`."""
    found, at = [], 0
    for part in parts:
        end = at + part.shape.numel() * part.dtype.itemsize
        found.append(buffer[at:end].view(part.dtype).view(part.shape))
        at = end
    return found
