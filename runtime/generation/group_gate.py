"""Decide whether the requests that decode share a pass, by measured time.

From memory a pass of n rows costs little more than one of one row, so all share it. Where passes
wait for the disk, each row may need experts of its own. They displace those of the others, and n
requests can be slower together than one after the other. So the oldest decodes alone there, for 256
tokens at a time, and prompts wait. A trial shows if all together take less time per token:

    64 tokens alone | 16 passes together | tokens of the faster way | 16 passes of the other | …

A trial that changes nothing has lost time. So many tokens follow that the loss is 1 % of them. The
results are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from moeinf.runtime.generation.in_flight import Running

_BOUND = 0.05  # share of time spent waiting above which the disk decides
_MEMORY = 0.9  # of that share, and of the time per token
_EVERY, _MOST_EVERY = 64, 4096  # tokens before a trial
_LOST = 0.01  # part of the tokens that trials may cost
_TRIAL, _SETTLE = 16, 4  # passes of a trial; in the first ones the cache still changes
_GAIN = 0.97  # of the time per token, which the other way must reach
_FAR, _SURE = 1.25, 4  # times the time, after so many counted passes, ends a trial
_TURN = 256  # tokens after which the next request decodes, and prompts may begin


class GroupGate:
    """The measured times of one scheduler."""

    def __init__(self) -> None:
        self.together = False  # the faster way while the disk decides
        self._waits = 0.0  # decayed share of the time
        self._seconds: dict[bool, float] = {}  # per token, by way
        self._trial: list[float] | None = None  # seconds per token of its passes
        self._left = _EVERY  # tokens

    @property
    def bound(self) -> bool:
        """True while the disk decides how long a pass takes."""
        return self._waits > _BOUND

    @property
    def alone(self) -> bool:
        """True if the next pass is to have one row."""
        return self.bound and self.together == (self._trial is not None)

    def group(self, deciding: Sequence[Running]) -> list[Running]:
        """Return the requests of the next pass, from those that have a token; oldest first."""
        if self.alone and deciding:
            return [min(deciding, key=_turns)]
        return list(deciding)

    def admitted(
        self, running: Sequence[Running], deciding: Sequence[Running]
    ) -> Sequence[Running]:
        """Return the requests whose prompts may be computed now, and all others that have one."""
        if not (self.alone and deciding) or min(map(_turns, deciding)) > 0:
            return running
        return [one for one in running if one.prefilled or one.request.embed]

    def passed(self, rows: int, requests: int, seconds: float, waited: float) -> None:
        """Count a pass of `rows` of the requests; waited: the part without work to compute."""
        share = waited / seconds if seconds else 0.0
        self._waits = self._waits * _MEMORY + share * (1 - _MEMORY)
        if requests < 2 or not self.bound:
            self._trial = None
            return
        way, each = rows > 1, seconds / rows
        if self._trial is not None and way != self.together:
            self._trial.append(each)
            self._judge(self._trial, rows)
            return
        known = self._seconds.get(way, each)
        self._seconds[way] = known * _MEMORY + each * (1 - _MEMORY)
        if way != self.together:
            return
        self._left -= rows
        if self._left <= 0:
            self._trial = []

    def _judge(self, seconds: Sequence[float], rows: int) -> None:
        """End the trial when it has all its passes, or is far slower.

        seconds: per token of its passes, of `rows` each.
        """
        counted, known = seconds[_SETTLE:], self._seconds[self.together]
        if len(counted) < _SURE:
            return
        mean = sum(counted) / len(counted)
        if mean <= _FAR * known and len(seconds) < _TRIAL:
            return
        self._trial, self._left = None, _EVERY
        if mean < _GAIN * known:
            self.together = not self.together
            self._seconds[self.together] = mean
        else:
            lost = rows * (sum(seconds) / known - len(seconds))  # tokens of the faster way
            self._left = min(max(_EVERY, round(lost / _LOST)), _MOST_EVERY)


def _turns(one: Running) -> int:
    return len(one.answer.tokens) // _TURN
