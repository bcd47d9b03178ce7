"""Decide where a model's parts go on this machine.

This module loads nothing: sizes come from the manifest. bounds.py has the speed that a plan allows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from moeinf.errors import Unavailable
from moeinf.native import MAX_COMPUTE_THREADS
from moeinf.offload.store.budget import DoesNotFit, SlotBudget
from moeinf.runtime.config import MOST_WINDOW, PREFILL_CHUNK, EngineConfig, Kv, PrefixBudget
from moeinf.runtime.library.low_copy import low_layout
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.machine.device_choice import choose_processor
from moeinf.runtime.placement.gpu_plan import DeviceBudget, DevicePlacement, most_tokens
from moeinf.runtime.sizes import format_bytes

HEADROOM_BYTES = 1 << 30  # left to other processes by the default budget, and at least
_HEADROOM_SHARE = 1 / 8  # of the machine's memory; a running engine gives back below a tenth
OVERHEAD_BYTES = 64 << 20  # the process beyond imports, dense weights, KV cache and experts
_CONTEXT_STEP = 256
_LEAST_CONTEXT = 16  # the minimum for --ctx
_WINDOW_SHARE, _WINDOW_BYTES = 1 / 8, 64 << 20  # of the experts' memory, and at least
_PREFIX_SHARE, _SCARCE_SHARE = 1 / 2, 1 / 32  # of the RAM that experts leave; else of theirs
_LOW_SHARE = 1 / 8  # of the experts' memory: copies in fewer bits, if these are used
_MOST_PREFIX_BYTES = 4 << 30
_CONTEXT_SHARE = 0.25  # of the memory that --memory leaves: the KV cache, unless --ctx is given


class BadContext(Unavailable, ValueError):
    """The context is longer than the model's, or its cache does not fit."""

    code = "bad_context"
    hint = "a smaller --ctx"


@dataclass(frozen=True)
class Placement:
    """The memory that one engine will use, in bytes, and one line for each choice.

    fallbacks: costly choices, which are always reported.
    """

    memory_bytes: int  # budget for experts
    slots: int
    slot_bytes: int
    min_memory_bytes: int
    context: int
    kv_bytes: int
    dense_bytes: int
    scratch_bytes: int
    threads: int
    window: int = PREFILL_CHUNK  # tokens of a prompt that go through a layer before the next
    prefix_bytes: int = 0  # for the KV of ended requests
    low_slots: int = 0  # for copies of experts in fewer bits, a part of memory_bytes
    low_slot_bytes: int = 0
    table_bytes: int = 0  # for rows of tables on disk
    draft_bytes: int = 0  # of the draft model, in all
    kv: Kv = "full"  # the form of the KV cache
    device: str = "cpu"
    on_device: DevicePlacement | None = None
    notes: tuple[str, ...] = field(default=())
    fallbacks: tuple[str, ...] = field(default=())

    @property
    def experts_bytes(self) -> int:
        return self.slots * self.slot_bytes + self.low_bytes

    @property
    def low_bytes(self) -> int:
        return self.low_slots * self.low_slot_bytes

    @property
    def peak_bytes(self) -> int:
        """The maximum that the process will hold in RAM, imports excluded."""
        inside = self.on_device is not None and self.on_device.inside
        dense = 0 if inside else self.dense_bytes + self.kv_bytes
        own = self.experts_bytes + dense + self.scratch_bytes + self.prefix_bytes
        return own + self.table_bytes + self.draft_bytes


def place(
    manifest: Manifest,
    config: EngineConfig,
    available_bytes: int,
    cores: int,
    machine_bytes: int = 0,
) -> Placement:
    """Decide context, slots and threads. available_bytes excludes other engines' claims.

    machine_bytes: all memory of the machine.

    Raises DoesNotFit when the experts get less than min_memory_bytes, BadContext,
    DeviceUnavailable, DeviceDoesNotFit.
    """
    # A lossy option reads the host's slots, and no kernel of a GPU reads KV in q8.
    wanted = "cpu" if config.lossy or config.kv == "q8" else config.device
    processor = choose_processor(wanted, config.device_memory, config.libcuda)
    notes, fallbacks = [str(processor)], list[str]()
    slots = manifest.slots
    device = None
    if processor.gpu is not None:
        device = DeviceBudget(manifest, config.device_memory, processor.gpu)
    scratch = OVERHEAD_BYTES + working_bytes(manifest)
    headroom = max(HEADROOM_BYTES, int(machine_bytes * _HEADROOM_SHARE))
    tables = table_bytes(manifest, config)
    fixed = manifest.dense_bytes + scratch + tables + headroom
    form: Kv = "full" if manifest.encoder_layers else config.kv
    asked = None if config.memory is None else config.memory.of(slots.max_bytes)
    left = available_bytes - fixed - min(asked or 0, slots.max_bytes)
    context, why = _context(manifest, config, form, int(left * _CONTEXT_SHARE), device)
    notes += [] if why is None else [f"context {context} tokens ({why})"]
    kv = config.parallel * manifest.kv_bytes(context, form)
    on_device = None if device is None else device.place(context, kv)
    if device is not None and on_device is not None:
        notes.append(_on_device_words(on_device))
        if on_device.inside:
            fixed, kv = fixed - manifest.dense_bytes, 0
        else:
            fallbacks.append(_in_ram_words(device, manifest, config.parallel, context))
    if device is None and config.miss != "auto":
        fallbacks.append(f"--miss {config.miss} changes nothing without --device cuda")
    if form != config.kv:
        fallbacks.append("--kv q8 changes nothing: an encoder-decoder keeps its KV in full")
    prefix = 0
    if config.prefix is not None and device is None and not manifest.encoder_layers:
        prefix = _prefix_bytes(config.prefix, slots, asked, available_bytes - fixed - kv)
        notes.append(f"prefix cache {format_bytes(prefix)}")
    budget = asked
    if budget is None:
        budget, why = _free_budget(slots, available_bytes - fixed - kv - prefix)
        notes.append(why)
    low_slots, low_slot_bytes = _low_slots(manifest, config, budget)
    low_bytes = low_slots * low_slot_bytes
    if low_bytes and budget - low_bytes < slots.min_bytes:
        raise DoesNotFit(budget, slots.min_bytes + low_bytes)
    count = slots.slots(budget - low_bytes)
    window = PREFILL_CHUNK
    if device is None and count < slots.experts:
        window = _window(manifest, config, context, count * slots.slot_bytes)
    extra = (window - PREFILL_CHUNK) * _window_bytes(manifest)
    scratch, fixed = scratch + extra, fixed + extra
    total = count * slots.slot_bytes + low_bytes + fixed - headroom + kv + prefix
    notes += _warnings(manifest, count, total, available_bytes)
    return Placement(
        memory_bytes=budget,
        slots=count,
        slot_bytes=slots.slot_bytes,
        min_memory_bytes=slots.min_bytes,
        context=context,
        kv_bytes=config.parallel * manifest.kv_bytes(context, form),
        dense_bytes=manifest.dense_bytes,
        scratch_bytes=scratch,
        threads=config.threads or min(cores, MAX_COMPUTE_THREADS, threads_worth_having(manifest)),
        window=window,
        prefix_bytes=prefix,
        table_bytes=tables,
        low_slots=low_slots,
        low_slot_bytes=low_slot_bytes,
        kv=form,
        device=processor.name,
        on_device=on_device,
        notes=tuple(notes),
        fallbacks=tuple(fallbacks),
    )


def _free_budget(slots: SlotBudget, free_bytes: int) -> tuple[int, str]:
    """Return the bytes for experts without --memory, and the reason. Raises DoesNotFit."""
    budget = min(slots.max_bytes, free_bytes)
    if budget < slots.min_bytes:
        raise DoesNotFit(max(0, budget), slots.min_bytes)
    why = "all experts" if budget == slots.max_bytes else "what is free"
    return budget, f"memory for experts {format_bytes(budget)} ({why})"


def _low_slots(manifest: Manifest, config: EngineConfig, budget: int) -> tuple[int, int]:
    """Return how many slots copies of experts in fewer bits get, and the bytes of one.

    None if all experts fit: nothing is absent then. Else a share of the budget, and at least what
    one token needs in a layer. Raises NoLowCopy.
    """
    if config.q2_on_miss is None:
        return 0, 0
    size = low_layout(manifest).slot_bytes
    if budget >= manifest.slots.max_bytes:
        return 0, size
    count = max(manifest.top_k, int(budget * _LOW_SHARE) // size)
    return min(count, manifest.slots.experts), size


def _prefix_bytes(
    given: PrefixBudget, slots: SlotBudget, asked: int | None, free_bytes: int
) -> int:
    """Return the RAM for the KV of ended requests.

    free_bytes: for it and the experts. asked: what the experts get in any case.
    """
    if given.memory_bytes is not None:
        return given.memory_bytes
    rest = free_bytes - min(asked or slots.max_bytes, slots.max_bytes)
    found = int(max(0, rest) * _PREFIX_SHARE)
    if asked is None:  # the experts give a little where none is left
        found = max(found, int(min(free_bytes, slots.max_bytes) * _SCARCE_SHARE))
        found = min(found, max(0, free_bytes - slots.min_bytes))
    return min(found, _MOST_PREFIX_BYTES)


def _warnings(manifest: Manifest, slots: int, total_bytes: int, available_bytes: int) -> list[str]:
    """Return a warning for each way in which the plan will be slow or fail."""
    found, layer_width = [], manifest.layers * manifest.top_k
    if slots < min(layer_width, manifest.slots.experts):
        found.append(
            f"{slots} slots are fewer than the {layer_width} experts that one token uses: "
            "every expert will be read again for every token"
        )
    if total_bytes > available_bytes:
        found.append(
            f"{format_bytes(total_bytes)} will be needed in all, {format_bytes(available_bytes)} "
            "are free: the system may end this process; give less --memory or --ctx"
        )
    return found


def _context(
    manifest: Manifest,
    config: EngineConfig,
    form: Kv,
    spare_bytes: int,
    device: DeviceBudget | None,
) -> tuple[int, str | None]:
    """Return the tokens of a KV cache, and the reason; None for --ctx. Raises BadContext.

    spare_bytes: of RAM. If the dense weights fit on a device, the cache goes there, too.
    """
    if config.context is not None:
        if config.context > manifest.max_context:
            raise BadContext(
                f"{manifest.model} has a context of at most "
                f"{manifest.max_context} tokens, got {config.context}"
            )
        return config.context, None
    asked = None if manifest.defaults is None else manifest.defaults.options.limits.context
    if asked is not None:
        return min(asked, manifest.max_context), "its num_ctx"

    def inside(context: int, share: float = 1.0) -> bool:
        taken = config.parallel * manifest.kv_bytes(context)
        return device is not None and taken <= share * device.spare_bytes(context)

    most, whose = manifest.max_context, "the model's"
    if manifest.usual_context is not None:
        most = manifest.usual_context
        whose = "the model's original one; a larger --ctx changes answers to short texts, too"
    what = "memory"
    if inside(_CONTEXT_STEP):
        tokens = most_tokens(lambda n: inside(n, _CONTEXT_SHARE), _CONTEXT_STEP, most)
        what = "device memory"
    else:
        affordable = max(0, spare_bytes - config.parallel * manifest.state_bytes)
        per_token = config.parallel * manifest.kv_token_bytes(form)
        tokens = max(affordable // per_token // _CONTEXT_STEP, 1) * _CONTEXT_STEP
    return (most, whose) if tokens >= most else (tokens, f"what {what} affords")


def _in_ram_words(device: DeviceBudget, manifest: Manifest, parallel: int, context: int) -> str:
    """Return a line on how to bring dense weights and KV cache to the device, if possible."""
    needed = device.inside_bytes(context, parallel * manifest.kv_bytes(context))
    least = parallel * manifest.kv_bytes(_LEAST_CONTEXT)
    smaller = ", or a smaller --ctx" if least <= device.spare_bytes(_LEAST_CONTEXT) else ""
    words = "dense weights and KV cache stay in RAM: to be on the GPU, too, they need "
    if needed <= device.there_bytes:
        return f"{words}--device-memory {-(-needed >> 20)}MiB with --ctx {context}{smaller}"
    size, there = format_bytes(needed), format_bytes(device.there_bytes)
    return f"{words}{size} of it with --ctx {context}, and it has {there} free{smaller}"


def _on_device_words(plan: DevicePlacement) -> str:
    dense = "dense weights, KV cache, " if plan.inside else ""
    return (
        f"device memory {format_bytes(plan.peak_bytes)} of {format_bytes(plan.budget_bytes)} "
        f"({plan.provenance}): {dense}{plan.slots} experts, workspace, and "
        f"{format_bytes(plan.context_bytes)} for CUDA itself ({plan.context_why})"
    )


def table_bytes(manifest: Manifest, config: EngineConfig) -> int:
    """Return the RAM for rows of tables on disk."""
    tables = manifest.tables
    return sum(table.cache_bytes(config.table_bytes // len(tables)) for table in tables)


def working_bytes(manifest: Manifest) -> int:
    """Return the bytes that a prefill chunk computes with: 2·K + 8 float32 rows per token.

    A source is read in one chunk, since each of its tokens sees all others.
    """
    chunk = max(PREFILL_CHUNK, manifest.max_context if manifest.encoder_layers else 0)
    return chunk * (manifest.hidden * manifest.top_k * 8 + manifest.hidden_width * 8 * 4)


def _window(manifest: Manifest, config: EngineConfig, context: int, experts_bytes: int) -> int:
    """Return the tokens of a prompt that go through a layer before the next layer.

    Every window reads the experts that have no slot. So a larger one reads less, and takes memory.
    """
    if manifest.encoder_layers:
        return PREFILL_CHUNK
    if config.window is not None:
        return config.window // PREFILL_CHUNK * PREFILL_CHUNK
    room = max(_WINDOW_BYTES, int(experts_bytes * _WINDOW_SHARE)) // _window_bytes(manifest)
    return max(1, min(MOST_WINDOW, context, room) // PREFILL_CHUNK) * PREFILL_CHUNK


def _window_bytes(manifest: Manifest) -> int:
    """Return the bytes for one more token in a window: K + 6 rows, and numbers of its experts."""
    item = 4 if manifest.dtype == "F32" else 2
    rows = manifest.hidden * manifest.top_k + manifest.hidden_width * 6
    return item * rows + 64 * manifest.top_k


def threads_worth_having(manifest: Manifest) -> int:
    """Return one thread per MiB that a layer reads for a token; more threads would only wait.

    Measured with the demo (0.34 MiB a layer): 1 thread decodes 2.0 times as fast as 2 threads. When
    another process keeps the second core busy, 1 thread is some 80 times as fast
    (docs/decisions/0011).
    """
    routed = manifest.layers * manifest.top_k * manifest.read_bytes
    per_layer = (manifest.dense_bytes + routed) // manifest.layers
    return max(1, per_layer >> 20)
