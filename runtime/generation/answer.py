"""Turn logits into an answer: tokens, text, and the reason of its end."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.requests import Limits
from moeinf.runtime.sampling.sampler import Sampler
from moeinf.runtime.text.reasoning import overlap


class Answer:
    """Take the logits of each token and give text, until it is `done`.

    prompt: every token before the answer; room: tokens that the state has left for it.
    """

    def __init__(
        self, engine: Engine, prompt: Sequence[int], sampler: Sampler, limits: Limits, room: int
    ) -> None:
        self._ends = engine.info.ends
        self._sampler = sampler
        self._stream = engine.tokenizer.stream(list(prompt))
        self._text = StopFinder(limits.stop)
        most = limits.max_tokens
        self._most = room if most is None or most < 0 else min(room, most)
        self.history = list(prompt)  # and every token chosen
        self.tokens: list[int] = []
        self.finish_reason: Literal["stop", "length"] = "length"
        self.done = self._most <= 0

    def take(self, logits: NDArray[np.float32]) -> str:
        """Choose the next token from logits [vocab]; return the text that is certain now."""
        token = self._sampler.choose(logits, self.history)
        self.history.append(token)
        self.tokens.append(token)
        if token in self._ends:
            self.finish_reason, self.done = "stop", True
            return self.rest()
        piece = self._text.add(self._stream.add(token))
        if self._text.found:
            self.finish_reason, self.done = "stop", True
            return piece
        if len(self.tokens) >= self._most:
            self.done = True
            return piece + self.rest()
        return piece

    @property
    def stop_text(self) -> str:
        """The stop text that ended the answer, if one did."""
        return self._text.found

    @property
    def left(self) -> int:
        """The number of tokens that may still come."""
        return self._most - len(self.tokens)

    def rest(self) -> str:
        """Return the text that was held back, once the answer has ended."""
        return self._text.add(self._stream.rest()) + self._text.rest()


class StopFinder:
    """Holds back what could be the beginning of a stop text, across any token borders."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found = ""  # the stop text that ended the answer

    def add(self, text: str) -> str:
        """Return the text that may be shown now."""
        held = self._held + text
        places = [(place, stop) for stop in self._stops if (place := held.find(stop)) >= 0]
        if places:
            first, self.found = min(places, key=itemgetter(0))
            self._held = ""
            return held[:first]
        keep = max((overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def rest(self) -> str:
        """Return the held-back text that began no stop text."""
        held, self._held = self._held, ""
        return held
