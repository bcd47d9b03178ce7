"""The thread that owns an engine and answers many requests with it.

Does not know HTTP, nor which other engines there are.

    submit ──▶ waiting ──▶ prepared ──▶ a free place ──▶ prefill, a chunk a round ──▶ decode
               (FIFO,      (prompt,     (KV cache)       the oldest first            all at once
               bounded)    grammar)

A round is one chunk of prefill and one decode pass of all requests that answer: shared experts are
loaded once, and a long prompt delays others by a chunk. A request gets the same bits as alone: rows
of a decode pass are independent, prefill is not batched, and torch's float32 products run one by
one. No round waits for a slow grammar: its request is passed over.

A place keeps its KV cache when its request ends. A request with the same beginning takes it over.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from moeinf.native import DeviceError
from moeinf.offload.store.expert_store import Stopped
from moeinf.offload.store.transfer import ExpertReadError
from moeinf.runtime.checkpoints.finite import check_logits
from moeinf.runtime.config import PREFILL_CHUNK
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.engine.generate import Answer
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.requests import PromptTooLong
from moeinf.runtime.sampling.sampler import Sampler
from moeinf.runtime.text.panic import as_exception
from moeinf.server.engines.jobs import Busy, Ended, Failed, Job, Piece, Unloaded, Vector
from moeinf.server.engines.running import (
    Place,
    Prepared,
    Running,
    direction,
    shared_chunks,
    token_info,
)

CLOSE_SECONDS = 8.0  # in which an engine's thread ends, unless a native call does not return
_MOST_COMPILING = 2  # grammars at a time; requests without one overtake those that wait for it
_PATIENCE_S = 0.002  # for a mask, which is made during the pass before


class Worker:
    """One engine on a thread of its own. All methods may be called from any thread."""

    def __init__(
        self,
        make: Callable[[], Engine],
        parallel: int,
        max_queue: int,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """tell: what the engine has chosen once it is loaded, and its notes as they come."""
        self._make, self._tell = make, tell
        self._parallel = parallel
        self._max_queue = max_queue
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._closing = False
        self._failure: Exception | None = None
        self._lost: Exception | None = None  # what the engine's GPU has failed with, for good
        self._prepared: list[Prepared] = []
        self._running: list[Running] = []
        self._beginning: Job | None = None  # neither waiting nor running: its prompt is being made
        self._free: list[Place] = []
        self.loaded = threading.Event()  # or failed to
        self.engine: Engine | None = None
        self.last_used = time.monotonic()
        self.tokens = 0  # decoded
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> Exception | None:
        """Why the engine could not be loaded, or is no more."""
        return self._failure

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def idle(self) -> bool:
        with self._changed:
            return not (self._waiting or self._beginning or self._prepared or self._running)

    def submit(self, job: Job) -> None:
        """Raises Busy when too many wait, Unloaded when this is closing."""
        with self._changed:
            if self._closing:
                raise Unloaded("the model is being unloaded")
            gone = self._drop_cancelled() if len(self._waiting) >= self._max_queue else []
            if len(self._waiting) >= self._max_queue:
                raise Busy(f"{len(self._waiting)} requests are waiting for this model")
            job.times.arrive()
            self._waiting.append(job)
            self._changed.notify()
        self._tell_cancelled(gone)

    def close(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Cut off what runs and waits, and end the engine.

        Returns whether it has ended; False after `seconds`: a native call has not returned.
        """
        self._refuse_waiting(Unloaded("the model was unloaded"))
        with self._changed:
            jobs = [one.job for one in self._prepared] + [one.job for one in self._running]
            jobs += [] if self._beginning is None else [self._beginning]
            for job in jobs:
                job.cancelled.set()
            self._changed.notify()
        self._thread.join(seconds)
        ended = not self._thread.is_alive()
        for job in jobs if seconds and not ended else ():  # the thread may never come to tell them
            job.emit(Failed(Unloaded("the model was unloaded")))
        return ended

    def _refuse_waiting(self, why: Exception) -> None:
        """Take no more requests, and tell those that wait."""
        with self._changed:
            self._closing = True
            waiting = list(self._waiting)
            self._waiting.clear()
        for job in waiting:
            job.emit(Failed(why))

    def _run(self) -> None:
        """Run the engine. Whatever ends it, every request gets its last event."""
        end: Exception = Unloaded("the model was unloaded")
        try:
            with self._make() as engine:
                self._free = [Place(engine.new_state()) for _ in range(self._parallel)]
                self.engine = engine
                self._say(*engine.info.choices, *engine.take_notes())
                self.loaded.set()
                try:
                    while not self._closing and self._lost is None:
                        self._admit(engine)
                        self._round(engine)
                except BaseException as error:
                    end = as_exception(error)
                    raise
                finally:  # the engine may take long to close
                    self._refuse_waiting(self._lost or end)
                end = self._lost or end
                for one in list(self._running):
                    self._fail(engine, one, end)
                self._free.clear()  # states go before their engine
        except BaseException as error:  # a panic of Rust is no Exception
            self._failure = as_exception(error)
            end = self._lost or self._failure
        with self._changed:
            self._closing = True
            if self._lost is not None:  # whose traceback holds what the engine had
                self._failure, self._lost = Unloaded("its GPU has failed"), None
            placed: list[Running | Prepared] = [*self._running, *self._prepared]
            left = [one.job for one in placed] + list(self._waiting)
            self._running, self._prepared, self.engine = [], [], None
            self._waiting.clear()
        self.loaded.set()
        for placed_one in placed:
            placed_one.close()
        for job in left:
            job.emit(Failed(end))

    def _next(self) -> Job | None:
        """Take the job that has waited longest; `_beginning` until it is prepared, or has failed.

        Jobs with a grammar stay while enough others are compiled.
        """
        with self._changed:
            full = len(self._prepared) >= _MOST_COMPILING
            for place, job in enumerate(self._waiting):
                if not (full and job.constrain is not None):
                    del self._waiting[place]
                    self._beginning = job
                    return job
            return None

    def _drop_cancelled(self) -> list[Job]:
        """Takes out of the queue whose clients have gone: they are still to be told."""
        gone = [job for job in self._waiting if job.cancelled.is_set()]
        self._waiting = deque(job for job in self._waiting if job not in gone)
        return gone

    def _tell_cancelled(self, gone: list[Job]) -> None:
        load_seconds = 0.0 if self.engine is None else self.engine.info.load_seconds
        for job in gone:
            job.emit(Ended("cancelled", 0, 0, 0, load_seconds, 0.0, 0.0))

    def _admit(self, engine: Engine) -> None:
        """Give free places to what waits; sleep while there is nothing to do at all."""
        with self._changed:
            while not (self._closing or self._waiting or self._prepared or self._running):
                self._changed.wait()
            gone = self._drop_cancelled()
        self._tell_cancelled(gone)
        for one in list(self._prepared):
            self._place(engine, one, 0.0 if self._running else _PATIENCE_S)
        while self._free and not self._closing and (job := self._next()) is not None:
            try:
                one = self._prepare(engine, job)
                self._prepared.append(one)
                self._place(engine, one)
            except BaseException as error:
                job.emit(Failed(as_exception(error)))
            self._beginning = None

    def _prepare(self, engine: Engine, job: Job) -> Prepared:
        """Make the prompt, and begin to compile the grammar."""
        prompt = job.prepare(engine)
        context = engine.info.context
        if not prompt:
            raise InvalidValue("there is nothing to answer: the prompt has no tokens")
        if len(prompt) >= context:
            raise PromptTooLong(f"the prompt has {len(prompt)} tokens, the context {context}")
        constraint = job.constrain(engine, prompt) if job.constrain is not None else None
        return Prepared(job, prompt, constraint)

    def _place(self, engine: Engine, one: Prepared, seconds: float = 0.0) -> None:
        """Give a place to a request whose grammar is compiled, if there is one."""
        try:
            if one.job.cancelled.is_set():
                self._tell_cancelled([one.job])
                one.close()
            elif not one.ready(seconds) or not self._free:
                return
            else:
                self._running.append(self._begin(engine, one))
        except BaseException as error:
            one.close()
            one.job.emit(Failed(as_exception(error)))
        self._prepared.remove(one)

    def _begin(self, engine: Engine, one: Prepared) -> Running:
        job, prompt = one.job, one.prompt
        sampler = Sampler(job.options, engine.info.sampling)
        room = engine.info.context - len(prompt)
        answer = Answer(engine, prompt, sampler, job.limits, room)
        # An embedding needs the states of all tokens, of which a cache keeps none.
        reusable = [] if job.embed else prompt
        known = [shared_chunks(place.prefilled, reusable) for place in self._free]
        place = self._free[known.index(max(known))]
        place.state.truncate(max(known))
        shared = place.state.length  # some states cannot go back to everywhere
        if shared % PREFILL_CHUNK:
            place.state.truncate(0)
            shared = 0
        place.prefilled = place.prefilled[:shared]
        request = engine.begin_request(place.state)
        self._free.remove(place)
        job.times.start()
        return Running(job, place, answer, one.constraint, len(prompt), shared, request)

    def _round(self, engine: Engine) -> None:
        for one in list(self._running):
            if one.job.cancelled.is_set():
                self._end(engine, one, "cancelled")
        for one in self._running:
            if one.place.state.length < one.prompt_tokens:
                self._prefill(engine, one)
                break
        self._choose(engine)
        deciding = [one for one in self._running if one.answer.tokens and one.logits is None]
        if deciding:
            self._decode(engine, deciding)

    def _prefill(self, engine: Engine, one: Running) -> None:
        """One chunk, at the borders that a prompt alone would have."""
        state, start = one.place.state, time.perf_counter()
        at = state.length
        chunk = one.answer.history[at : min(at + PREFILL_CHUNK, one.prompt_tokens)]
        try:
            with engine.stoppable(one.job.cancelled.is_set):
                if one.job.embed:
                    rows = engine.states(state, chunk)
                    check_logits(rows)
                    states = rows.sum(axis=0, dtype=np.float64)
                else:
                    logits = engine.extend(state, chunk)
        except Stopped:
            self._end(engine, one, "cancelled")
            return
        except Exception as error:
            self._fail(engine, one, error)
            return
        one.prefill_seconds += time.perf_counter() - start
        if len(chunk) == PREFILL_CHUNK:
            one.place.prefilled += chunk
        if one.job.embed:
            one.states = states if one.states is None else one.states + states
            if state.length == one.prompt_tokens:
                one.job.emit(Vector(direction(one.states)))
                self._end(engine, one, "stop")
        elif state.length == one.prompt_tokens:
            one.logits = logits

    def _choose(self, engine: Engine) -> None:
        """Chooses a token for everybody who has logits, and gives away what text that makes."""
        for one in list(self._running):
            if one.logits is None:
                continue
            if not one.answer.done:
                try:
                    if one.constraint is not None and not one.constraint.ready(_PATIENCE_S):
                        continue  # others go on
                    self._take(one, one.logits)
                except BaseException as error:
                    self._fail(engine, one, as_exception(error))
                    continue
            one.logits = None
            if one.answer.done:
                reason = one.answer.finish_reason
                self._end(engine, one, "stop" if reason == "stop" else "length")

    def _take(self, one: Running, logits: NDArray[np.float32]) -> None:
        check_logits(logits)
        allowed = logits if one.constraint is None else one.constraint.mask(logits)
        text = one.answer.take(allowed)
        token = one.answer.tokens[-1]
        if one.constraint is not None:
            one.constraint.took(token)
        self.tokens += 1
        one.job.times.take()
        best = one.job.logprobs
        info = None if best is None else token_info(allowed, token, best)
        if text or info is not None:
            one.job.emit(Piece(text, info))

    def _decode(self, engine: Engine, group: list[Running]) -> None:
        """One pass of all; each alone if rows see each other, or if a read fails."""
        if len(group) > 1 and not engine.batches:
            for one in group:
                self._decode(engine, [one])
            return
        start = time.perf_counter()
        steps = [(one.place.state, one.answer.tokens[-1]) for one in group]
        try:
            with engine.stoppable(lambda: self._closing):
                logits = engine.step(steps)
        except Stopped:  # and so will all requests be
            return
        except ExpertReadError as error:
            if len(group) == 1:
                self._fail(engine, group[0], error)
                return
            for one in group:
                self._decode(engine, [one])
            return
        except Exception as error:
            for one in group:
                self._fail(engine, one, error)
            return
        spent = time.perf_counter() - start
        for number, one in enumerate(group):
            one.logits = logits[number]
            one.decode_seconds += spent

    def _end(self, engine: Engine, one: Running, reason: str) -> None:
        if reason == "cancelled" and self._closing:  # by us: whoever listens must not take it
            self._fail(engine, one, Unloaded("the model was unloaded"))  # for a whole answer
            return
        self._leave(engine, one)
        one.job.emit(one.ended(reason, engine.info.load_seconds))

    def _fail(self, engine: Engine, one: Running, error: Exception) -> None:
        self._leave(engine, one)
        if self._lost is None and isinstance(error, DeviceError | MemoryError) and engine.lost:
            self._lost = error
        one.job.emit(Failed(error))

    def _leave(self, engine: Engine, one: Running) -> None:
        """The place is free again; what the request has routed is remembered."""
        self._running.remove(one)
        self._free.append(one.place)
        one.close()
        self.last_used = time.monotonic()
        with suppress(Exception):  # an answer is worth more than the memory of it
            engine.end_request(one.request, counts=one.prefill_seconds > 0)
        self._say(*engine.take_notes())

    def _say(self, *lines: str) -> None:
        for line in lines:
            with suppress(Exception):  # whoever listened has gone: no reason to end an answer
                self._tell(line)
