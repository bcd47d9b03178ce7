"""Build texts that repeat a format's own marks, and measure how a reader's time grows with them."""

from __future__ import annotations

import gc
import random
import re
import time
from collections.abc import Callable

MOST_GROWTH = 6.0  # of the time, for a text of four times the length
FLOOR_S = 0.1  # shorter times are not compared
_PIECE = re.compile(rb"[A-Za-z0-9_.-]{1,40}|\s{1,8}|[^\sA-Za-z0-9_.-]{1,8}")


class Grown(AssertionError):
    """The time of a reader grows faster than the length of its text."""


def seconds(work: Callable[[], object]) -> float:
    """Measure processor time of this process: other work on the machine does not count."""
    gc.disable()
    try:
        start = time.process_time()
        work()
        return time.process_time() - start
    finally:
        gc.enable()


def check_growth(make: Callable[[int], Callable[[], object]], most: int) -> None:
    """Check that work on a text of length `most` takes at most six times as long as on a quarter.

    make(n) prepares a text of length n and returns the function to measure. Raises Grown.
    """
    for _ in range(3):  # quadratic work fails each time
        whole = seconds(make(most))
        if whole <= FLOOR_S:
            return
        part = seconds(make(most // 4))
        if whole <= MOST_GROWTH * part + FLOOR_S:
            return
    raise Grown(f"{part:.3f} s for {most // 4}, {whole:.3f} s for {most}")


def repeating(seed: bytes, rng: random.Random) -> Callable[[int], bytes]:
    """Return a function of a length: the seed with one of its marks, or a few, repeated.

    The text behind the mark may be left out, so that nothing closes what was opened.
    """
    cuts = [0, *(found.end() for found in _PIECE.finditer(seed))]
    first = rng.randrange(max(1, len(cuts) - 1))
    last = min(len(cuts) - 1, first + rng.choice((1, 1, 2, 3, 5, 9)))
    before, unit = seed[: cuts[first]], seed[cuts[first] : cuts[last]] or b" "
    after = rng.choice((seed[cuts[last] :], b"", unit[:1]))
    before = rng.choice((before, before, b""))

    def grown(size: int) -> bytes:
        room = max(len(unit), size - len(before) - len(after))
        return before + unit * (room // len(unit)) + after

    return grown
