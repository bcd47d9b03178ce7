"""Show the GPU part of `moeinf plan`, with the provenance of each figure.

The placement itself is decided in runtime/placement/gpu_plan.py.
"""

from __future__ import annotations

from moeinf.offload.gpu_tier.miss_split import Miss
from moeinf.runtime.jobs.plan_document import Bus, bus_words
from moeinf.runtime.placement.gpu_plan import DevicePlacement
from moeinf.runtime.sizes import format_bytes

_MISSES: dict[Miss, str] = {
    "auto": "divided between bus and CPU, so that both end together",
    "compute": "computed by the CPU where they lie",
    "fetch": "fetched over the bus",
}


def device_fields(gpu: DevicePlacement, miss: Miss, bus: Bus | None) -> list[tuple[str, str]]:
    """Return the lines of `moeinf plan` about the GPU."""
    size = format_bytes
    speed = "" if bus is None else f"{size(round(bus[0]))}/s "
    dense = "no: they stay in RAM"
    if gpu.inside:
        dense = f"{size(gpu.dense_bytes)} and {size(gpu.kv_bytes)}"
    return [
        ("experts on the GPU", f"{gpu.slots}, {size(gpu.arena_bytes)} of {gpu.gpu}"),
        ("dense weights and KV cache there", dense),
        (
            "device memory",
            f"at most {size(gpu.peak_bytes)} of {size(gpu.budget_bytes)} ({gpu.provenance}), with "
            f"{size(gpu.workspace_bytes)} of workspace; {size(gpu.context_bytes)} for CUDA itself "
            f"({gpu.context_why})",
        ),
        ("what is not there", f"{_MISSES[miss]} (--miss {miss})"),
        ("bus", f"{speed}({bus_words(bus)})"),
    ]
