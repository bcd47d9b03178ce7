"""Answer requests with one engine: prefill, choose, decode, count and stop, for one or many.

    begin ──▶ prepared ──▶ a free place ──▶ prefill, by windows ──▶ decode, all at once ──▶ end
              (prompt,     (KV cache)       the oldest first
              grammar)

A round is one window of prefill, if prompts wait, and one decode pass of all that answer. So
shared experts are loaded once. Where passes wait for the disk, requests decode one after the other
if that is faster (group_gate.py). While a request decodes, a window is one chunk: it waits no
longer. Otherwise a window is several chunks, of all prompts that wait, and reads absent experts
once (windows.py). A request gets bit for bit the same result as alone, with any tag. Each chunk of
a window is computed alone. Rows of a decode pass do not depend on each other, except with the tag
f32, which is not batched: torch's products have other bits for other numbers of rows. (On a GPU
this is also true of torch's float32 products of the other tags.)

A grammar is compiled and matched in a process of its own. Nothing here waits for it longer than a
moment. A request whose grammar is slow is passed over, and fails when its grammar takes too long.

A request that is alone may decode several tokens in a pass (speculation.py), with the same result.

A place keeps its KV cache when its request has ended. The next request reuses the beginning that
its prompt shares with it, generated tokens included. A reproducible engine reuses only whole chunks
of prefill: the request's own prefill would have written the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moeinf.errors import Unavailable
from moeinf.offload.store.expert_store import Stopped
from moeinf.runtime.checkpoints.finite import check_logits
from moeinf.runtime.config import PREFILL_CHUNK
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.answer import Answer
from moeinf.runtime.generation.drafts.speculation import Speculation
from moeinf.runtime.generation.events import Ended, Failed, Piece, Request, Vector, in_blocks
from moeinf.runtime.generation.group_gate import GroupGate
from moeinf.runtime.generation.in_flight import (
    READ_FAILED,
    Place,
    Prepared,
    Running,
    direction,
    reusing,
    token_info,
)
from moeinf.runtime.generation.prompts import check_length
from moeinf.runtime.generation.windows import Share, telling, window
from moeinf.runtime.sampling.sampler import Sampler
from moeinf.runtime.text.panic import as_exception

_MOST_COMPILING = 2  # grammars at a time; requests without one overtake the waiting ones
_PATIENCE_S = 0.002  # for a mask, which is computed during the pass before


class Scheduler:
    """Requests in, events out. Only `requests`, `closing` and the counters are thread-safe."""

    def __init__(
        self,
        engine: Engine,
        places: int = 1,
        ended: Callable[[Ended | None], None] = lambda _: None,
    ) -> None:
        """Allocate the places. Raises OutOfMemory.

        ended: called when a request has left its place, with its last event; None if it failed.
        """
        self._engine = engine
        self._ended = ended
        self._places = [Place(engine.new_state()) for _ in range(places)]
        self._free = list(self._places)
        self._prepared: list[Prepared] = []
        self._running: list[Running] = []
        self.closing: Exception | None = None  # the error for requests that were stopped, if set
        self.lost: Exception | None = None  # the error after which the engine is unusable
        self.speculation, self._groups = Speculation(engine), GroupGate()
        self.tokens = 0  # decoded
        self.prompt_tokens = self.reused_tokens = 0

    @property
    def requests(self) -> list[Request]:
        """The requests that have begun and have not ended."""
        return [one.request for one in self._prepared] + [one.request for one in self._running]

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def cached_tokens(self) -> int:
        """The number of tokens that all KV caches hold."""
        return sum(place.state.length for place in self._places)

    def admits(self, request: Request) -> bool:
        """Return whether the request may begin: a place is free, few grammars are compiling."""
        full = len(self._prepared) >= _MOST_COMPILING and request.constrain is not None
        return bool(self._free) and not full

    def begin(self, request: Request) -> None:
        """Make the prompt, begin to compile the grammar, and take a place if nothing must wait.

        The request receives any error.
        """
        try:
            prompt = request.prepare(self._engine)
            check_length(prompt, request.limits.context_in(self._engine.info.context))
            constrain = request.constrain
            constraint = None if constrain is None else constrain(self._engine, prompt)
            one = Prepared(request, prompt, constraint)
            self._prepared.append(one)
            self._place(one)
        except BaseException as error:
            request.emit(Failed(_told(error)))

    def place(self) -> None:
        """Give free places to the requests whose grammars are compiled."""
        for one in list(self._prepared):
            self._place(one, 0.0 if self._running else _PATIENCE_S)

    def round(self) -> None:
        """Run a window of prefill and a decode pass; choose a token from each new logits."""
        for one in list(self._running):
            if one.request.stopped():
                self._end(one, "cancelled")
        deciding = [one for one in self._running if one.answer.tokens and one.logits is None]
        if shares := window(self._groups.admitted(self._running, deciding), self._engine.window):
            self._prefill(shares)
        group = self._groups.group(deciding)
        if group and not (len(self._running) == 1 and self._checked(group[0])):
            self._decode(group, len(self._running))
        self._choose()

    def cancel(self, request: Request) -> None:
        """End a request now, if it has not ended."""
        for waiting in [one for one in self._prepared if one.request is request]:
            self._drop(waiting)
        for one in [one for one in self._running if one.request is request]:
            self._end(one, "cancelled")

    def fail_all(self, error: Exception) -> None:
        """End every request that has a place with an error."""
        for one in list(self._running):
            self._fail(one, error)

    def close(self) -> list[Request]:
        """Release states, grammars and the engine; return the requests that have not ended."""
        left = self.requests
        for waiting in self._prepared:
            waiting.close()
        for one in self._running:
            one.close()
        self._prepared, self._running = [], []
        self._free.clear()
        self._places.clear()
        self._ended = lambda _: None
        del self._engine, self.speculation
        return left

    def _place(self, one: Prepared, seconds: float = 0.0) -> None:
        """Give a place to a request whose grammar is compiled, if there is one."""
        try:
            if one.request.stopped():
                self._drop(one)
                return
            if not one.ready(seconds) or not self._free:
                return
            self._running.append(self._started(one))
        except BaseException as error:
            one.close()
            one.request.emit(Failed(_told(error)))
        self._prepared.remove(one)

    def _drop(self, one: Prepared) -> None:
        self._prepared.remove(one)
        one.close()
        if self.closing is not None:  # by us: a client must not take it for an empty answer
            one.request.emit(Failed(self.closing))
        else:
            one.request.emit(Ended("cancelled", load_seconds=self._engine.info.load_seconds))

    def _started(self, one: Prepared) -> Running:
        """Take the free place that shares most with the prompt, and discard the rest of it."""
        engine, request, prompt = self._engine, one.request, one.prompt
        sampler = Sampler(request.options, engine.info.sampling)
        room = request.limits.context_in(engine.info.context) - len(prompt)
        request.limits = request.limits.over(engine.info.limits)
        answer = Answer(engine, prompt, sampler, request.limits, room)
        # An embedding needs the states of all tokens, and a cache keeps no states. After another
        # source no token means the same.
        start = time.perf_counter()
        if engine.prefixes is not None:
            engine.prefixes.begin()
        try:
            known = [] if request.embed or request.source else prompt
            place = reusing(engine, self._free, known)
            number = engine.begin_request(place.state)
        except BaseException:
            if engine.prefixes is not None:
                engine.prefixes.end()
            raise
        cached = place.state.length
        self.prompt_tokens += len(prompt)
        self.reused_tokens += in_blocks(cached)
        self._free.remove(place)
        request.times.start()
        found = Running(request, place, answer, one.constraint, len(prompt), cached, number)
        found.prefill_seconds = time.perf_counter() - start
        return found

    def _keep(self, one: Running, ended: bool) -> None:
        """Keep the KV of a request that has left its place; not that of one that failed."""
        prefixes = self._engine.prefixes
        if prefixes is None:
            return
        try:
            if ended:
                with suppress(MemoryError, RuntimeError):  # torch's word for no memory
                    one.keep(prefixes)
        finally:
            prefixes.end()

    def _prefill(self, shares: Sequence[Share]) -> None:
        """Read a source, and a window of prompts; one by one if a read fails."""
        engine, start = self._engine, time.perf_counter()
        first, chunk = shares[0]
        try:
            with engine.stoppable(telling(shares, engine.info.manifest.layers)):
                if first.request.source and not first.encoded:
                    engine.encode(first.place.state, first.request.source)
                    first.encoded = True
                for one, _ in shares:
                    one.request.reading(one.place.state.length, one.prompt_tokens)
                if first.request.embed:
                    self._embed(first, chunk)
                else:
                    logits = engine.extend_all([(one.place.state, ids) for one, ids in shares])
        except Stopped:
            for one, _ in shares:
                self._end(one, "cancelled")
            return
        except READ_FAILED as error:
            if len(shares) == 1:
                self._fail(first, error)
            for share in shares if len(shares) > 1 else ():
                self._prefill([share])
            return
        except Exception as error:
            for one, _ in shares:
                self._fail(one, error)
            return
        spent = time.perf_counter() - start
        for number, (one, ids) in enumerate(shares):
            one.read(spent, engine.tracing)
            if engine.info.reproducible and not one.request.source:
                one.place.reusable += ids[: len(ids) // PREFILL_CHUNK * PREFILL_CHUNK]
            if not one.prefilled:
                continue
            if one.states is not None:
                one.request.emit(Vector(direction(one.states)))
                self._end(one, "stop")
            else:
                one.logits = logits[number]

    def _embed(self, one: Running, chunk: Sequence[int]) -> None:
        rows = self._engine.states(one.place.state, chunk)
        check_logits(rows)
        states: NDArray[np.float64] = rows.sum(axis=0, dtype=np.float64)
        one.states = states if one.states is None else one.states + states

    def _decode(self, group: list[Running], requests: int) -> None:
        """Run a pass of some of the requests; one by one if rows interact, or if a read fails."""
        engine = self._engine
        if len(group) > 1 and not engine.batches:
            for one in group:
                self._decode([one], requests)
            return
        stopped = group[0].request.stopped  # asked at every layer
        if len(group) > 1:
            stopped = lambda: all(one.request.stopped() for one in group)  # noqa: E731
        steps = [(one.place.state, one.answer.tokens[-1]) for one in group]
        waited, start = engine.store.stats.stall_seconds, time.perf_counter()
        try:
            with engine.stoppable(stopped):
                logits = engine.step(steps)
        except Stopped:  # all of them: the next round ends them
            return
        except READ_FAILED as error:
            if len(group) == 1:
                self._fail(group[0], error)
                return
            for one in group:
                self._decode([one], requests)
            return
        except Exception as error:
            for one in group:
                self._fail(one, error)
            return
        spent = time.perf_counter() - start
        waited = engine.store.stats.stall_seconds - waited
        self._groups.passed(len(group), requests, spent, waited)
        if len(group) == 1:
            self.speculation.gate.passed(spent, waited)
        for number, one in enumerate(group):
            one.logits = logits[number]
            one.decode_seconds += spent

    def _checked(self, one: Running) -> bool:
        """Take the tokens of a pass that checks a draft; False: no draft was worth it."""
        try:
            if not self.speculation.step(one, self._take):
                return False
        except BaseException as error:
            self._fail(one, _told(error))
            return True
        if one.answer.done:
            self._end(one, one.answer.finish_reason)
        return True

    def _choose(self) -> None:
        """Choose a token of every request that has logits, and emit the text."""
        for one in list(self._running):
            if one.logits is None:
                continue
            if not one.answer.done:
                try:
                    if one.constraint is not None and not one.constraint.ready(_PATIENCE_S):
                        continue  # others go on
                    self._take(one, one.logits)
                except BaseException as error:
                    self._fail(one, _told(error))
                    continue
            one.logits = None
            if one.answer.done:
                self._end(one, one.answer.finish_reason)

    def _take(self, one: Running, logits: NDArray[np.float32]) -> None:
        start = time.perf_counter()
        check_logits(logits)
        allowed = logits if one.constraint is None else one.constraint.mask(logits)
        text = one.answer.take(allowed)
        token = one.answer.tokens[-1]
        if one.constraint is not None:
            one.constraint.took(token)
        one.decode_seconds += time.perf_counter() - start
        self.tokens += 1
        one.request.times.take()
        best = one.request.logprobs
        info = None if best is None else token_info(allowed, token, best)
        if text or info is not None:
            one.request.emit(Piece(text, info, len(one.answer.tokens)))

    def _end(self, one: Running, reason: Literal["stop", "length", "cancelled"]) -> None:
        if reason == "cancelled" and self.closing is not None:  # by us: a client must not take it
            self._fail(one, self.closing)  # for a whole answer
            return
        if reason == "cancelled":
            with suppress(Exception):  # the tokenizer's; nothing is lost
                if rest := one.answer.rest():
                    one.request.emit(Piece(rest))
        ended = one.ended(reason, self._engine.info.load_seconds, self._engine.info.lossy)
        try:
            self._leave(one, ended)
        finally:  # a fault of ours must not keep a client waiting
            one.request.emit(ended)
        self._keep(one, ended=True)

    def _fail(self, one: Running, error: Exception) -> None:
        self._leave(one, None)
        self._keep(one, ended=False)
        if self.lost is None and isinstance(error, Unavailable | MemoryError) and self._engine.lost:
            self.lost = error
        one.request.emit(Failed(error))

    def _leave(self, one: Running, ended: Ended | None) -> None:
        """Free the place, and record the routing of the request."""
        place = one.place
        self._running.remove(one)
        self._free.append(place)
        one.close()
        if not (self._engine.info.reproducible or one.request.source):
            place.reusable = one.answer.history[: place.state.length]
        with suppress(Exception):  # an answer matters more than its record
            one.left(self._engine.end_request(one.number, counts=one.prefilled))
        self._ended(ended)


def _told(error: BaseException) -> Exception:
    """Return the error that a request receives; raise one that must end the thread."""
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        raise error
    return as_exception(error)
