"""Check a batch of token ids before a pass changes anything, and describe its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moeinf.models.base import ContextFull, Phase, State
from moeinf.models.layers.kv_cache import CacheLayout, KvCache, Span, divided


def check_batch(
    batch: Sequence[tuple[Sequence[int], State]], layout: CacheLayout, vocab: int
) -> tuple[Span, ...]:
    """Return the spans of a batch; raise ValueError or ContextFull if it is invalid."""
    spans: list[Span] = []
    start = 0
    for ids, state in batch:
        if not isinstance(state, KvCache) or state.layout != layout:
            raise ValueError("the state was not made by this model")
        if any(state is span.cache for span in spans):
            raise ValueError("a state appears twice in one batch")
        check_ids(ids, state.length, state.capacity, vocab)
        spans.append(Span(state, slice(start, start + len(ids)), state.length))
        start += len(ids)
    if not spans:
        raise ValueError("an empty batch")
    return tuple(spans)


def check_ids(ids: Sequence[int], held: int, capacity: int, vocab: int) -> None:
    """Raise ValueError or ContextFull unless these ids can follow `held` tokens."""
    if not len(ids):
        raise ValueError("no tokens to extend a state with")
    if not (min(ids) >= 0 and max(ids) < vocab):
        raise ValueError(f"token ids must lie in 0 … {vocab - 1}")
    if held + len(ids) > capacity:
        raise ContextFull(
            f"{len(ids)} more tokens after {held} do not fit into a context of {capacity}"
        )


class RowsOfPass(NamedTuple):
    """The facts of the rows of a pass. piece, cuts: as in Model.extend, if they divide it."""

    positions: Tensor  # [T] int64, on the device of the weights
    owner: Tensor  # [T] int64: the request of each row
    phase: Phase
    piece: int | None
    cuts: list[slice]


def about_rows(spans: Sequence[Span], device: torch.device, piece: int | None) -> RowsOfPass:
    """Return what a pass over these spans is told; it decodes if each adds a token to a history."""
    places = [place for s in spans for place in range(s.past, s.past + s.count)]
    owner = [span.cache.request for span in spans for _ in range(span.count)]
    decoding = all(span.count == 1 and span.past > 0 for span in spans)
    if decoding or len(places) == 1:
        piece = None  # nothing to divide
    cuts = [] if piece is None else [at for at, _ in divided(spans, piece)]
    positions = torch.tensor(places, device=device)
    return RowsOfPass(
        positions, torch.tensor(owner), "decode" if decoding else "prefill", piece, cuts
    )
