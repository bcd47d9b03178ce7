"""One loaded model that answers: the model, its expert store, its tokenizer, its place in memory.

Does not know conversations, stop strings or faces.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeinf.models.base import Experts, Model, State
from moeinf.models.seq2seq.encoder_decoder import EncoderDecoder
from moeinf.native import (
    DeviceError,
    OutOfDeviceMemory,
    kernel_path,
    kernels_are_fast,
    set_compute_threads,
)
from moeinf.offload.gpu_tier.layer_runner import OutOfMemory
from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.routing.trace import Recording
from moeinf.offload.store.compute import MOST_ROWS
from moeinf.runtime.config import PREFILL_CHUNK, EngineConfig, Settings
from moeinf.runtime.eamc.collection_file import EamcState
from moeinf.runtime.eamc.recorder import Recorder, routing_shape
from moeinf.runtime.engine.gpu_tier import OpenGpu, open_gpu
from moeinf.runtime.engine.loader import check_small_files, load_model, open_store
from moeinf.runtime.library.library import Library, NoSuchModel
from moeinf.runtime.library.manifest import MANIFEST, Manifest
from moeinf.runtime.library.processes import Figures, Registry
from moeinf.runtime.machine.gpu import device_faults
from moeinf.runtime.machine.measurements import DEFAULT_READING
from moeinf.runtime.machine.memory import available_bytes, core_count, keep_heap_small, rss_bytes
from moeinf.runtime.placement.bandwidth import drive_of
from moeinf.runtime.placement.plan import place
from moeinf.runtime.sampling.grammar_processes import Grammars
from moeinf.runtime.sampling.sampler import model_defaults
from moeinf.runtime.sizes import format_bytes
from moeinf.runtime.text.chat_template import TemplateWorker
from moeinf.runtime.text.tokenizer import Tokenizer, end_tokens

Result = TypeVar("Result")

# oneDNN keeps the code of every matrix shape it has met, some 0.6 MB each, up to 1,024 of them, and
# in prefill nearly every expert has another number of rows. Sixteen serve a decode step of any
# family; both variables are read at the first product (docs/decisions/0010).
_CODE_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_CODE_CACHE_SHAPES = "16"


class Engine:
    """Runs one model. Not thread-safe: one thread drives it.

    Raises DoesNotFit or BadContext for a plan that cannot be, DamagedModel for files that are not
    what the manifest says, NoSuchModel when the model goes away meanwhile.
    """

    @device_faults()
    def __init__(
        self, manifest: Manifest, folder: Path, config: EngineConfig, settings: Settings
    ) -> None:
        start = time.perf_counter()
        for variable in _CODE_CACHES:
            os.environ.setdefault(variable, _CODE_CACHE_SHAPES)
        keep_heap_small()
        registry = Registry(settings.run)
        self.manifest = manifest
        self._digest = manifest.digest
        self.folder = folder

        def plan(claimed_bytes: int) -> int | None:
            free = available_bytes() - claimed_bytes
            self.placement = place(manifest, config, free, core_count())
            there = (folder / MANIFEST).is_file()
            return rss_bytes() + self.placement.peak_bytes if there else None

        registration = registry.register(str(manifest.model), plan)
        if registration is None:
            raise NoSuchModel(str(manifest.model), [])
        # What went wrong, or costs much, and stopped nothing; for a face to print.
        self.notes: list[str] = []
        if not registration.seen:
            config = replace(config, trace=False)
            self.notes.append(f"{settings.home} cannot be written: nothing is remembered")
        torch.set_num_threads(self.placement.threads)
        set_compute_threads(self.placement.threads)
        with ExitStack() as undo:  # in reverse, should anything below fail
            undo.callback(registration.close)
            check_small_files(folder, manifest)
            self.tokenizer = Tokenizer(folder)
            self.template: TemplateWorker | None = None
            if self.tokenizer.chat_template is not None:
                # Started first: its interpreter comes up while the weights load.
                self.template = TemplateWorker(self.tokenizer.chat_template)
                undo.callback(self.template.close)
            self.ends = end_tokens(folder, self.tokenizer)
            self.grammars = Grammars(folder / "tokenizer.json", min(self.ends, default=None))
            undo.callback(self.grammars.close)
            self.sampling = model_defaults(folder)
            drive = drive_of(settings, folder, manifest)
            reading = DEFAULT_READING if drive is None else drive.reading
            self.gpu: OpenGpu | None = None
            if self.placement.on_device is not None:
                self.gpu = open_gpu(
                    self.placement.on_device, manifest, config, settings, self.placement.threads
                )
            inside = None if self.gpu is None else self.gpu.dense_math
            if self.gpu is not None:
                undo.callback(self.gpu.close)
            self.model: Model = self._loaded(
                "dense weights", lambda: load_model(folder, manifest, config, reading, inside)
            )
            if self.gpu is not None:
                undo.callback(lambda: delattr(self, "model"))  # before the GPU is given back
            self._told: set[str] = set()
            self.notes += self.placement.fallbacks
            past = self._open_past(settings) if config.trace else None
            self.store = self._loaded(
                "experts",
                lambda: open_store(
                    folder, manifest, self.placement, config, reading, past, self.gpu
                ),
            )
            how = drive or f"{reading.readers} readers: `moeinf devices` would measure the drive"
            self.choices = (*self.placement.notes, f"disk: {how}", *_kernels(manifest))
            self.choices += () if self.gpu is None else self.gpu.notes
            undo.callback(self.store.close)
            warm = self.store.warm([] if past is None else past.probable_cells())
            if warm:
                first = "" if past is None else ", what past requests used first"
                self.choices += (f"reading ahead {warm} experts{first}",)
            self._opened = undo.pop_all()
        self.expires_at: Callable[[], int | None] = lambda: None  # a server knows when
        registration.publish(self._figures)
        self._requests = itertools.count()
        self.recorder: Recorder | None = None
        self.experts: Experts = self.store
        if config.trace:
            self.recorder = self.experts = Recorder(self.store, routing_shape(manifest))
            Library(settings).used(manifest.model)
        self.load_seconds = time.perf_counter() - start

    def _open_past(self, settings: Settings) -> Eamc | None:
        """What past requests routed; None, and a note, when it cannot be read."""
        self.eamc = EamcState(settings, self.manifest, self.notes.append)
        try:
            return self.eamc.live()
        except OSError as error:
            self.notes.append(f"the EAMC of {self.manifest.model} cannot be read: {error}")
            return None

    def _figures(self) -> Figures:
        """What `ps` shows. Called by another thread; reads counters only."""
        slots, resident = self.manifest.slots, self.store.resident
        gpu = self.placement.on_device
        on_device = self.store.device_resident
        return Figures(
            device_experts=on_device,
            host_experts=resident,
            disk_experts=slots.experts,
            device_bytes=on_device * self.placement.slot_bytes,
            host_bytes=resident * self.placement.slot_bytes,
            disk_bytes=slots.max_bytes,
            hit_rate=self.store.stats.hit_rate,
            digest=self._digest,
            context=self.placement.context,
            device=self.placement.device,
            expires_at=self.expires_at(),
            device_peak_bytes=0 if gpu is None else gpu.peak_bytes,
        )

    def new_state(self) -> State:
        """An empty KV cache of the context that was planned. Raises OutOfMemory."""
        return self._with_memory(lambda: self.model.new_state(self.placement.context))

    @property
    def reads_sources(self) -> bool:
        """Whether the model is an encoder-decoder: then a state needs a source before `extend`."""
        return isinstance(self.model, EncoderDecoder)

    def encode(self, state: State, ids: Sequence[int]) -> None:
        """Reads a source, whole; the state holds no other tokens afterwards. Raises Stopped."""
        assert isinstance(self.model, EncoderDecoder)
        model = self.model
        self._give_torch_threads(len(ids))
        self._with_memory(lambda: model.encode(ids, state, self.experts))

    def extend(self, state: State, ids: Sequence[int]) -> NDArray[np.float32]:
        """Appends ids to the state and returns the logits [vocab] after the last one.

        Long input goes in chunks of a fixed length, so that results do not depend on the budget.
        Raises Stopped, after which the state holds the chunks that were finished.
        """
        for start in range(0, len(ids), PREFILL_CHUNK):
            chunk = ids[start : start + PREFILL_CHUNK]
            self._give_torch_threads(len(chunk))
            logits = self._pass([(chunk, state)])
        if self.gpu is not None and len(ids) > 1:
            self.gpu.promise.look()  # nothing takes more of a device than a prefill
        values: NDArray[np.float32] = logits[0].numpy()
        return values

    def states(self, state: State, ids: Sequence[int]) -> NDArray[np.float32]:
        """Appends one chunk of ids, and returns what the last layer leaves, normed: [T, D].

        At most PREFILL_CHUNK ids. Raises like `extend`.
        """
        self._give_torch_threads(len(ids))
        found = self._with_memory(lambda: self.model.extend([(ids, state)], self.experts, "states"))
        values: NDArray[np.float32] = found.numpy()
        return values

    def all_logits(self, state: State, ids: Sequence[int]) -> Tensor:
        """Appends one chunk of ids, and returns the logits after each: [T, vocab]. As `states`."""
        self._give_torch_threads(len(ids))
        return self._with_memory(lambda: self.model.extend([(ids, state)], self.store, "all"))

    @property
    def batches(self) -> bool:
        """Whether a row of `step` is what it would be alone; not so with torch and float32."""
        return self.manifest.dtype != "F32"

    def step(self, tokens: Sequence[tuple[State, int]]) -> NDArray[np.float32]:
        """Appends one token to each of several states in one pass; logits [requests, vocab].

        At most MOST_PARALLEL: then a row is what it would be alone, if `batches`. Raises like
        `extend`; a pass that fails leaves every state as it was.
        """
        self._give_torch_threads(len(tokens))
        logits = self._pass([([token], state) for state, token in tokens])
        values: NDArray[np.float32] = logits.numpy()
        return values

    def _pass(self, batch: Sequence[tuple[Sequence[int], State]]) -> Tensor:
        """One pass of the model; one that an error cuts off leaves nothing pinned."""
        return self._with_memory(lambda: self.model.extend(batch, self.experts))

    @property
    def _scarce(self) -> tuple[type[Exception], ...]:
        """What is raised when a device has no memory left."""
        return () if self.gpu is None else self.gpu.device.out_of_memory

    def _loaded(self, what: str, load: Callable[[], Result]) -> Result:
        try:
            with device_faults():
                return load()
        except self._scarce as error:
            words = f"no device memory is left for {what}: {error}"
            raise OutOfDeviceMemory(words) from error

    @device_faults()
    def _with_memory(self, compute: Callable[[], Result]) -> Result:
        """compute(), which changes nothing when it fails; once more where a device had no memory
        for it, with fewer experts there. Raises OutOfMemory the second time."""
        words = ""
        for attempt in range(2):
            try:
                with device_faults():
                    return compute()
            except self._scarce as error:
                words = str(error)
            except BaseException:
                self.store.abandon()
                raise
            # Here the traceback is gone, and with it what the pass had computed.
            self.store.abandon()
            try:
                if attempt or not self.store.shrink():
                    break
            except self._scarce:
                break
        raise OutOfMemory(f"no device memory is left for a pass: {words}")

    def _give_torch_threads(self, rows: int) -> None:
        """Few rows are the native kernels' work: torch's threads would spin beside theirs.

        In float32 torch does all of it.
        """
        alone = rows <= MOST_ROWS and self.manifest.dtype != "F32"
        wanted = 1 if alone else self.placement.threads
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)

    def begin_request(self, state: State) -> int:
        """From here on the rows of `state` belong to a request of their own; its number."""
        state.request = next(self._requests)
        return state.request

    def end_request(self, request: int, counts: bool) -> None:
        """What the request has routed goes into the EAMC, if it `counts`.

        That it cannot be written is a note: an answer is worth more than the memory of it.
        """
        self.store.end_request(request)
        self._keep_promise()
        if self.recorder is None:
            return
        eam = self.recorder.finish(request)
        if eam is None or not counts:
            return
        try:
            self.eamc.append(eam)
        except OSError as error:
            self.recorder, self.experts = None, self.store
            self.notes.append(f"the EAMC of {self.manifest.model} cannot be written: {error}")

    @device_faults()
    def _keep_promise(self) -> None:
        """Experts make room for what CUDA turns out to take beyond what was counted for it."""
        excess = None if self.gpu is None else self.gpu.promise.excess()
        if excess is None or not excess.size_bytes:
            return
        assert self.gpu is not None
        given, promise = None, self.gpu.promise
        for more in (promise.margin_bytes, 0) if excess.beyond_bytes else (0,):
            with suppress(*self._scarce):  # others took what was given up for a moment
                size, beyond = excess.of_torch_bytes + more, excess.beyond_bytes + more
                given = self.store.give_up(size, beyond)
            if given is not None:
                promise.keep(more)
                break
        if given == 0:
            return  # the budget had room for it
        words = (
            f"CUDA itself takes {format_bytes(excess.size_bytes)} more than was counted for it: "
        )
        words += f"{given} device slots given back" if given else "--device-memory is exceeded"
        self.notes.append(words)

    def record(self, name: str) -> Recording:
        """From here on the events themselves are kept, in what is returned. Needs config.trace."""
        assert self.recorder is not None
        return self.recorder.record(name)

    @property
    def lost(self) -> bool:
        """Whether the GPU, or its last slot, is gone: every pass will fail, or do without."""
        if self.gpu is None:
            return False
        try:
            self.gpu.context.memory()
        except DeviceError:
            return True
        return self.store.lost

    def take_notes(self) -> list[str]:
        """The notes since the last call."""
        inside = None if self.gpu is None else self.gpu.dense_math
        for note in (self.store.note, None if inside is None else inside.note):
            if note is not None and note not in self._told:
                self._told.add(note)
                self.notes.append(note)
        taken = self.notes[:]
        self.notes.clear()
        return taken

    @contextmanager
    def stoppable(self, stopped: Callable[[], bool]) -> Iterator[None]:
        """Within, a pass ends with Stopped at the next layer once `stopped` says so."""
        self.store.stopped = stopped
        try:
            yield
        finally:
            self.store.stopped = lambda: False

    @device_faults()
    def close(self) -> None:
        """Ends readers and worker, and takes the engine off the register.

        States must be let go of first: on a GPU their memory is given back here.
        """
        self._opened.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _kernels(manifest: Manifest) -> tuple[str, ...]:
    """Which kernels compute, and whether that is slow; torch alone computes float32."""
    if manifest.dtype == "F32":
        return ()
    slow = "" if kernels_are_fast() else ", slow: this processor has no AVX2"
    return (f"kernels: {kernel_path()}{slow}",)
