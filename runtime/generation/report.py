"""The figures of one answer, with the names of `run --json` and of `--verbose`.

Names and units are those of docs/architecture.md, "Measurements".
"""

from __future__ import annotations

from typing import Any

from moeinf.offload.store.stats import StoreStats
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.engine.gpu_tier import OpenGpu
from moeinf.runtime.generation.generate import Generation
from moeinf.runtime.machine.memory import peak_rss_bytes
from moeinf.runtime.sizes import format_bytes


def statistics(engine: Engine, generation: Generation) -> dict[str, Any]:
    """Return the `stats` of `run --json`; a figure without decoded tokens is null."""
    steps, seconds, store = generation.decode_steps, generation.decode_seconds, generation.store
    return {
        "ttft_ms": round(generation.prefill_seconds * 1e3, 3),
        "tpot_ms": round(seconds / steps * 1e3, 3) if steps else None,
        "tokens_per_s": round(steps / seconds, 3) if steps and seconds else None,
        "hit_rate": round(store.hit_rate, 4) if store.hit_rate is not None else None,
        "bytes_read_per_token": store.decode_bytes_read // steps if steps else None,
        "stall_share": round(store.decode_stall_seconds / seconds, 4)
        if steps and seconds
        else None,
        "tokens_drafted": generation.drafts[0],
        "tokens_accepted": generation.drafts[1],
        "peak_rss_bytes": peak_rss_bytes(),
        "experts_resident": engine.store.resident,
        "device": on_device(engine, store, steps),
        "kv": engine.info.kv,
        "lossy": lossy(engine, store),
        **foresight(store, steps),
    }


def lossy(engine: Engine, store: StoreStats) -> dict[str, Any] | None:
    """Return the lossy options and the shares of decode events that they changed; None: exact."""
    options = engine.info.lossy
    if not options:
        return None
    shares = {"skipped_share": store.skipped_share, "rerouted_share": store.rerouted_share}
    low: dict[str, Any] = {}
    if "q2_on_miss" in options:
        shares["low_share"] = store.low_share
        low = {
            "low_reads": store.low_reads,
            "low_bytes_read": store.low_bytes_read,
            "low_bytes_spared": store.low_bytes_spared,
        }
    rounded = {name: None if share is None else round(share, 4) for name, share in shares.items()}
    return {**options, **rounded, **low}


def on_device(engine: Engine, store: StoreStats, steps: int) -> dict[str, Any] | None:
    """Return the device tier's figures; None without a device. `steps` are decode passes."""
    gpu, events = engine.gpu, store.decode_events
    if gpu is None:
        return None
    held = gpu.promise.look()
    return {
        "gpu": gpu.placement.gpu,
        "miss": gpu.miss,
        "experts": engine.store.device_resident,
        "hit_rate": round(store.decode_device_hits / events, 4) if events else None,
        "cpu_share": round(store.decode_cpu_events / events, 4) if events else None,
        "bus_bytes_per_token": store.decode_bus_bytes // steps if steps else None,
        "held_bytes": held.peak_bytes,
        "held_is_measured": held.measured,
        "promised_bytes": gpu.placement.peak_bytes,
    }


def foresight(store: StoreStats, steps: int) -> dict[str, Any]:
    """Return the causes of decode hits, the use of prefetches, and the time of decisions.

    `steps` are decode passes. `run --json` and `bench --json` have the same keys.
    """
    accuracy = store.ahead_accuracy
    return {
        "hits": {
            "cached": store.decode_hits_cached,
            "hinted": store.decode_hits_hinted,
            "predicted": store.decode_hits_predicted,
        },
        "ahead_bytes": {
            "read": store.ahead_bytes_read,
            "used": store.ahead_bytes_used,
            "wasted": max(0, store.ahead_bytes_wasted),
        },
        "prefetch_accuracy": round(accuracy, 4) if accuracy is not None else None,
        "policy_us_per_token": round(1e6 * store.decode_policy_seconds / steps, 1)
        if steps
        else None,
    }


def verbose_lines(
    engine: Engine, generation: Generation, load_seconds: float
) -> list[tuple[str, str]]:
    """Return Ollama's lines, then ours: (label, value)."""
    g, store, steps = generation, generation.store, generation.decode_steps
    total = load_seconds + g.prefill_seconds + g.decode_seconds
    lines = [
        ("total duration", _seconds(total)),
        ("load duration", _seconds(load_seconds)),
        ("prompt eval count", f"{g.prefilled_tokens} token(s)"),
        ("prompt eval duration", _seconds(g.prefill_seconds)),
        ("prompt eval rate", _rate(g.prefilled_tokens, g.prefill_seconds)),
        ("eval count", f"{len(g.tokens)} token(s)"),
        ("eval duration", _seconds(g.decode_seconds)),
        ("eval rate", _rate(steps, g.decode_seconds)),
    ]
    hit_rate = "-" if store.hit_rate is None else f"{store.hit_rate:.1%}"
    lines += [("expert hit rate", f"{hit_rate} (decode)")]
    if steps:
        stall = store.decode_stall_seconds / g.decode_seconds if g.decode_seconds else 0.0
        lines += [
            ("experts loaded", f"{store.decode_loads / steps:.1f} per token"),
            ("read", f"{store.decode_bytes_read / steps / 2**20:.2f} MiB per token"),
            ("stall share", f"{stall:.1%}"),
            ("hits by cause", _causes(store)),
            ("deciding", f"{1e6 * store.decode_policy_seconds / steps:.0f} us per token"),
        ]
    drafted, accepted = g.drafts
    if drafted:
        lines.append(("drafted tokens", f"{drafted}, {accepted} accepted"))
    resident = engine.store.resident
    if engine.gpu is not None:
        lines += _device_lines(engine.gpu, engine.store.device_resident, store)
        inside = engine.gpu.dense_math
        if inside is not None and inside.graphs is not None:
            lines.append(("CUDA graphs", inside.graphs))
    if engine.info.kv != "full":
        lines.append(("KV cache", engine.info.kv))
    lines += [
        ("prefetch accuracy", _ahead(store)),
        ("read in all", f"{format_bytes(store.bytes_read)} ({store.loads} experts)"),
        (
            "resident",
            f"{resident} of {engine.info.experts} experts, "
            f"{format_bytes(resident * engine.info.slot_bytes)} in RAM",
        ),
    ]
    return lines


def _device_lines(gpu: OpenGpu, experts: int, store: StoreStats) -> list[tuple[str, str]]:
    events, place = max(1, store.decode_events), gpu.placement
    held, promised = gpu.promise.look(), format_bytes(place.peak_bytes)
    whose = "NVML's count" if held.measured else "CUDA's own part is assumed"
    return [
        ("experts on device", f"{experts} of {place.slots} slots, {place.gpu}"),
        (
            "decode events",
            f"{store.decode_device_hits / events:.1%} in device slots, "
            f"{store.decode_cpu_events / events:.1%} computed by the CPU",
        ),
        ("over the bus", f"{format_bytes(store.bus_bytes)} in all"),
        (
            "device memory",
            f"{format_bytes(held.peak_bytes)} held at most of {promised} promised ({whose})",
        ),
    ]


def _causes(store: StoreStats) -> str:
    hinted, predicted = store.decode_hits_hinted, store.decode_hits_predicted
    return f"{store.decode_hits_cached} cached, {hinted} hinted, {predicted} predicted"


def _ahead(store: StoreStats) -> str:
    if not store.ahead_bytes_read:
        return "- (nothing was read ahead)"
    read, used, wasted = (
        format_bytes(max(0, size))
        for size in (store.ahead_bytes_read, store.ahead_bytes_used, store.ahead_bytes_wasted)
    )
    accuracy = "-" if store.ahead_accuracy is None else f"{store.ahead_accuracy:.0%}"
    return f"{accuracy} ({read} read ahead: {used} used, {wasted} wasted)"


def _seconds(value: float) -> str:
    return f"{value:.3f}s" if value >= 1 else f"{value * 1e3:.3f}ms"


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:.2f} tokens/s" if seconds and count else "-"
