"""Open an engine step by step: plan, open the expert store, load the weights, warm up.

Each step registers what it opens in the given ExitStack, which closes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from moeinf.errors import reason
from moeinf.models.base import Model
from moeinf.models.seq2seq.encoder_decoder import EncoderDecoder
from moeinf.native import (
    OutOfDeviceMemory,
    kernel_path,
    kernels_are_fast,
    set_compute_threads,
)
from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.store.expert_store import ExpertStore
from moeinf.runtime.config import EngineConfig, Settings, lossy_options
from moeinf.runtime.dense.cpu_linear import DenseMath
from moeinf.runtime.eamc.collection_file import EamcState
from moeinf.runtime.engine.cache_routing import CacheAwareMath, check_route
from moeinf.runtime.engine.gpu_tier import OpenGpu, open_gpu
from moeinf.runtime.engine.info import EngineInfo
from moeinf.runtime.engine.loader import (
    LoadedModel,
    LoadProgress,
    check_small_files,
    load_model,
    open_store,
)
from moeinf.runtime.engine.notes import Notes
from moeinf.runtime.engine.pipeline.cut import Part, PartMath
from moeinf.runtime.library.draft_model import find_draft
from moeinf.runtime.library.library import Library, NoSuchModel
from moeinf.runtime.library.low_copy import find_low_copy
from moeinf.runtime.library.manifest import MANIFEST, Manifest
from moeinf.runtime.library.processes import Figures, Registration, Registry
from moeinf.runtime.machine.disk_bench import Reading
from moeinf.runtime.machine.gpu import device_faults
from moeinf.runtime.machine.measurements import DEFAULT_READING
from moeinf.runtime.machine.memory import (
    available_bytes,
    core_count,
    keep_code_caches_small,
    keep_heap_small,
    rss_bytes,
    total_bytes,
)
from moeinf.runtime.ollama_options import Options
from moeinf.runtime.placement.bandwidth import check_drive, drive_of
from moeinf.runtime.placement.draft_plan import may_draft, place_both
from moeinf.runtime.placement.plan import Placement
from moeinf.runtime.prefix.cache import PrefixCache
from moeinf.runtime.prefix.opening import open_prefix_cache
from moeinf.runtime.requests import Limits, SamplingOptions
from moeinf.runtime.sampling.grammar_processes import Grammars
from moeinf.runtime.sampling.sampler import model_defaults
from moeinf.runtime.text.chat_template import TemplateWorker
from moeinf.runtime.text.tokenizer import Tokenizer, end_tokens

_WITH_A_GPU = "adaptive"  # the policy there in place of `learned`


@dataclass(frozen=True)
class Plan:
    """An engine that is registered and placed, but not yet open."""

    manifest: Manifest
    folder: Path
    config: EngineConfig
    settings: Settings
    placement: Placement
    registration: Registration
    notes: Notes
    peak_bytes: int  # of the whole process
    low: tuple[Path, Manifest] | None = None  # the model with copies of the experts in fewer bits
    draft: tuple[Manifest, Path, Placement] | None = None  # the model that drafts
    modules: Placement | None = None  # of the model's own layers that draft

    @property
    def traced(self) -> bool:
        """True if requests are traced; False if $MOEINF_HOME is not writable."""
        return self.config.trace and self.registration.seen


def plan_engine(
    manifest: Manifest, folder: Path, config: EngineConfig, settings: Settings, opened: ExitStack
) -> Plan:
    """Place the model beside the live engines and register it among them, in one step.

    Raises DoesNotFit, BadContext, CannotRoute, NoLowCopy, UnusableDraft and DamagedModel, and
    NoSuchModel if the model disappears meanwhile.
    """
    if config.cache_aware:
        check_route(manifest)
    low, draft, library = None, None, Library(settings)
    if config.q2_on_miss is not None:
        low = find_low_copy(manifest, library)
    if config.draft is not None:
        draft = find_draft(config.draft, manifest, folder, library)
    folders = [folder]
    folders += [] if low is None else [low[0]]
    folders += [] if draft is None else [draft[1]]
    keep_code_caches_small()
    keep_heap_small()
    placements: list[tuple[Placement, Placement | None]] = []
    drafting = None if draft is None else draft[0]
    before_bytes = rss_bytes()

    def peak_bytes(claimed_bytes: int) -> int | None:
        free = available_bytes() - claimed_bytes
        machine = free, core_count(), total_bytes()
        placements.append(place_both(manifest, config, *machine, drafting))
        there = all((each / MANIFEST).is_file() for each in folders)
        return before_bytes + placements[-1][0].peak_bytes if there else None

    reads = "" if low is None else str(low[1].model)
    reads = reads if drafting is None else str(drafting.model)
    registration = Registry(settings.run).register(str(manifest.model), peak_bytes, reads)
    if registration is None:
        raise NoSuchModel(str(manifest.model), [])
    opened.callback(registration.close)
    (placement, beside), notes = placements[-1], Notes()
    if placement.on_device is not None and config.policy == "learned":
        config = replace(config, policy=_WITH_A_GPU)
    if not registration.seen:
        notes.append(f"{settings.home} cannot be written: nothing is remembered")
    torch.set_num_threads(placement.threads)
    set_compute_threads(placement.threads)
    check_small_files(folder, manifest)
    for option in lossy_options(config.lossy):
        notes.append(f"lossy: with {option}, what is in memory changes the result")
    for fallback in placement.fallbacks:
        notes.append(fallback)
    peak = before_bytes + placement.peak_bytes
    plan = Plan(manifest, folder, config, settings, placement, registration, notes, peak, low)
    if draft is None:
        return replace(plan, modules=beside)
    return plan if beside is None else replace(plan, draft=(*draft, beside))


@dataclass(frozen=True)
class Text:
    """The parts that turn text into tokens and back."""

    tokenizer: Tokenizer
    template: TemplateWorker | None
    grammars: Grammars
    ends: frozenset[int]
    sampling: SamplingOptions
    limits: Limits


def open_text(manifest: Manifest, folder: Path, opened: ExitStack) -> Text:
    """Read the tokenizer and start the template worker, which starts up while the weights load."""
    given = manifest.defaults
    tokenizer = Tokenizer(folder, None if given is None else given.template)
    template, options = None, Options() if given is None else given.options
    if tokenizer.chat_template is not None:
        template = TemplateWorker(tokenizer.chat_template)
        opened.callback(template.close)
    ends = end_tokens(folder, tokenizer)
    grammars = Grammars(folder / "tokenizer.json", min(ends, default=None))
    opened.callback(grammars.close)
    sampling = options.sampling.over(model_defaults(folder))
    return Text(tokenizer, template, grammars, ends, sampling, options.limits)


@dataclass(frozen=True)
class Tiers:
    """The expert store, and the GPU, drive reading and EAMC that it uses.

    choices: one line per decision. past: the EAMC of past requests; None if it is not traced or
    cannot be read.
    """

    store: ExpertStore
    gpu: OpenGpu | None
    reading: Reading
    eamc: EamcState | None
    past: Eamc | None
    choices: tuple[str, ...]


def open_tiers(plan: Plan, opened: ExitStack) -> Tiers:
    """Open the GPU if the plan has one, and an empty expert store. Raises OutOfDeviceMemory."""
    manifest, folder, config, placement = plan.manifest, plan.folder, plan.config, plan.placement
    drive = drive_of(plan.settings, folder, manifest)
    reading = DEFAULT_READING if drive is None else drive.reading
    gpu = None
    if placement.on_device is not None:
        gpu = open_gpu(placement.on_device, manifest, config, plan.settings, placement.threads)
        opened.callback(gpu.close)
    eamc = EamcState(plan.settings, manifest, plan.notes.append) if plan.traced else None
    past = None if eamc is None else _past_requests(eamc, plan)
    with _room_for("experts", gpu):
        store = open_store(folder, manifest, placement, config, reading, past, gpu, plan.low)
    opened.callback(store.close)
    if drive is not None:  # before the store closes
        opened.callback(
            lambda: check_drive(plan.settings, folder, drive, store.host.call_bytes_per_s())
        )
    how = drive or f"{reading.readers} readers: `moeinf devices` would measure the drive"
    choices = (f"disk: {how}", *_kernels(manifest), *(() if gpu is None else gpu.notes))
    if gpu is not None and config.policy == _WITH_A_GPU:
        choices += (f"policy {_WITH_A_GPU}: `learned` is not measured with a GPU",)
    return Tiers(store, gpu, reading, eamc, past, choices)


def _past_requests(eamc: EamcState, plan: Plan) -> Eamc | None:
    """Return the routing of past requests; add a note and return None if it cannot be read."""
    try:
        return eamc.live()
    except OSError as error:
        plan.notes.append(f"the EAMC of {plan.manifest.model} cannot be read: {reason(error)}")
        return None


def load_weights(
    plan: Plan, tiers: Tiers, opened: ExitStack, progress: LoadProgress | None = None
) -> LoadedModel:
    """Read the dense weights. Raises DamagedModel, OutOfDeviceMemory."""
    inside: DenseMath | None = None if tiers.gpu is None else tiers.gpu.dense_math
    if isinstance(plan.manifest, Part):
        inside = PartMath(plan.manifest)
    if plan.config.cache_aware:
        inside = CacheAwareMath(tiers.store, plan.config.cache_aware)
    with _room_for("dense weights", tiers.gpu):
        about = plan.folder, plan.manifest, plan.config, tiers.reading
        model = load_model(*about, inside, progress, opened)
    weights = LoadedModel(model)
    opened.callback(weights.close)
    return weights


def open_prefixes(plan: Plan, weights: LoadedModel, opened: ExitStack) -> PrefixCache | None:
    """Open the cache of the KV of ended requests, if the plan has memory for it."""
    model, note = weights.model, plan.notes.append_once
    about = (plan.manifest, plan.placement, plan.config, plan.settings)
    return open_prefix_cache(model, *about, plan.traced, note, opened)


@contextmanager
def _room_for(what: str, gpu: OpenGpu | None) -> Iterator[None]:
    """Raise OutOfDeviceMemory, naming `what`, when the device is out of memory."""
    try:
        with device_faults():
            yield
    except scarcity(gpu) as error:
        words = f"no device memory is left for {what}: {error}"
        raise OutOfDeviceMemory(words) from error


def scarcity(gpu: OpenGpu | None) -> tuple[type[Exception], ...]:
    """Return the exceptions that mean that the device is out of memory."""
    return () if gpu is None else gpu.device.out_of_memory


def facts(
    plan: Plan,
    text: Text,
    tiers: Tiers,
    model: Model,
    warmed: Sequence[str],
    load_seconds: float,
) -> EngineInfo:
    """Return the facts of an engine that is now open."""
    config, manifest = plan.config, plan.manifest
    return EngineInfo(
        manifest=manifest,
        folder=plan.folder,
        placement=plan.placement,
        policy=config.policy,
        sampling=text.sampling,
        limits=text.limits,
        ends=text.ends,
        vocab_size=model.vocab_size,
        reads_sources=isinstance(model, EncoderDecoder),
        digest=manifest.digest,
        lossy=config.lossy,
        choices=(*plan.placement.notes, *tiers.choices, *warmed),
        load_seconds=load_seconds,
        peak_bytes=plan.peak_bytes,
        reproducible=config.reproducible,
        drafts=tiers.gpu is None and may_draft(manifest, config),
    )


def warm_up(tiers: Tiers) -> tuple[str, ...]:
    """Read experts into empty slots, in the order of past use; return a line for the user."""
    experts = tiers.store.warm([] if tiers.past is None else tiers.past.probable_cells())
    first = "" if tiers.past is None else ", what past requests used first"
    return (f"reading ahead {experts} experts{first}",) if experts else ()


def _kernels(manifest: Manifest) -> tuple[str, ...]:
    """Return a line that names the kernels and warns if they are slow. F32 uses torch alone."""
    if manifest.dtype == "F32":
        return ()
    slow = "" if kernels_are_fast() else ", slow: this processor has no AVX2"
    return (f"kernels: {kernel_path()}{slow}",)


def figures(
    about: Callable[[], EngineInfo], store: ExpertStore, expires_at: Callable[[], int | None]
) -> Figures:
    """Return the figures for `ps`. Another thread calls this, so it reads counters only."""
    info = about()
    slots, resident, on_device = info.manifest.slots, store.resident, store.device_resident
    gpu = info.placement.on_device
    return Figures(
        device_experts=on_device,
        host_experts=resident,
        disk_experts=slots.experts,
        device_bytes=on_device * info.slot_bytes,
        host_bytes=resident * info.slot_bytes,
        disk_bytes=slots.max_bytes,
        hit_rate=store.stats.hit_rate,
        digest=info.digest,
        context=info.context,
        device=info.device,
        expires_at=expires_at(),
        device_peak_bytes=0 if gpu is None else gpu.peak_bytes,
        peak_bytes=info.peak_bytes,
    )
