"""One loaded model that answers: the model, its expert store, its tokenizer, its memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moeinf.models.base import Experts, Model, State
from moeinf.models.layers.decoder import Decoder
from moeinf.models.layers.kv_cache import KvCache
from moeinf.models.layers.later_blocks import run_later_blocks
from moeinf.models.seq2seq.encoder_decoder import EncoderDecoder
from moeinf.native import DeviceError
from moeinf.offload.gpu_tier.layer_runner import OutOfMemory
from moeinf.offload.routing.trace import Recording, RequestEam
from moeinf.runtime.config import PREFILL_CHUNK, EngineConfig, Settings
from moeinf.runtime.engine.compute_threads import ComputeThreads
from moeinf.runtime.engine.draft_engine import Drafter, open_draft
from moeinf.runtime.engine.info import EngineInfo
from moeinf.runtime.engine.loader import LoadedModel, LoadProgress
from moeinf.runtime.engine.memory_watch import MemoryWatch
from moeinf.runtime.engine.moving_memory import MovingMemory
from moeinf.runtime.engine.mtp_engine import open_mtp
from moeinf.runtime.engine.notes import Notes
from moeinf.runtime.engine.opening import (
    Text,
    Tiers,
    facts,
    figures,
    load_weights,
    open_prefixes,
    open_text,
    open_tiers,
    plan_engine,
    scarcity,
    warm_up,
)
from moeinf.runtime.engine.pipeline.links import open_stages
from moeinf.runtime.engine.request_tracing import RequestTracing, Wrapped
from moeinf.runtime.library.library import Library, present
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.machine.gpu import device_faults
from moeinf.runtime.prefix.cache import PrefixCache
from moeinf.runtime.sampling.grammar_processes import Grammars
from moeinf.runtime.sizes import MemorySize
from moeinf.runtime.text.chat_template import TemplateWorker
from moeinf.runtime.text.tokenizer import Tokenizer

Result = TypeVar("Result")


class Engine:
    """Runs one model. Not thread-safe: one thread drives it. Made by `Engine.open` alone.

    info       facts that the command line and the server show
    tokenizer, template, grammars    turn texts into tokens and back; no template: a base model
    store      the expert store
    draft      the model or the layers that draft tokens; None: only the text suggests them
    prefixes   the KV of ended requests; None: it is not kept
    gpu        the GPU in use; None: the CPU computes everything
    tracing    the numbers of requests and what they route
    memory     the experts' part of RAM, which can change between passes
    notes      lines to print for the user (`take_notes`)
    """

    def __init__(
        self,
        info: EngineInfo,
        text: Text,
        tiers: Tiers,
        weights: LoadedModel,
        draft: Drafter | None,
        prefixes: PrefixCache | None,
        tracing: RequestTracing,
        notes: Notes,
        tune_threads: bool,
        opened: ExitStack,
    ) -> None:
        """Take the opened parts. opened: closes all the others."""
        # Nothing here refers back to the engine: the last reference to it frees the memory.
        self.info, self.tracing, self.notes = info, tracing, notes
        self._text = text
        self.store, self.gpu = store, _ = tiers.store, tiers.gpu
        self._weights, self.prefixes, self._opened = weights, prefixes, opened
        self.draft = draft
        fixed = "" if tiers.gpu is None else "the memory of experts is fixed while a GPU uses it"
        self.memory = MovingMemory(info.slots, self._resize, notes.append, fixed)
        self.threads = ComputeThreads(
            info.threads,
            in_torch=info.format == "F32",
            tuned=tune_threads and tiers.gpu is None,
            waited=lambda: store.stats.stall_seconds,
            warming=lambda: store.host.warming,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        return self._text.tokenizer

    @property
    def template(self) -> TemplateWorker | None:
        return self._text.template

    @property
    def grammars(self) -> Grammars:
        return self._text.grammars

    @classmethod
    @device_faults()
    def open(
        cls,
        manifest: Manifest,
        folder: Path,
        config: EngineConfig,
        settings: Settings,
        expires_at: Callable[[], int | None] = lambda: None,
        progress: LoadProgress | None = None,
    ) -> Engine:
        """Plan, open the expert store, load the weights, warm up. A failure closes what is open.

        expires_at: when a server will close the engine, in seconds since the epoch. progress: is
        told how much of the dense weights is read.

        Raises DoesNotFit or BadContext for an impossible plan, OutOfDeviceMemory, DamagedModel,
        NoSuchModel when the model is deleted meanwhile, and as `open_stages`.
        """
        start = time.perf_counter()
        with present(manifest.model, folder), ExitStack() as opened:
            stages = open_stages(manifest, folder, config, settings.stage_key, opened)
            if stages is not None:
                manifest, config = stages.own_part, stages.config
            plan = plan_engine(manifest, folder, config, settings, opened)
            text = open_text(manifest, folder, opened)
            tiers = open_tiers(plan, opened)
            weights = load_weights(plan, tiers, opened, progress)
            warmed = warm_up(tiers)
            if stages is not None:
                plan, weights.stages = stages.follow(weights.model, tiers.store, plan), stages
            draft = open_draft(plan, weights.model, opened) or open_mtp(plan, weights.model, opened)
            prefixes = open_prefixes(plan, weights, opened)
            info = facts(plan, text, tiers, weights.model, warmed, time.perf_counter() - start)
            if plan.traced:
                Library(settings).used(manifest.model)
            eamc = None if config.cache_aware else tiers.eamc  # a lossy choice is not the model's
            tracing = RequestTracing(tiers.store, manifest, eamc, plan.notes)
            engine = cls(
                info, text, tiers, weights, draft, prefixes, tracing, plan.notes,
                config.tune_threads, opened.pop_all(),
            )  # fmt: skip
        try:
            about = partial(figures, lambda: engine.info, tiers.store, expires_at)
            plan.registration.publish(about)
            if config.memory is None:
                engine.watch_memory()
        except BaseException:  # no thread can be started
            engine.close()
            raise
        return engine

    @property
    def window(self) -> int:
        """Tokens of a prompt that go through a layer before the next; PREFILL_CHUNK or more."""
        most = self.info.placement.window
        stages = self._weights.stages
        return most if stages is None else min(most, stages.window)

    @property
    def model(self) -> Model:
        return self._weights.model

    def set_memory(self, size: MemorySize | None) -> None:
        """Give the experts another amount of RAM from the next pass on. Any thread may call this.

        size: None: what the plan gave them, and less while the machine is short of memory. Any
        other size stays. Raises DoesNotFit below the minimum, InvalidValue with a GPU.
        """
        budget, slots = self.info.manifest.slots, self.memory.first_slots
        if size is not None:
            given = min(size.of(budget.max_bytes), budget.max_bytes)
            slots = budget.slots(given - self.info.placement.low_bytes)
        self.memory.watched_by(None)
        self.memory.move(slots, "as asked")
        if size is None:
            self.watch_memory()

    def watch_memory(self) -> None:
        """Give memory back from now on while the machine is short of it. Without a GPU only."""
        if self.gpu is None:
            info = self.info
            budget = info.manifest.slots
            self.memory.watched_by(MemoryWatch(self.memory, info.slot_bytes, budget.min_slots))

    def _resize(self, slots: int) -> int:
        """Use this number of slots, while no pass runs; return how many are used then."""
        self.store.resize(slots)
        used, info = self.store.host.slots, self.info
        size = used * info.slot_bytes
        place = replace(info.placement, slots=used, memory_bytes=size + info.placement.low_bytes)
        more = (used - info.slots) * info.slot_bytes
        self.info = replace(info, placement=place, peak_bytes=info.peak_bytes + more)
        return used

    def new_state(self) -> State:
        """Return an empty KV cache of the planned context. Raises OutOfMemory."""
        return self._with_memory(lambda: self.model.new_state(self.info.context))

    def encode(self, state: State, ids: Sequence[int]) -> None:
        """Read a whole source; the state holds no other tokens afterwards. Raises Stopped."""
        model = self.model
        assert isinstance(model, EncoderDecoder)
        with self.threads.of(len(ids)):
            self._with_memory(lambda: model.encode(ids, state, self.tracing.experts))

    def extend(self, state: State, ids: Sequence[int]) -> NDArray[np.float32]:
        """Append ids to the state and return the logits [vocab] after the last one.

        Long input is computed in chunks of a fixed length, so that results do not depend on the
        budget. A window of several chunks reads an absent expert once. Raises Stopped; the state
        then holds the finished windows.
        """
        for start in range(0, len(ids), self.window):
            logits = self.extend_all([(state, ids[start : start + self.window])])
        last: NDArray[np.float32] = logits[0]
        return last

    def extend_all(self, texts: Sequence[tuple[State, Sequence[int]]]) -> NDArray[np.float32]:
        """Append ids to each of several states in one pass; logits [requests, vocab].

        At most `window` ids. Each state gets the bits that `extend` would give it, where a window
        is longer than a chunk. A pass that fails leaves every state as it was. Raises like
        `extend`.
        """
        rows = sum(len(ids) for _, ids in texts)
        piece = PREFILL_CHUNK if self.window > PREFILL_CHUNK else None
        batch = [(ids, state) for state, ids in texts]
        with self.threads.of(rows):
            logits = self._with_memory(
                lambda: self.model.extend(batch, self.tracing.experts, piece=piece)
            )
        if self.gpu is not None and rows > len(texts):
            self.gpu.promise.look()  # a prefill needs the most device memory
        values: NDArray[np.float32] = logits.numpy()
        return values

    def states(self, state: State, ids: Sequence[int]) -> NDArray[np.float32]:
        """Append one chunk of ids and return the normed output of the last layer: [T, D].

        At most PREFILL_CHUNK ids. Raises like `extend`.
        """
        with self.threads.of(len(ids)):
            found = self._with_memory(
                lambda: self.model.extend([(ids, state)], self.tracing.experts, "states")
            )
        values: NDArray[np.float32] = found.numpy()
        return values

    def all_logits(self, state: State, ids: Sequence[int]) -> Tensor:
        """Append one chunk of ids and return the logits after each: [T, vocab]. See `states`."""
        with self.threads.of(len(ids)):
            return self._with_memory(lambda: self.model.extend([(ids, state)], self.store, "all"))

    def compute_stage(
        self, x: Tensor, batch: Sequence[tuple[int, KvCache]], piece: int | None
    ) -> Tensor:
        """Compute the layers of a stage; see run_later_blocks. Raises like `extend`."""
        model, experts = self.model, self.tracing.experts
        assert isinstance(model, Decoder)
        with self.threads.of(len(x)):
            return self._with_memory(lambda: run_later_blocks(model.body, x, batch, experts, piece))

    @property
    def batches(self) -> bool:
        """True if a row of `step` equals the row computed alone; False with torch and float32."""
        return self.info.format != "F32"

    def step(self, tokens: Sequence[tuple[State, int]]) -> NDArray[np.float32]:
        """Append one token to each of several states in one pass; logits [requests, vocab].

        Up to MOST_PARALLEL rows equal the rows computed alone, if `batches`. Raises like `extend`;
        a pass that fails leaves every state as it was.
        """
        return self.extend_all([(state, [token]) for state, token in tokens])

    def check(self, state: State, ids: Sequence[int], accept: Callable[[Tensor], int]) -> None:
        """Append the first of several drafted tokens to a state with history, in one pass.

        accept: see models.base.Model.extend. At most store.compute.MOST_ROWS ids, if `info.drafts`.
        Raises like `extend`, and what `accept` raises; the state is then as it was.
        """
        with self.threads.of(len(ids)):
            self._with_memory(
                lambda: self.model.extend([(ids, state)], self.tracing.experts, accept=accept)
            )

    @device_faults()
    def _with_memory(self, compute: Callable[[], Result]) -> Result:
        """Return compute(), retried once with fewer device experts when out of device memory.

        compute must change nothing when it fails. Raises OutOfMemory the second time.
        """
        words, device, scarce = "", self.store.device, scarcity(self.gpu)
        for attempt in range(2):
            try:
                with device_faults(), self.memory:
                    try:
                        return compute()
                    except BaseException as error:
                        if not isinstance(error, scarce):
                            self.store.abandon()  # before a move of another thread
                        raise
            except scarce as error:
                words = str(error)
            # The traceback is gone here, and with it the tensors of the pass.
            self.store.abandon()
            try:
                if attempt or device is None or not device.shrink():
                    break
            except scarce:
                break
        raise OutOfMemory(f"no device memory is left for a pass: {words}")

    def begin_request(self, state: State) -> int:
        """Give the following rows of `state` to a new request; return its number."""
        state.request = self.tracing.begin()
        return state.request

    def end_request(self, request: int, counts: bool) -> RequestEam | None:
        """Release the request; append its routing to the EAMC if it `counts`, and return it."""
        with self.memory:
            self.store.end_request(request)
            if self.gpu is not None and self.store.device is not None:
                for line in self.gpu.keep_promise(self.store.device):
                    self.notes.append(line)
            return self.tracing.end(request, counts)

    def record(self, name: str, details: bool = True) -> Recording:
        """Record every later pass in the recording that is returned. Needs config.trace.

        details: with the weights and the hints.
        """
        return self.tracing.record(name, details)

    def routed_through(self, wrap: Callable[[Experts], Wrapped]) -> AbstractContextManager[Wrapped]:
        """Send the passes within through wrap(experts), to force, count or time their routing.

        `all_logits` is not affected; it is not traced either.
        """
        return self.tracing.through(wrap)

    @property
    def lost(self) -> bool:
        """True if the GPU, its last slot or a stage is gone: passes will fail, or do without it."""
        if self._weights.stages is not None and self._weights.stages.lost:
            return True
        if self.gpu is None:
            return False
        try:
            self.gpu.context.memory()
        except DeviceError:
            return True
        return any(tier.lost for tier in self.store.above)

    def take_notes(self) -> list[str]:
        """Return the notes since the last call."""
        for part in (self.store.device, None if self.gpu is None else self.gpu.dense_math):
            self.notes.append_once(None if part is None else part.note)
        return self.notes.take()

    @contextmanager
    def stoppable(self, stopped: Callable[[], bool]) -> Iterator[None]:
        """End a pass within with Stopped at the next layer once `stopped` returns True."""
        self.store.stopped = stopped
        try:
            yield
        finally:
            self.store.stopped = lambda: False

    @device_faults()
    def close(self) -> None:
        """End readers and workers, and remove the engine from the register.

        Drop states first: on a GPU their memory is given back here.
        """
        self.memory.close()
        self._opened.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
