"""One row of the GPU table: makes the model, measures it, says how far it is from its floor.

    python -m benchmarks.gpu deepseek-v2-lite-bf16-24GiB        (a row; without one they are listed)

A row ends within ten minutes and leaves nothing: weights are made in a folder of its own (60 GiB of
disk are enough for any) and deleted, whatever happens. Weights are random with calibrated routing
(calibrated.py), tokens are forced: what a token computes and which experts it needs are like a real
model's, what it says is nothing.

    floor   dense weights, the KV cache and the experts that were in device slots ÷ the read speed
            of the device's memory (where dense weights had no room there: those two ÷ that of RAM),
            and the bytes of the other experts ÷ what bus and CPU move at once; all speeds measured
            in this run.

    device_held_bytes   the most that the process was seen holding of the device's memory, CUDA's
            own part and all workspaces included (by NVML, if device_held_is_measured), beside what
            was promised of it

`--fake LIBRARY` runs the same with the tests' fake libcuda, to see that the command works: then the
device is the CPU, and no figure means anything.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.calibrated import Calibration, calibrated, tokens
from benchmarks.shapes import shape
from moeinf.models.moe import TorchMath
from moeinf.offload.split import MISSES
from moeinf.runtime import gpu as gpus
from moeinf.runtime.bench import decode, prefill, read_ceiling, token_bytes
from moeinf.runtime.bus import measure_bus, measure_contended
from moeinf.runtime.config import EngineConfig
from moeinf.runtime.devices import now
from moeinf.runtime.engine import Engine
from moeinf.runtime.manifest import Manifest
from moeinf.runtime.sizes import parse_memory

PROMPT_TOKENS, NEW_TOKENS = 512, 32  # as the paper measures
_CEILING_BYTES, _CEILING_SUMS, _CEILING_ROUNDS = 512 << 20, 16, 3


@dataclass(frozen=True)
class Row:
    """A shape, its format, and the device's memory."""

    shape: str
    tag: str
    device_memory: str

    @property
    def name(self) -> str:
        return f"{self.shape}-{self.tag}-{self.device_memory}"


ROWS: Mapping[str, Row] = {
    row.name: row
    for row in (
        Row("deepseek-v2-lite", "bf16", "24GiB"),  # the paper's setting
        Row("deepseek-v2-lite", "q4", "4GiB"),
        Row("deepseek-v2-lite", "q4", "2GiB"),
        Row("qwen3-30b-a3b", "q4", "8GiB"),
        Row("qwen3-30b-a3b", "q4", "4GiB"),
        Row("mixtral-8x7b", "q4", "8GiB"),
    )
}


def device_ceiling() -> float:
    """Bytes per second that the device reads from its own memory, by sums over half a GiB that are
    queued together."""
    device = gpus.torch_device()
    x = torch.ones(_CEILING_BYTES // 4, device=device.place)
    best = 0.0
    for _ in range(_CEILING_ROUNDS):
        start = time.perf_counter()
        sums = [x.sum() for _ in range(_CEILING_SUMS)]
        float(sums[-1])
        best = max(best, _CEILING_SUMS * _CEILING_BYTES / (time.perf_counter() - start))
    del x
    device.release()
    return best


def measure(
    engine: Engine, prompt: list[int], text: list[int], device_bytes_per_s: float
) -> dict[str, Any]:
    """One prompt and its forced continuation, on an engine that has answered the same before."""
    gpu = engine.gpu
    assert gpu is not None
    state = engine.new_state()
    for _ in range(2):  # the first fills the tiers, and compiles kernels
        state.truncate(0)
        request = engine.begin_request(state)
        logits, first_s = prefill(engine, state, prompt)
        before = engine.store.stats.copy()
        _, seconds = decode(engine, state, logits, len(text), text)
        stats, steps = engine.store.stats.since(before), len(seconds)
        engine.end_request(request, counts=False)
    expert_bytes = engine.manifest.expert_layout.data_bytes
    below = (stats.decode_events - stats.decode_device_hits) * expert_bytes / steps
    context, layout = gpu.context, engine.manifest.expert_layout
    bus, both = measure_bus(context), measure_contended(context, layout, TorchMath())
    ram, sizes = read_ceiling(engine.placement.threads), token_bytes(engine, state.length)
    above = stats.decode_device_hits * expert_bytes / steps
    floor = above / device_bytes_per_s
    floor += (sizes.dense + sizes.kv) / (device_bytes_per_s if gpu.placement.inside else ram)
    floor += below / (both.bus_bytes_per_s + both.cpu_bytes_per_s)
    tpot, held = statistics.median(seconds), gpu.promise.look()
    return {
        "ttft_ms": round(first_s * 1e3, 1),
        "tpot_ms": round(tpot * 1e3, 2),
        "device_hit_rate": round(stats.decode_device_hits / stats.decode_events, 4),
        "cpu_share": round(stats.decode_cpu_events / stats.decode_events, 4),
        "bus_bytes_per_token": stats.decode_bus_bytes // steps,
        "disk_bytes_per_token": stats.decode_bytes_read // steps,
        "floor_ms": round(floor * 1e3, 4),
        "over_floor": round(tpot / floor, 2),
        "dense_weights_on": "device" if gpu.placement.inside else "host",
        "device_bytes_per_s": round(device_bytes_per_s),
        "bus_bytes_per_s": round(bus),
        "contended_bus_bytes_per_s": round(both.bus_bytes_per_s),
        "contended_cpu_bytes_per_s": round(both.cpu_bytes_per_s),
        "ram_bytes_per_s": round(ram),
        "device_held_bytes": held.peak_bytes,
        "device_held_is_measured": held.measured,
        "device_promised_bytes": gpu.placement.peak_bytes,
        "page_locked": engine.store.note or "all host slots",
        "choices": engine.choices,
    }


def run(o: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Makes the row's model below `folder` and measures it."""
    row, calibration = ROWS[o.row], Calibration()
    config = {**shape(row.shape, o.layers), **o.config}
    model = calibrated(folder, row.shape, config, calibration)
    manifest: Manifest = model.ours(row.tag)
    text = tokens(calibration, config["vocab_size"], o.prompt + o.tokens)
    settings = EngineConfig(
        memory=parse_memory(o.memory),
        context=o.prompt + o.tokens,
        device="cuda",
        device_memory=parse_memory(o.device_memory or row.device_memory),
        miss=o.miss,
        trace=False,
        libcuda=o.fake,
    )
    driver = gpus.find_gpu(o.fake)  # first: what the process holds is counted from here on
    ceiling = device_ceiling()  # while torch may still have what it takes
    with Engine(manifest, model.folder(row.tag), settings, model.settings) as engine:
        assert engine.gpu is not None
        found = measure(engine, text[: o.prompt], text[o.prompt :], ceiling)
        return {
            "row": row.name,
            "date": now(),
            "command": " ".join(sys.argv),
            "gpu": engine.gpu.placement.gpu,
            "driver": driver.driver_version if isinstance(driver, gpus.Gpu) else None,
            **found,
        }


def main(arguments: list[str] | None = None) -> None:
    o = _options(arguments)
    if o.row is None:
        print("\n".join(ROWS))
        return
    if o.fake is not None:
        from tests.fake_device import pretend  # the tests' own; never without being asked for

        pretend(o.fake)
    with tempfile.TemporaryDirectory(dir=o.disk, prefix="moeinf-gpu-") as folder:
        print(json.dumps(run(o, Path(folder)), indent=1))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("row", nargs="?", choices=list(ROWS))
    parser.add_argument("--miss", choices=MISSES, default="auto")
    parser.add_argument("--memory", default="100%", help="for experts in host slots")
    parser.add_argument("--device-memory", help="other than the row's")
    parser.add_argument("--prompt", type=int, default=PROMPT_TOKENS, help="tokens")
    parser.add_argument("--tokens", type=int, default=NEW_TOKENS, help="decoded")
    parser.add_argument("--layers", type=int, help="fewer than the real shape has")
    parser.add_argument(
        "--config", type=json.loads, default={}, metavar="JSON", help="other sizes, to try it out"
    )
    parser.add_argument("--disk", type=Path, help="where the weights are made; a temporary folder")
    parser.add_argument("--fake", metavar="LIBRARY", help="the tests' fake libcuda")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
