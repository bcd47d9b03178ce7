"""The race itself: two workers in alternation, and the speed of memory measured between them.

Only ratios taken within one round are kept as results: the machine may be twice as fast a minute
later.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from benchmarks.worker import Worker

Result = dict[str, Any]
Ceiling = Callable[[], float]  # bytes per second of memory, right now
T = TypeVar("T")


@dataclass(frozen=True)
class Rounds:
    """The number of rounds and tokens to measure."""

    prompt: int = 512  # tokens of prefill
    prefills: int = 2
    decodes: int = 6  # rounds
    slice: int = 16  # tokens decoded per round and side
    seed: int = 0

    @property
    def context(self) -> int:
        """The tokens that a worker needs room for."""
        return self.prompt + (self.decodes + 1) * self.slice + 8


class Tokens:
    """Random tokens, the same for both sides, so that routing does not repeat itself."""

    def __init__(self, vocab: int, seed: int) -> None:
        self._random, self._vocab = random.Random(seed), vocab

    def draw(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocab) for _ in range(count)]


def race_prefill(ours: Worker, peer: Worker, tokens: Tokens, rounds: Rounds) -> Result:
    """Race the prefill of the same prompts, alternating; the first pair is the warm-up."""
    seconds: list[tuple[float, float]] = []
    for number in range(rounds.prefills + 1):
        prompt = tokens.draw(rounds.prompt)
        for side in (ours, peer):
            side.ask("reset")
        pair = _alternate(number, partial(_prefill, ours, prompt), partial(_prefill, peer, prompt))
        seconds.append(pair)
    return _compare(seconds[1:])


def race_decode(
    ours: Worker, peer: Worker, tokens: Tokens, rounds: Rounds, ceiling: Ceiling
) -> Result:
    """Race slices of decoding, alternating, after a prefill of the same length; add the floor."""
    prompt = tokens.draw(rounds.prompt)
    for side in (ours, peer):
        side.ask("reset")
        side.ask("prefill", prompt)
    pairs: list[tuple[float, float]] = []
    floors: list[float] = []
    every: list[float] = []
    for number in range(rounds.decodes + 1):
        ids = tokens.draw(rounds.slice)
        before = ceiling()
        sliced = _alternate(number, partial(_decode, ours, ids), partial(_decode, peer, ids))
        speed = max(before, ceiling())
        if number == 0:
            continue  # warm-up
        needed = ours.ask("about")["token_bytes"]
        pairs.append((statistics.median(sliced[0]), statistics.median(sliced[1])))
        floors.append(needed / speed)
        every += sliced[0]
    result = _compare(pairs)
    over_floor = [mine / floor for (mine, _), floor in zip(pairs, floors, strict=True)]
    result["floor_ms"] = _ms(statistics.median(floors))
    result["ours_over_floor"] = _spread(over_floor)
    result["read_bytes_per_s"] = [round(needed / floor) for floor in floors]
    result["token_bytes"] = needed
    result["ours_p95_ms"] = _ms(statistics.quantiles(every, n=20)[-1])
    return result


def _alternate(number: int, ours: Callable[[], T], peer: Callable[[], T]) -> tuple[T, T]:
    """Return (ours, peer); the order of the two calls changes from round to round."""
    if number % 2:
        theirs = peer()
        return ours(), theirs
    return ours(), peer()


def _prefill(side: Worker, prompt: list[int]) -> float:
    return float(side.ask("prefill", prompt)["seconds"])


def _decode(side: Worker, ids: list[int]) -> list[float]:
    seconds: list[float] = side.ask("decode", ids)["seconds"]
    return seconds


def _compare(pairs: list[tuple[float, float]]) -> Result:
    """Return the times of both, and the peer's time over ours, round by round."""
    return {
        "ours_ms": [_ms(mine) for mine, _ in pairs],
        "peer_ms": [_ms(theirs) for _, theirs in pairs],
        "times_as_fast": _spread([theirs / mine for mine, theirs in pairs]),
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "least": round(min(values), 3),
        "most": round(max(values), 3),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def alone(ours: Worker, tokens: Tokens, rounds: Rounds, ceiling: Ceiling) -> Result:
    """Measure ours without a peer: prefill, decode and the floor."""
    prefills, pairs = [], []
    for _ in range(rounds.prefills + 1):
        ours.ask("reset")
        prefills.append(_prefill(ours, tokens.draw(rounds.prompt)))
    for _ in range(rounds.decodes + 1):
        speed = ceiling()
        took = statistics.median(_decode(ours, tokens.draw(rounds.slice)))
        pairs.append((took, ours.ask("about")["token_bytes"] / speed))
    return {
        "prefill_ms": [_ms(seconds) for seconds in prefills[1:]],
        "ours_ms": [_ms(took) for took, _ in pairs[1:]],
        "floor_ms": _ms(statistics.median(floor for _, floor in pairs[1:])),
        "ours_over_floor": _spread([took / floor for took, floor in pairs[1:]]),
    }
