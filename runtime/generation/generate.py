"""Run one answer of a scheduler in the calling thread: its text as it comes, and its figures."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal

from moeinf.offload.store.stats import StoreStats
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.events import Ended, Event, Failed, Piece, Request
from moeinf.runtime.generation.scheduler import Scheduler

FinishReason = Literal["stop", "length", "interrupted"]


class Generation:
    """One answer: iterate for its text; afterwards (or after leaving early) read its figures."""

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        request: Request,
        ended: Callable[[Generation], None] = lambda _: None,
    ) -> None:
        """Set up the answer. ended: called once, however the iteration ends."""
        self._engine = engine
        self._scheduler = scheduler
        self._request = request
        self._settle = ended
        self._events: deque[Event] = deque()
        self._ended = Ended("length")
        self.text = ""
        self.failed = False  # by an error: the text is not an answer
        self.store = StoreStats()

    @property
    def tokens(self) -> list[int]:
        """The tokens of the answer, including one that ended it."""
        return list(self._ended.token_ids)

    @property
    def finish_reason(self) -> FinishReason:
        return "interrupted" if self._ended.reason == "cancelled" else self._ended.reason

    @property
    def prompt_tokens(self) -> int:
        return self._ended.prompt_tokens

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens that had to be computed; the others were in the KV cache."""
        return self._ended.prompt_tokens - self._ended.cached_tokens

    @property
    def prefill_seconds(self) -> float:
        return self._ended.prefill_seconds

    @property
    def decode_seconds(self) -> float:
        return self._ended.decode_seconds

    @property
    def decode_steps(self) -> int:
        """Tokens after the first, which prefill gives."""
        return max(0, self._ended.tokens - 1)

    @property
    def drafts(self) -> tuple[int, int]:
        """The number of tokens that were drafted, and how many of them were right."""
        return self._ended.drafted, self._ended.accepted

    @property
    def request(self) -> int:
        """The request's number with the engine; -1: it has not begun."""
        return self._ended.request

    @property
    def counted(self) -> bool:
        """True if all of its prompt was read."""
        return self._ended.counted

    def __iter__(self) -> Iterator[str]:
        before = self._engine.store.stats.copy()
        self._request.emit = self._events.append
        try:
            yield from self._pieces()
        except Exception:
            self.failed = True
            raise
        finally:
            self._scheduler.cancel(self._request)  # left early
            for event in self._events:
                self._hear(event)
            self.store = self._engine.store.stats.since(before)
            self._settle(self)

    def _pieces(self) -> Iterator[str]:
        scheduler = self._scheduler
        if not scheduler.admits(self._request):
            raise RuntimeError("another answer of this conversation has not ended")
        scheduler.begin(self._request)
        while True:
            while self._events:
                event = self._events.popleft()
                piece = self._hear(event)
                if piece:
                    yield piece
                if isinstance(event, Failed):
                    try:
                        raise event.error
                    finally:
                        del event  # else the error's traceback would hold the error
                if isinstance(event, Ended):
                    return
            scheduler.place()
            scheduler.round()

    def _hear(self, event: Event) -> str:
        """Note the figures of an event; return its text."""
        if isinstance(event, Ended):
            self._ended = event
        if not isinstance(event, Piece):
            return ""
        self.text += event.text
        return event.text
