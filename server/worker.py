"""The thread that owns an engine and answers many requests with it.

Does not know HTTP, nor which other engines there are.

    submit ──▶ waiting (FIFO, bounded) ──▶ a free place ──▶ prefill, a chunk a round ──▶ decode
                                            (KV cache)       the oldest first            all at once

A round is one chunk of prefill, if anybody needs one, and one decode pass of everybody who answers,
so that shared experts are loaded once and a long prompt delays others by a chunk at most. What a
request gets is bit for bit what it would get alone, whatever the tag: rows of a decode pass do not
depend on each other, prefill is not batched, and neither is decoding with the tag f32, whose
products are torch's and have other bits for other numbers of rows. (On a GPU so have torch's
products in float32 of the other tags.)

A place keeps its KV cache when its request has ended. The next request whose prompt begins in the
same way takes over the whole prefill chunks that both share: those bytes are what its own prefill
would have written.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moeinf.models.base import State
from moeinf.native import DeviceError
from moeinf.offload.store import Stopped
from moeinf.offload.transfer import ExpertReadError
from moeinf.runtime.asking import PromptTooLong
from moeinf.runtime.config import PREFILL_CHUNK
from moeinf.runtime.constrain import Constraint
from moeinf.runtime.engine import Engine
from moeinf.runtime.finite import check_logits
from moeinf.runtime.generate import Answer
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.sampler import Sampler
from moeinf.server.jobs import Busy, Ended, Failed, Job, Piece, TokenInfo, Unloaded, Vector


@dataclass(eq=False)
class _Place:
    """Room for one request. prefilled: the tokens of whole prefill chunks that the state begins
    with."""

    state: State
    prefilled: list[int] = field(default_factory=list)


@dataclass(eq=False)
class _Running:
    """A request that has a place."""

    job: Job
    place: _Place
    answer: Answer
    constraint: Constraint | None
    prompt_tokens: int
    cached_tokens: int
    request: int
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    logits: NDArray[np.float32] | None = None  # of the last pass, not yet chosen from
    states: NDArray[np.float64] | None = None  # [D], the sum over the prompt; of embeddings only


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
        self._running: list[_Running] = []
        self._beginning = False  # a job is neither waiting nor running: its prompt is being made
        self._free: list[_Place] = []
        self.loaded = threading.Event()  # or failed to
        self.engine: Engine | None = None
        self.last_used = time.monotonic()
        self.answers = 0  # that have ended, in whatever way
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
            return not (self._waiting or self._beginning or self._running)

    def submit(self, job: Job) -> None:
        """Raises Busy when too many wait, Unloaded when this is closing."""
        with self._changed:
            if self._closing:
                raise Unloaded("the model is being unloaded")
            gone = self._drop_cancelled() if len(self._waiting) >= self._max_queue else []
            if len(self._waiting) >= self._max_queue:
                raise Busy(f"{len(self._waiting)} requests are waiting for this model")
            self._waiting.append(job)
            self._changed.notify()
        self._tell_cancelled(gone)

    def close(self) -> None:
        """Cuts off what runs and waits, ends the engine, and returns when it has ended."""
        with self._changed:
            self._closing = True
            for one in self._running:
                one.job.cancelled.set()
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        """Whatever ends this thread, nobody is left waiting for it."""
        end: Exception = Unloaded("the model was unloaded")
        try:
            with self._make() as engine:
                self._free = [_Place(engine.new_state()) for _ in range(self._parallel)]
                self.engine = engine
                self._say(*engine.choices, *engine.take_notes())
                self.loaded.set()
                while not self._closing and self._lost is None:
                    self._admit(engine)
                    self._round(engine)
                end = self._lost or end
                for one in list(self._running):
                    self._fail(engine, one, end)
                self._free.clear()  # states go before their engine
        except Exception as error:
            self._failure, end = error, self._lost or error
        with self._changed:
            self._closing = True
            if self._lost is not None:  # whose traceback holds what the engine had
                self._failure, self._lost = Unloaded("its GPU has failed"), None
            left = [one.job for one in self._running] + list(self._waiting)
            self._running, self.engine = [], None
            self._waiting.clear()
        self.loaded.set()
        for job in left:
            job.emit(Failed(end))

    def _next(self) -> Job | None:
        """Who has waited longest; beginning until it runs, or has failed to."""
        with self._changed:
            self._beginning = bool(self._waiting)
            return self._waiting.popleft() if self._waiting else None

    def _drop_cancelled(self) -> list[Job]:
        """Takes out of the queue whose clients have gone: they are still to be told."""
        gone = [job for job in self._waiting if job.cancelled.is_set()]
        self._waiting = deque(job for job in self._waiting if job not in gone)
        return gone

    def _tell_cancelled(self, gone: list[Job]) -> None:
        load_seconds = 0.0 if self.engine is None else self.engine.load_seconds
        for job in gone:
            job.emit(Ended("cancelled", 0, 0, 0, load_seconds, 0.0, 0.0))

    def _admit(self, engine: Engine) -> None:
        """Gives free places to who waits; sleeps while there is nothing to do at all."""
        with self._changed:
            while not (self._closing or self._waiting or self._running):
                self._changed.wait()
            gone = self._drop_cancelled()
        self._tell_cancelled(gone)
        while self._free and not self._closing and (job := self._next()) is not None:
            try:
                self._running.append(self._begin(engine, job))
            except Exception as error:
                job.emit(Failed(error))
            self._beginning = False

    def _begin(self, engine: Engine, job: Job) -> _Running:
        prompt = job.prepare(engine)
        context = engine.placement.context
        if not prompt:
            raise InvalidValue("there is nothing to answer: the prompt has no tokens")
        if len(prompt) >= context:
            raise PromptTooLong(f"the prompt has {len(prompt)} tokens, the context {context}")
        constraint = job.constrain(engine, prompt) if job.constrain is not None else None
        sampler = Sampler(job.options, engine.sampling)
        answer = Answer(engine, prompt, sampler, job.limits, context - len(prompt))
        # An embedding needs the states of all tokens, of which a cache keeps none.
        reusable = [] if job.embed else prompt
        known = [_shared_chunks(place.prefilled, reusable) for place in self._free]
        place = self._free[known.index(max(known))]
        place.state.truncate(max(known))
        shared = place.state.length  # some states cannot go back to everywhere
        if shared % PREFILL_CHUNK:
            place.state.truncate(0)
            shared = 0
        place.prefilled = place.prefilled[:shared]
        request = engine.begin_request(place.state)
        self._free.remove(place)
        return _Running(job, place, answer, constraint, len(prompt), shared, request)

    def _round(self, engine: Engine) -> None:
        for one in list(self._running):
            if one.job.cancelled.is_set():
                self._end(engine, one, "cancelled")
        for one in self._running:
            if one.place.state.length < one.prompt_tokens:
                self._prefill(engine, one)
                break
        self._choose(engine)
        deciding = [one for one in self._running if one.answer.tokens]
        if deciding:
            self._decode(engine, deciding)

    def _prefill(self, engine: Engine, one: _Running) -> None:
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
                one.job.emit(Vector(_direction(one.states)))
                self._end(engine, one, "stop")
        elif state.length == one.prompt_tokens:
            one.logits = logits

    def _choose(self, engine: Engine) -> None:
        """Chooses a token for everybody who has logits, and gives away what text that makes."""
        for one in list(self._running):
            if one.logits is None:
                continue
            logits, one.logits = one.logits, None
            if not one.answer.done:
                try:
                    self._take(one, logits)
                except Exception as error:
                    self._fail(engine, one, error)
                    continue
            if one.answer.done:
                reason = one.answer.finish_reason
                self._end(engine, one, "stop" if reason == "stop" else "length")

    def _take(self, one: _Running, logits: NDArray[np.float32]) -> None:
        check_logits(logits)
        allowed = logits if one.constraint is None else one.constraint.mask(logits)
        text = one.answer.take(allowed)
        token = one.answer.tokens[-1]
        if one.constraint is not None:
            one.constraint.took(token)
        self.tokens += 1
        info = None
        if one.job.logprobs is not None:
            info = _token_info(allowed, token, one.job.logprobs)
        if text or info is not None:
            one.job.emit(Piece(text, info))

    def _decode(self, engine: Engine, group: list[_Running]) -> None:
        """One pass of all; each alone where a row would see the others, and where a read fails, so
        that only the hit one fails.
        """
        if len(group) > 1 and not engine.batches:
            for one in group:
                self._decode(engine, [one])
            return
        start = time.perf_counter()
        steps = [(one.place.state, one.answer.tokens[-1]) for one in group]
        try:
            logits = engine.step(steps)
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

    def _end(self, engine: Engine, one: _Running, reason: str) -> None:
        if reason == "cancelled" and self._closing:  # by us: whoever listens must not take it
            self._fail(engine, one, Unloaded("the model was unloaded"))  # for a whole answer
            return
        self._leave(engine, one)
        one.job.emit(
            Ended(
                reason,  # type: ignore[arg-type]
                one.prompt_tokens,
                one.cached_tokens,
                len(one.answer.tokens),
                engine.load_seconds,
                one.prefill_seconds,
                one.decode_seconds,
            )
        )

    def _fail(self, engine: Engine, one: _Running, error: Exception) -> None:
        self._leave(engine, one)
        if self._lost is None and isinstance(error, DeviceError | MemoryError) and engine.lost:
            self._lost = error
        one.job.emit(Failed(error))

    def _leave(self, engine: Engine, one: _Running) -> None:
        """The place is free again; what the request has routed is remembered."""
        self._running.remove(one)
        self._free.append(one.place)
        self.last_used = time.monotonic()
        self.answers += 1
        with suppress(Exception):  # an answer is worth more than the memory of it
            engine.end_request(one.request, counts=one.prefill_seconds > 0)
        self._say(*engine.take_notes())

    def _say(self, *lines: str) -> None:
        for line in lines:
            with suppress(Exception):  # whoever listened has gone: no reason to end an answer
                self._tell(line)


def _shared_chunks(prefilled: list[int], prompt: list[int]) -> int:
    """Tokens of the whole chunks with which both begin, less than all of the prompt."""
    most = max(0, min(len(prefilled), len(prompt) - 1)) // PREFILL_CHUNK * PREFILL_CHUNK
    shared = 0
    while shared < most:
        end = shared + PREFILL_CHUNK
        if prefilled[shared:end] != prompt[shared:end]:
            break
        shared = end
    return shared


def _direction(total: NDArray[np.float64]) -> NDArray[np.float32]:
    """total [D] at length 1: a mean has the direction of its sum."""
    return (total / max(float(np.linalg.norm(total)), 1e-12)).astype(np.float32)


def _token_info(logits: NDArray[np.float32], token: int, count: int) -> TokenInfo:
    """Log-probabilities under the logits themselves, before temperature and cut-offs."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    best = np.argsort(-wide, kind="stable")[:count]
    return TokenInfo(token, float(wide[token]), [(int(t), float(wide[t])) for t in best])
