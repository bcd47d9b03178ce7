"""The generate loop: prefill, then one token at a time, as text.

Does not know families, caches, conversations or faces.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moeinf.models.base import State
from moeinf.offload.store.expert_store import Stopped
from moeinf.offload.store.stats import StoreStats
from moeinf.runtime.checkpoints.finite import check_logits
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.requests import Limits as Limits
from moeinf.runtime.sampling.grammar import Constraint
from moeinf.runtime.sampling.sampler import Sampler
from moeinf.runtime.text.reasoning import overlap

FinishReason = Literal["stop", "length", "interrupted"]


class Answer:
    """What has been chosen so far: logits in, text out, until it is `done`.

    prompt: every token before the answer; room: tokens that the state has left for it.
    """

    def __init__(
        self, engine: Engine, prompt: Sequence[int], sampler: Sampler, limits: Limits, room: int
    ) -> None:
        self._ends = engine.info.ends
        self._sampler = sampler
        self._stream = engine.tokenizer.stream(list(prompt))
        self._text = _StopFinder(limits.stop)
        self._most = room if limits.max_tokens is None else min(room, limits.max_tokens)
        self.history = list(prompt)  # and every token chosen
        self.tokens: list[int] = []
        self.finish_reason: FinishReason = "length"
        self.done = self._most <= 0

    def take(self, logits: NDArray[np.float32]) -> str:
        """Chooses the next token from logits [vocab]; the text that is certain now."""
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

    def rest(self) -> str:
        """What was held back, when nothing more comes."""
        return self._text.add(self._stream.rest()) + self._text.rest()


class Generation:
    """One answer: iterate for its text; afterwards (or after leaving early) read what it took.

    The state must hold exactly `reused` tokens of the prompt; afterwards it holds `cached`.
    """

    def __init__(
        self,
        engine: Engine,
        state: State,
        prompt: Sequence[int],
        sampler: Sampler,
        limits: Limits,
        stopped: Callable[[], bool] = lambda: False,
        ended: Callable[[Generation], None] = lambda _: None,
        source: Sequence[int] = (),
        constraint: Constraint | None = None,
    ) -> None:
        """source: what an encoder-decoder reads first; its prompt is what the answer starts with.

        Then what the state held before is forgotten.
        """
        self._ended = ended  # called once, however the iteration ends
        self._engine = engine
        self._state = state
        self._answer = Answer(engine, prompt, sampler, limits, state.capacity - len(prompt))
        self._stopped = stopped
        self._constraint = constraint
        self._source = source
        self._reused = 0 if source else state.length
        self.request = -1  # its number with the engine, while and after it is iterated
        self.prompt_tokens = len(source) or len(prompt)
        self.text = ""
        self.finish_reason: FinishReason = "length"
        self.failed = False  # by an error: the text is no answer
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0
        self.store = StoreStats()

    @property
    def tokens(self) -> list[int]:
        """The tokens of the answer, one that ended it included."""
        return self._answer.tokens

    @property
    def cached(self) -> list[int]:
        """The tokens that the state holds."""
        return self._answer.history[: self._state.length]

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens that had to be computed; the others were in the KV cache."""
        return self.prompt_tokens - self._reused

    @property
    def decode_steps(self) -> int:
        """Passes of one token: the first token comes out of prefill."""
        return max(0, len(self.tokens) - 1)

    def __iter__(self) -> Iterator[str]:
        before = self._engine.store.stats.copy()
        self.request = self._engine.begin_request(self._state)
        try:
            with self._engine.stoppable(self._stopped):
                for piece in self._pieces():
                    self.text += piece
                    yield piece
            self.finish_reason = self._answer.finish_reason
        except Stopped:
            self.finish_reason = "interrupted"
            rest = self._answer.rest()
            self.text += rest
            yield rest
        except Exception:
            self.failed = True
            raise
        finally:
            self.store = self._engine.store.stats.since(before)
            if self._constraint is not None:
                self._constraint.close()
            self._engine.end_request(self.request, counts=self.prefill_seconds > 0)
            self._ended(self)

    def _pieces(self) -> Iterator[str]:
        engine, state, answer = self._engine, self._state, self._answer
        start = time.perf_counter()
        if self._source:
            engine.encode(state, self._source)
        logits = engine.extend(state, answer.history[state.length :])
        self.prefill_seconds = time.perf_counter() - start
        start = time.perf_counter()
        while not answer.done:
            check_logits(logits)
            bound = self._constraint
            piece = answer.take(logits if bound is None else bound.mask(logits))
            if bound is not None:
                bound.took(answer.tokens[-1])
            self.decode_seconds = time.perf_counter() - start
            if piece:
                yield piece
            if not answer.done:
                logits = engine.extend(state, answer.tokens[-1:])


class _StopFinder:
    """Holds back what could be the beginning of a stop text, across any token borders."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """What may be shown now."""
        held = self._held + text
        places = [place for stop in self._stops if (place := held.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            return held[: min(places)]
        keep = max((overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def rest(self) -> str:
        """What was held back for nothing."""
        held, self._held = self._held, ""
        return held
