"""Run a scheduler on a thread of its own, and queue the requests that wait for it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from moeinf.errors import forget_frames
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.events import Ended, Failed, Reading, Request
from moeinf.runtime.generation.scheduler import Scheduler
from moeinf.runtime.text.panic import as_exception
from moeinf.server.engines.jobs import Busy, Job, Unloaded

MEASURED_EVERY_S = 60.0
CLOSE_SECONDS = 8.0  # for an engine's thread to end, unless a native call does not return


class Worker:
    """One engine on a thread of its own. All methods may be called from any thread."""

    def __init__(
        self,
        make: Callable[[], Engine],
        parallel: int,
        max_queue: int,
        tell: Callable[[str], None] = lambda _: None,
        measured: Callable[[Engine, Ended], None] = lambda _, __: None,
    ) -> None:
        """Start the thread.

        tell: takes the engine's choices once loaded, and its notes. measured: takes an answer whose
        times are those of a request alone, at most one in MEASURED_EVERY_S seconds.
        """
        self._make, self._tell, self._measured = make, tell, measured
        self._measure_at = 0.0
        self._parallel = parallel
        self._max_queue = max_queue
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._beginning: Job | None = None  # neither waiting nor running: its prompt is being made
        self._scheduler: Scheduler | None = None
        self._closing = False
        self._failure: Exception | None = None
        self.loaded = threading.Event()  # or failed to load
        self.engine: Engine | None = None
        self.last_used = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> Exception | None:
        """The reason why the engine could not be loaded, or has ended."""
        return self._failure

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return 0 if self._scheduler is None else self._scheduler.running

    @property
    def tokens(self) -> int:
        """The number of tokens decoded."""
        return 0 if self._scheduler is None else self._scheduler.tokens

    @property
    def prompt_tokens(self) -> int:
        """The number of prompt tokens, computed or reused."""
        return 0 if self._scheduler is None else self._scheduler.prompt_tokens

    @property
    def reused_tokens(self) -> int:
        """The number of prompt tokens whose KV was there."""
        return 0 if self._scheduler is None else self._scheduler.reused_tokens

    @property
    def reading(self) -> list[Reading]:
        """The progress of each request whose prompt is being read."""
        jobs = [one for one in self._begun if isinstance(one, Job)]
        return [job.progress for job in jobs if job.progress and job.times.first_token is None]

    @property
    def idle(self) -> bool:
        with self._changed:
            return not (self._waiting or self._beginning or self._begun)

    @property
    def _begun(self) -> list[Request]:
        return [] if self._scheduler is None else self._scheduler.requests

    def check_loaded(self) -> None:
        """Raise the error that prevented the load, and forget it: its traceback will grow here."""
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure

    def submit(self, job: Job) -> None:
        """Queue a job. Raises Busy when the queue is full, Unloaded when this is closing."""
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
        """Cut off running and waiting requests, and end the engine.

        Returns whether it has ended; False after `seconds`: a native call has not returned.
        """
        self._refuse_waiting(Unloaded("the model was unloaded"))
        with self._changed:
            if self._scheduler is not None:
                self._scheduler.closing = Unloaded("the model was unloaded")
            jobs = [one for one in (*self._begun, self._beginning) if isinstance(one, Job)]
            for job in jobs:
                job.cancelled.set()
            self._changed.notify()
        self._thread.join(seconds)
        ended = not self._thread.is_alive()
        for job in jobs if seconds and not ended else ():  # the thread may never report them
            job.emit(Failed(Unloaded("the model was unloaded")))
        return ended

    def _refuse_waiting(self, why: Exception) -> None:
        """Take no more requests, and fail those that wait."""
        with self._changed:
            self._closing = True
            waiting = list(self._waiting)
            self._waiting.clear()
        for job in waiting:
            job.emit(Failed(why))

    def _run(self) -> None:
        """Run the engine. However it ends, every request gets its last event."""
        end: Exception = Unloaded("the model was unloaded")
        left: list[Request] = []
        try:
            with self._make() as engine:
                self._scheduler = Scheduler(engine, self._parallel, ended=self._ended)
                self.engine = engine
                self._say(*engine.info.choices, *engine.take_notes())
                engine.memory.tell = self._say
                self.loaded.set()
                try:
                    self._serve(self._scheduler)
                    end = self._scheduler.lost or end
                    self._refuse_waiting(end)  # the engine may take long to close
                    self._scheduler.fail_all(end)
                except BaseException as error:
                    end = self._scheduler.lost or as_exception(error)
                    self._refuse_waiting(end)
                    raise
                finally:
                    left = self._scheduler.close()  # states go before their engine
        except BaseException as error:  # a panic of Rust is no Exception
            self._failure = as_exception(error)
            forget_frames(self._failure)  # which hold what the engine had
            end = self._failure if self._lost is None else self._lost
        with self._changed:
            self._closing = True
            if self._scheduler is not None and self._scheduler.lost is not None:
                self._failure = Unloaded("its GPU or a stage has failed")
                self._scheduler.lost = None  # its traceback holds what the engine had
            left += self._waiting
            self.engine = None
            self._waiting.clear()
        self.loaded.set()
        for request in left:
            request.emit(Failed(end))

    @property
    def _lost(self) -> Exception | None:
        return None if self._scheduler is None else self._scheduler.lost

    def _serve(self, scheduler: Scheduler) -> None:
        """Answer until this is closed, or the engine is lost; sleep while the queue is empty."""
        while not self._closing and scheduler.lost is None:
            with self._changed:
                while not (self._closing or self._waiting or scheduler.requests):
                    self._changed.wait()
                gone = self._drop_cancelled()
            self._tell_cancelled(gone)
            scheduler.place()
            while not self._closing and (job := self._next(scheduler)) is not None:
                if job.counts:
                    self._count(job)
                else:
                    scheduler.begin(job)
                self._beginning = None
                if job.counts:
                    break  # passes of others go on between two counts
            scheduler.round()

    def _next(self, scheduler: Scheduler) -> Job | None:
        """Take the oldest waiting job that may begin; it is `_beginning` then."""
        with self._changed:
            for place, job in enumerate(self._waiting):
                if job.counts or scheduler.admits(job):
                    del self._waiting[place]
                    self._beginning = job
                    return job
            return None

    def _count(self, job: Job) -> None:
        """Report how many tokens a job's prompt has."""
        assert self.engine is not None
        try:
            job.emit(Ended("stop", prompt_tokens=len(job.prepare(self.engine))))
        except BaseException as error:  # a panic of Rust is no Exception
            job.emit(Failed(as_exception(error)))

    def _drop_cancelled(self) -> list[Job]:
        """Remove the queued jobs of clients that have gone; they still need a last event."""
        gone = [job for job in self._waiting if job.cancelled.is_set()]
        self._waiting = deque(job for job in self._waiting if job not in gone)
        return gone

    def _tell_cancelled(self, gone: list[Job]) -> None:
        load_seconds = 0.0 if self.engine is None else self.engine.info.load_seconds
        for job in gone:
            job.emit(Ended("cancelled", load_seconds=load_seconds))

    def _ended(self, ended: Ended | None) -> None:
        """Note that a request has left its place."""
        self.last_used = now = time.monotonic()
        if self.engine is None:
            return
        self._say(*self.engine.take_notes())
        if ended is not None and self._parallel == 1 and now >= self._measure_at:
            self._measure_at = now + MEASURED_EVERY_S
            self._measured(self.engine, ended)

    def _say(self, *lines: str) -> None:
        for line in lines:
            with suppress(Exception):  # the listener has gone: no reason to end an answer
                self._tell(line)
