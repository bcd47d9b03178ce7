"""Divide a window of a pass among the prompts that wait, and report its progress.

A window goes through one layer before the next, so its prompts read each absent expert once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from moeinf.runtime.config import PREFILL_CHUNK
from moeinf.runtime.generation.in_flight import Running

Share = tuple[Running, list[int]]  # a request, and the next tokens of its prompt


def window(running: Sequence[Running], most: int) -> list[Share]:
    """Return the next tokens of the prompts that wait, the oldest first; [] if none waits.

    most: the engine's window. It is one chunk while a request decodes, which waits meanwhile. An
    engine whose window is a chunk computes one prompt a pass, and so it does for embeddings and
    sources.
    """
    waiting = [one for one in running if not one.prefilled]
    if not waiting:
        return []
    alone = most == PREFILL_CHUNK or not _shares(waiting[0])
    size = PREFILL_CHUNK if alone or len(waiting) < len(running) else most
    group = waiting[:1] if alone else [one for one in waiting if _shares(one)]
    counts = divided([one.prompt_tokens - one.place.state.length for one in group], size)
    shares = [(one, one.next_tokens(n)) for one, n in zip(group, counts, strict=True) if n]
    if all(len(ids) == 1 for _, ids in shares):
        return shares[:1]  # the model would take them for a decode pass, whose rows may interact
    return shares


def divided(rests: Sequence[int], room: int) -> list[int]:
    """Divide `room` tokens among prompts that still need `rests`; the first is the oldest.

    Each gets a chunk while there is room, so that a short prompt does not wait for a long one. Then
    the oldest get more. A part is whole chunks, or ends its prompt: it is computed in the same
    chunks as alone.
    """
    parts = [0] * len(rests)
    for most in (PREFILL_CHUNK, room):
        for number, rest in enumerate(rests):
            more = min(rest - parts[number], most)
            if more > room:
                more = room // PREFILL_CHUNK * PREFILL_CHUNK
            parts[number] += more
            room -= more
    return parts


def telling(shares: Sequence[Share], layers: int) -> Callable[[], bool]:
    """Return a function that is asked at each layer: True once all requests have stopped.

    It reports the progress of a long window.
    """
    starts = [one.place.state.length for one, _ in shares]
    long = sum(len(ids) for _, ids in shares) > PREFILL_CHUNK
    done = itertools.count()

    def stopped() -> bool:
        share = min(next(done), layers) / layers
        for start, (one, ids) in zip(starts, shares, strict=True):
            if long:
                one.request.reading(start + int(share * len(ids)), one.prompt_tokens)
        return all(one.request.stopped() for one, _ in shares)

    return stopped


def _shares(one: Running) -> bool:
    return not (one.request.embed or one.request.source)
