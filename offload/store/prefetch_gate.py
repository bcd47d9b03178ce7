"""Decide whether prefetching pays: at all, for each prefetch, and for the cost of predicting.

Does not know experts, predictions or how a pass is timed.

`Throttle` bounds the total gain. A correct prefetch saves at most the wait for its read, so all
prefetches together save at most the share of decode time spent waiting. If that share is small,
prefetches are not worth their bytes, even with good predictions. The share is computed from
decayed sums, so short noise neither starts nor stops prefetching.

`Judge` weighs each prefetch. With probability p it is used. Then its layer has one miss less to
wait for: this saves the wait of a miss, or the part of it that fits before the layer, minus the
latency of one more call. (On a drive that other programs keep busy, a piece waits about as long as
a whole expert.) Otherwise it is wasted. Then demand reads that come meanwhile wait, each for half a
piece, because the queue does not interrupt a piece. Its victim may also have to be read again:

    p · (min(miss, layers until its own · layer) - call)  >  (1 - p) · (delay + regret · miss)
    miss = slope of a layer's wait over its misses, at most the mean wait
    call = (pieces · piece - read) / (pieces - 1)
    delay = piece / 2 · min(pieces of the read, layers that it lasts)

The misses of a layer are read concurrently, so one miss less may save much less than the mean wait.

p is the policy's estimate times the share of such estimates that came true. regret is the share of
victims that were missed in the same pass or the next. Each pass moves both shares a little towards
their initial values, so prefetches that were rejected are tried again later.

`Trial` weighs the cost of computing hints and prefetches. Prefetches that were used saved time, the
others cost time. If several passes together saved less than twice the time that computing hints and
prefetches took, neither is computed for a while. Later some passes try again.
"""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from dataclasses import dataclass
from statistics import median

from moeinf.offload.policy.base import Prefetch

_MEMORY = 0.95  # decay per token: some 20 tokens count
_OUTCOMES = 0.99  # decay per outcome: some 100 count
_FADE = 0.995  # per pass: some 200 passes without an outcome forget the earlier ones
_PRIOR = 8.0  # claims that came true, before the first outcome
_REGRET = 0.1  # before the first victim
_PIECES = 4.0  # pieces as fast as their part of a read, before the first is measured
_TRIAL = 8  # passes that are judged together
_MARGIN = 2.0  # of the time saved over the time spent: the readers also use the processor
_PAUSE, _LONGEST = 64, 1024  # passes until the next trial: at first, and after many failures


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


class Trial:
    """Open while prefetches save twice the time that computing them takes; open at first.

    A failed trial is followed by a pause, each twice as long as the last, until a trial succeeds.
    """

    def __init__(self) -> None:
        self._saved, self._spent = list[float](), list[float]()
        self._pause, self._left = _PAUSE, 0

    @property
    def open(self) -> bool:
        return not self._left

    def passed(self, saved: float, spent: float) -> None:
        """Add a decode pass that saved and spent these seconds; the median counts as spent.

        So a few passes that lost the processor end no trial. Both are ignored during a pause.
        """
        if self._left:
            self._left -= 1
            return
        self._saved.append(saved)
        self._spent.append(spent)
        if len(self._spent) < _TRIAL:
            return
        if sum(self._saved) < _MARGIN * len(self._spent) * median(self._spent):
            self._left, self._pause = self._pause, min(2 * self._pause, _LONGEST)
        else:
            self._pause = _PAUSE
        self._saved.clear()
        self._spent.clear()


class Gate:
    """Open while prefetches can pay, by `Throttle` and, if it `tries`, by `Trial`."""

    def __init__(self, share: float, tries: bool) -> None:
        self._throttle, self._trial = Throttle(share), Trial() if tries else None
        self._began: float | None = None  # None: nothing is being computed
        self._spent = self._saved = 0.0

    @property
    def open(self) -> bool:
        return self._throttle.open and (self._trial is None or self._trial.open)

    def asks(self) -> None:
        """Count the time from now until `answered` as spent on hints and prefetches."""
        self._began = time.perf_counter()

    def answered(self) -> None:
        if self._began is not None:
            self._spent += time.perf_counter() - self._began
        self._began = None

    def passed(self, waited: float, seconds: float, saved: float) -> None:
        """Add a decode pass. saved: by all prefetches so far, see Judge."""
        if self._trial is not None and self._throttle.open:
            self._trial.passed(saved - self._saved, self._spent)
        self._throttle.passed(waited, seconds)
        self._saved, self._spent = saved, 0.0


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


@dataclass(frozen=True, slots=True)
class _Claim:
    """The claim of a prefetch that was judged worth it, and the seconds that it saves or costs."""

    probability: float
    saves: float
    costs: float


class Judge:
    """Weighs the prefetches of a model of L layers with E experts. times: None: all are worth it.

    A replay sets `times`, the engine measures them. saved: seconds that prefetches have saved,
    minus those that they have cost.
    """

    def __init__(self, layers: int, experts: int, times: Times | None = None) -> None:
        self._layers, self._experts = layers, experts
        self.times = times
        self._came, self._regret = _Share(1.0), _Share(_REGRET)
        self._claims: dict[int, _Claim] = {}  # by cell
        self.saved = 0.0
        self._victims: tuple[set[int], set[int]] = set(), set()  # of the last pass, of this one
        # decayed: layers, whole reads, pieces, each with its seconds
        self._measured = [0.0] * 6
        self._waits = [0.0] * 5  # decayed: layers, misses, their squares, waits, misses times wait
        self._miss: float | None = None  # seconds that a layer waits for one; None: a read's
        self._calls = Calls()

    def starts(self, calls: Calls) -> None:
        """Ignore the calls so far: those of a prompt run concurrently, and take longer."""
        self._calls = calls

    def layer(self, misses: int, waited: float) -> None:
        """Add a layer of a decode pass that has waited these seconds for its misses."""
        added = (1.0, misses, misses * misses, waited, misses * waited)
        self._waits = [a + b for a, b in zip(self._waits, added, strict=True)]

    def measured(self, computing: float, calls: Calls, pieces: float) -> None:
        """Add a decode pass: its seconds without waits, and all calls of the queue.

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
        self._miss = _miss(*self._waits)
        self._waits = [a * _MEMORY for a in self._waits]
        if whole:
            read = reading / whole
            piece = (piecing + _PIECES * read / pieces) / (parts + _PIECES)
            self.times = Times(read, piece, computing / layers, pieces)

    def worth(
        self, prefetches: Sequence[Prefetch], layer: int, begun: Container[int] = ()
    ) -> list[Prefetch]:
        """Return those that are worth reading after `layer` has been routed, in the same order.

        begun: cells whose reads have begun; they are always worth finishing.
        """
        return [p for p in prefetches if p.cell in begun or self._is_worth(p, layer)]

    def judged(self, cell: int, used: bool) -> None:
        """Report whether a prefetched cell was used."""
        claim = self._claims.pop(cell, None)
        if claim is not None:
            self._came.add(used, claim.probability)
            self.saved += claim.saves if used else -claim.costs

    def displaced(self, victim: int) -> None:
        """Report the victim of a prefetch."""
        self._victims[1].add(victim)

    def restored(self, victim: int) -> None:
        """Report that the prefetch has not begun, so its victim is resident again."""
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

    def _is_worth(self, prefetch: Prefetch, layer: int) -> bool:
        times = self.times
        if times is None:
            return True
        ahead = (prefetch.cell // self._experts - layer) % self._layers or self._layers
        right = prefetch.probability * self._came.value
        miss = times.read if self._miss is None else min(self._miss, times.read)
        delay = times.read / 2 * min(1.0, times.piece / times.layer)
        saves = min(miss, ahead * times.layer) - times.call
        wrong = delay + self._regret.value * miss
        if right * saves <= (1 - right) * wrong:
            return False
        self._claims[prefetch.cell] = _Claim(prefetch.probability, saves, wrong)
        return True


def _miss(layers: float, misses: float, squares: float, waits: float, both: float) -> float | None:
    """Return the slope of waits over misses, from 0 to the mean wait; None without misses."""
    if not misses:
        return None
    mean, spread = waits / misses, squares - misses * misses / layers
    return max(0.0, min(mean, (both - misses * waits / layers) / spread)) if spread > 0 else mean
