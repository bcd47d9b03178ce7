"""Draft the continuation of a text with a smaller model or the model's own MTP layers, greedily.

    the text so far ──▶ draft model ──▶ c (0.93) ──▶ d (0.71) ──▶ e (0.32): not worth a row

The draft model's probability of a token also shows how likely the main model accepts it.
`AcceptanceByProbability` learns that from the tokens that follow. A token is drafted while its
chance is worth the draft model's time and a row of the pass that checks it.

The draft model begins with the last tokens of a text. It reads the rest when its drafts have gained
as much time in this answer as that takes.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence

from moeinf.offload.store.expert_store import Stopped
from moeinf.offload.store.transfer import ExpertReadError
from moeinf.runtime.engine.draft_engine import Drafter
from moeinf.runtime.generation.drafts.draft_gate import DraftGate
from moeinf.runtime.generation.in_flight import Running, shared_tokens

_CLASSES = (0.0, 0.3, 0.5, 0.7, 0.85, 0.95)  # lowest probability of each class
_CHANCES, _WEIGHT = (0.2, 0.4, 0.6, 0.78, 0.9, 0.97), 4.0  # the same of each class; its weight
_MEMORY = 0.98  # decay per outcome
_FADE = 0.002  # per decoded token: the mean chance moves back to the first, to be tried again
_NEW = 0.2  # part of a new time
_AT_ONCE = 32  # last tokens of a text, which are read without a gain before
_FEW = 8  # rows that take about the time of one
_FASTER = 4  # a read token takes this part of a drafted one, before it is measured


class AcceptanceByProbability:
    """Shares of drafted tokens that were right, by the draft model's probability.

    usual: the mean chance before the first outcome.
    """

    def __init__(self, usual: float) -> None:
        self.mean = self._usual = usual
        self._right = [_WEIGHT * chance for chance in _CHANCES]
        self._all = [_WEIGHT] * len(_CLASSES)

    def add(self, probability: float, right: bool) -> None:
        """Count the outcome of a token that followed only right ones."""
        at = bisect_right(_CLASSES, probability) - 1
        self._right[at] = self._right[at] * _MEMORY + right
        self._all[at] = self._all[at] * _MEMORY + 1
        self.mean = self.mean * _MEMORY + right * (1 - _MEMORY)

    def chance(self, probability: float) -> float:
        """Return the chance that a drafted token is right if those before it are."""
        at = bisect_right(_CLASSES, probability) - 1
        return self._right[at] / self._all[at]

    def fade(self) -> None:
        """Move the mean a little to the first one."""
        self.mean += _FADE * (self._usual - self.mean)


class ModelDrafts:
    """The drafts of one engine's draft model, for one text at a time."""

    def __init__(self, engine: Drafter, gate: DraftGate) -> None:
        self._engine, self._gate = engine, gate
        self._held: list[int] = []  # the tokens of the engine's state
        self._seconds = self._read_seconds = 0.0  # of a drafted and of a read token; 0: unknown
        self._acceptance = AcceptanceByProbability(engine.usual_chance)
        self._given: tuple[int, int, list[int], list[float]] | None = None
        self._lost = False  # an expert could not be read

    def draft(self, one: Running, rows: int) -> tuple[list[int], float]:
        """Return tokens worth a place in the next pass, of at most `rows`, and their seconds."""
        history, gate = one.answer.history, self._gate
        self._judge(one.number, history)
        if self._lost:
            return [], 0.0
        self._acceptance.fade()
        text = self._engine.text(history)
        if not text:
            return [], 0.0
        del self._held[self._engine.state.length :]
        rows = min(rows, self._engine.state.capacity - len(text))
        each = self._seconds or self._engine.cost * gate.single
        chances = [self._acceptance.mean ** (place + 1) for place in range(rows - 1)]
        most = gate.worth(one.drafts, chances, each)
        if not most:
            return [], 0.0
        text = self._begin(one, text, each)
        floor = gate.row_cost(most + 1, each)
        try:
            self._read(one, text[:-1])
            start = time.perf_counter()
            tokens, probabilities = self._continue(text, most, floor)
        except Stopped:
            return [], 0.0
        except ExpertReadError:
            self._lost = True
            return [], 0.0
        spent = time.perf_counter() - start
        self._given = one.number, len(history), tokens, probabilities
        worth = gate.worth(one.drafts, self._chances(probabilities))
        if not worth:
            gate.lost(one.drafts, spent)
        return tokens[:worth], spent

    def _judge(self, number: int, history: Sequence[int]) -> None:
        """Compare the last draft with the tokens that followed."""
        if self._given is None:
            return
        (request, start, tokens, probabilities), self._given = self._given, None
        if request != number:
            return
        for token, drafted, sure in zip(history[start:], tokens, probabilities, strict=False):
            self._acceptance.add(sure, token == drafted)
            if token != drafted:
                break

    def _chances(self, probabilities: Sequence[float]) -> list[float]:
        """Return the chances that the first 1 … n drafted tokens are all right."""
        found, chance = list[float](), 1.0
        for probability in probabilities:
            chance *= self._acceptance.chance(probability)
            found.append(chance)
        return found

    def _begin(self, one: Running, text: Sequence[int], each: float) -> Sequence[int]:
        """Return the tokens of the text that the state is to hold: the last ones, or all.

        All are read once the gain of this request pays for it.
        """
        gate, begin = self._gate, self._engine.begin
        known = shared_tokens(self._held, text[begin:], 1)
        if not known:
            begin = 0
        unread = len(text) - begin - known
        if begin or unread > _AT_ONCE:
            more = unread if begin == 0 else len(text)
            reading = more * (self._read_seconds or each / _FASTER)
            if one.drafts.gained * gate.single > reading:
                begin = 0
            elif unread > _AT_ONCE:
                begin = len(text) - _AT_ONCE
        if begin != self._engine.begin:
            self._engine.begin = begin
            self._cut(0, [])
        return text[begin:]

    def _read(self, one: Running, text: Sequence[int]) -> None:
        """Bring the state to a text, if more is missing than a draft reads itself."""
        kept = shared_tokens(self._held, [*text, -1], 1)
        if len(text) - kept <= _AT_ONCE:
            return
        start = time.perf_counter()
        unread = self._cut(kept, text)
        self._extend(unread, one.request.stopped)
        spent = time.perf_counter() - start
        self._read_seconds = _mean(self._read_seconds, spent / len(unread))
        self._gate.lost(one.drafts, spent)

    def _continue(
        self, text: Sequence[int], most: int, floor: float
    ) -> tuple[list[int], list[float]]:
        """Draft up to `most` tokens, and none after one whose chance is below `floor`."""
        unread = self._cut(shared_tokens(self._held, text, 1), text)
        counted = len(unread) <= _FEW  # else the first draft is no measure
        start = time.perf_counter()
        token, probability = self._extend(unread)
        self._engine.state.mark()
        if not counted:
            start = time.perf_counter()
        tokens, probabilities = [token], [probability]
        while len(tokens) < most:
            if self._chances(probabilities)[-1] * self._acceptance.mean < floor:
                break
            token, probability = self._extend(tokens[-1:])
            tokens.append(token)
            probabilities.append(probability)
        if times := len(tokens) - (not counted):
            self._seconds = _mean(self._seconds, (time.perf_counter() - start) / times)
        return tokens, probabilities

    def _cut(self, kept: int, text: Sequence[int]) -> Sequence[int]:
        """Drop all but the first `kept` tokens, and maybe more; return those of `text` to read."""
        state = self._engine.state
        state.truncate(kept)
        del self._held[state.length :]
        return text[state.length :]

    def _extend(
        self, ids: Sequence[int], stopped: Callable[[], bool] = lambda: False
    ) -> tuple[int, float]:
        try:
            return self._engine.extend(ids, stopped)
        finally:
            self._held += ids[: self._engine.state.length - len(self._held)]


def _mean(before: float, seconds: float) -> float:
    """Return a decayed mean; the first time is taken as it is."""
    return before + _NEW * (seconds - before) if before else seconds
