"""Decide if prefetching can pay: of all wishes together, and of each one, both by time.

Does not know experts, predictions or how a pass is timed.

`Throttle` bounds the sum. A correct prefetch saves at most the wait for its read. So all prefetches
together save at most the share of decode time spent waiting. If the share is small, they are not
worth their bytes, even with good predictions. The share is computed from decayed sums, so that
short noise neither starts nor ends prefetching.

`Judge` weighs each wish. If it is right, with probability p, its layer waits less: by the whole
read, or by what fits before the layer, less the latency of one more call. (Where other programs
keep a drive busy, a piece waits about as long as a whole expert.) If it is wrong, the demands that
come meanwhile wait, each for half a piece, which the queue does not interrupt. And its victim may
have to be read again:

    p · (min(read, layers until its own · layer) - call)  >  (1 - p) · (delay + regret · read)
    call = (pieces · piece - read) / (pieces - 1)
    delay = piece / 2 · min(pieces of the read, layers that it lasts)

p is the policy's claim times the share of such claims that came true. regret is the share of
victims that were missed in the same pass or the next. Each pass moves both shares a little back to
where they began, so that wishes that were turned down are tried again later.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from moeinf.offload.policy.base import Wish

_MEMORY = 0.95  # decay per token: some 20 tokens count
_OUTCOMES = 0.99  # decay per outcome: some 100 count
_FADE = 0.995  # per pass: some 200 passes without an outcome forget the earlier ones
_PRIOR = 8.0  # claims that came true, before the first outcome
_REGRET = 0.1  # before the first victim
_PIECES = 4.0  # pieces as fast as their part of a read, before the first is measured


class Throttle:
    """Open while waiting takes at least `share` of decode time; open before the first pass."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._waited = self._seconds = 0.0

    @property
    def open(self) -> bool:
        return self._waited >= self._share * self._seconds

    def passed(self, waited: float, seconds: float) -> None:
        """Add a decode pass of `seconds`, of which `waited` were without work to compute."""
        self._waited = self._waited * _MEMORY + waited
        self._seconds = self._seconds * _MEMORY + seconds


@dataclass(frozen=True)
class Times:
    """Seconds of calls that read an expert, or a piece of it, and of a layer without waits.

    pieces: of an expert, at least 1.
    """

    read: float
    piece: float
    layer: float
    pieces: float = 1.0

    @property
    def call(self) -> float:
        """The latency of a call, which every further piece costs."""
        more = self.pieces * self.piece - self.read
        return max(0.0, more / (self.pieces - 1)) if self.pieces > 1 else 0.0


@dataclass(frozen=True)
class Calls:
    """Counts and seconds of the calls that read whole experts, and pieces of them."""

    whole: int = 0
    whole_seconds: float = 0.0
    pieces: int = 0
    piece_seconds: float = 0.0


class _Share:
    """A decayed share of outcomes that were true, which begins at `start`."""

    def __init__(self, start: float) -> None:
        self._start = start * _PRIOR
        self._true, self._all = self._start, _PRIOR

    @property
    def value(self) -> float:
        return min(1.0, self._true / self._all)

    def add(self, true: bool, weight: float = 1.0) -> None:
        self._true = self._true * _OUTCOMES + true
        self._all = self._all * _OUTCOMES + weight

    def fade(self) -> None:
        self._true += (1 - _FADE) * (self._start - self._true)
        self._all += (1 - _FADE) * (_PRIOR - self._all)


class Judge:
    """Weighs the wishes of a model of L layers with E experts. times: None: all are worth it.

    A replay sets `times`, the engine measures them.
    """

    def __init__(self, layers: int, experts: int, times: Times | None = None) -> None:
        self._layers, self._experts = layers, experts
        self.times = times
        self._came, self._regret = _Share(1.0), _Share(_REGRET)
        self._claims: dict[int, float] = {}  # by cell, of wishes found worth it
        self._victims: tuple[set[int], set[int]] = set(), set()  # of the last pass, of this one
        self._measured = [0.0] * 6  # decayed: layers, whole reads, pieces; each with its seconds
        self._calls = Calls()

    def measured(self, computing: float, calls: Calls, pieces: float) -> None:
        """Add a decode pass: its seconds without waits, and the calls since the queue opened.

        pieces: number of pieces of an expert, at least 1. Without new pieces, the time of one moves
        back to its part of a read, so that a drive that was busy is tried again.
        """
        before, self._calls = self._calls, calls
        new = (
            self._layers,
            computing,
            calls.whole - before.whole,
            calls.whole_seconds - before.whole_seconds,
            calls.pieces - before.pieces,
            calls.piece_seconds - before.piece_seconds,
        )
        self._measured = [a * _MEMORY + b for a, b in zip(self._measured, new, strict=True)]
        layers, computing, whole, reading, parts, piecing = self._measured
        if whole:
            read = reading / whole
            piece = (piecing + _PIECES * read / pieces) / (parts + _PIECES)
            self.times = Times(read, piece, computing / layers, pieces)

    def worth(self, wishes: Sequence[Wish], layer: int, begun: Container[int] = ()) -> list[Wish]:
        """Return those that are worth reading once `layer` has been routed, in their order.

        begun: cells whose reads have begun, which stay worth it.
        """
        return [wish for wish in wishes if wish.cell in begun or self._is_worth(wish, layer)]

    def judged(self, cell: int, used: bool) -> None:
        """Report the outcome of a read that was found worth it."""
        claim = self._claims.pop(cell, None)
        if claim is not None:
            self._came.add(used, claim)

    def displaced(self, victim: int) -> None:
        """Report the victim of a read ahead."""
        self._victims[1].add(victim)

    def restored(self, victim: int) -> None:
        """Report that the read ahead has not begun, so that its victim is back."""
        self._victims[1].discard(victim)

    def missed(self, cell: int) -> None:
        """Report that a layer misses the cell."""
        for victims in self._victims:
            if cell in victims:
                victims.remove(cell)
                self._regret.add(True)

    def begin_pass(self) -> None:
        for _ in self._victims[0]:
            self._regret.add(False)
        self._victims = self._victims[1], set()
        self._came.fade()
        self._regret.fade()

    def _is_worth(self, wish: Wish, layer: int) -> bool:
        times = self.times
        if times is None:
            return True
        ahead = (wish.cell // self._experts - layer) % self._layers or self._layers
        right = wish.probability * self._came.value
        delay = times.read / 2 * min(1.0, times.piece / times.layer)
        wrong = delay + self._regret.value * times.read
        gain = min(times.read, ahead * times.layer) - times.call
        if right * gain <= (1 - right) * wrong:
            return False
        self._claims[wish.cell] = wish.probability
        return True
