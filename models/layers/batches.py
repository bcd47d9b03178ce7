"""Check a batch of token ids before a pass changes anything."""

from __future__ import annotations

from collections.abc import Sequence

from moeinf.models.base import ContextFull, State
from moeinf.models.layers.kv_cache import CacheLayout, KvCache, Span


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
