"""One row of the GPU table: make the model, measure it, and compare it with its floor.

    python -m benchmarks.gpu deepseek-v2-lite-bf16-24GiB        (a row; without one they are listed)
    python -m benchmarks.gpu ROW --program accelerate           (llama.cpp, moe-infinity: that one)

A row ends within ten minutes (--limit) and leaves no files. Weights are made in a folder of its
own (60 GiB of disk are enough for any) and always deleted (ending.py). A row that could not end in
time reports its current stage, and how long each stage took. Weights are random with calibrated
routing (calibrated.py), and tokens are forced. The computation of a token and its experts are like
a real model's, the text has no meaning.

    floor   see gpu_floor.py; all speeds are measured in this run, before the engine opens

    device_held_bytes   the most device memory that the process was seen to hold, CUDA's own part
            and all workspaces included (by NVML, if device_held_is_measured), beside the promised
            amount

Another program gets the same weights (accelerate and MoE-Infinity in bfloat16, llama.cpp as GGUF),
the same text and as many bytes of the device (gpu_peers.py). Where a bfloat16 checkpoint is too
large for the disk, `--layers` makes the model smaller for both sides.

`--fake LIBRARY` runs the same with the tests' fake libcuda, to check that the command works. The
device is the CPU then, and the figures have no meaning.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.calibrated import Calibration, calibrated, tokens
from benchmarks.ending import Ended, Stages, ending, folder_that_goes
from benchmarks.gpu_floor import Speeds, TokenBytes, floor, measured
from benchmarks.gpu_peers import PROGRAMS, Asked
from benchmarks.gpu_peers import run as run_program
from benchmarks.shapes import shape
from moeinf.offload.gpu_tier.miss_split import MISSES
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.jobs.bench import decode, machine, prefill, token_bytes
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.machine import gpu as gpus
from moeinf.runtime.machine.measurements import now
from moeinf.runtime.machine.memory import available_bytes, core_count
from moeinf.runtime.placement.bandwidth import measure as measure_drive
from moeinf.runtime.placement.plan import place
from moeinf.runtime.sizes import parse_memory

PROMPT_TOKENS, NEW_TOKENS = 512, 32  # the paper's values
LIMIT_S = 600.0
OURS = "moeinf"


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
        Row("deepseek-v2-lite", "bf16", "24GiB"),  # the paper's setup
        Row("deepseek-v2-lite", "q4", "4GiB"),
        Row("deepseek-v2-lite", "q4", "2GiB"),
        Row("qwen3-30b-a3b", "q4", "8GiB"),
        Row("qwen3-30b-a3b", "q4", "4GiB"),
        Row("mixtral-8x7b", "q4", "8GiB"),
    )
}


def measure(
    engine: Engine, settings: Settings, speeds: Speeds, prompt: list[int], text: list[int],
    stages: Stages,
) -> dict[str, Any]:  # fmt: skip
    """Measure one prompt and its forced continuation, on an engine after one warm-up run of it."""
    gpu = engine.gpu
    assert gpu is not None
    state = engine.new_state()
    for number in ("first", "second"):  # the first fills the tiers, and compiles kernels
        stages.begin(f"{number} prompt")
        state.truncate(0)
        request = engine.begin_request(state)
        logits, first_s = prefill(engine, state, prompt)
        stages.begin(f"{number} answer")
        before = engine.store.stats.copy()
        _, seconds = decode(engine, state, logits, len(text), text)
        stats, steps = engine.store.stats.since(before), len(seconds)
        engine.end_request(request, counts=False)
    stages.end()
    size, sizes = engine.info.manifest.expert_bytes, token_bytes(engine, state.length)
    missed = stats.decode_events - stats.decode_device_hits
    disk = None
    if stats.decode_bytes_read:
        disk = measure_drive(settings, engine.info.folder, engine.info.manifest).disk_bytes_per_s
    took = TokenBytes(
        sizes.dense + sizes.kv, stats.decode_device_hits * size / steps, missed * size / steps,
        stats.decode_bytes_read / steps,
    )  # fmt: skip
    least = floor(took, speeds, gpu.placement.inside, disk)
    tpot, held = statistics.median(seconds), gpu.promise.look()
    return {
        "decoded_tokens": steps,
        "ttft_ms": round(first_s * 1e3, 1),
        "tpot_ms": round(tpot * 1e3, 2),
        "device_hit_rate": round(stats.decode_device_hits / stats.decode_events, 4),
        "cpu_share": round(stats.decode_cpu_events / stats.decode_events, 4),
        "bus_bytes_per_token": stats.decode_bus_bytes // steps,
        "disk_bytes_per_token": stats.decode_bytes_read // steps,
        "floor_ms": _ms(least.seconds),
        "over_floor": round(tpot / least.seconds, 2),
        "floor_parts_ms": {
            "dense": _ms(least.dense_s),
            "experts_of_device": _ms(least.device_s),
            "experts": _ms(least.experts_s),
            "disk": _ms(least.disk_s),
        },
        "dense_weights_on": "device" if gpu.placement.inside else "host",
        "device_bytes_per_s": round(speeds.experts.device_bytes_per_s),
        "bus_bytes_per_s": round(speeds.bus_bytes_per_s),
        "contended_bus_bytes_per_s": round(speeds.experts.bus_bytes_per_s),
        "contended_cpu_bytes_per_s": round(speeds.experts.cpu_bytes_per_s),
        "ram_bytes_per_s": round(speeds.ram_bytes_per_s),
        "disk_bytes_per_s": None if disk is None else round(disk),
        "device_budget_bytes": gpu.placement.budget_bytes,
        "device_held_bytes": held.peak_bytes,
        "device_held_is_measured": held.measured,
        "device_promised_bytes": gpu.placement.peak_bytes,
        "page_locked": (engine.store.device and engine.store.device.note) or "all host slots",
        "choices": engine.info.choices,
        "notes": engine.take_notes(),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)


def run(o: argparse.Namespace, folder: Path, stages: Stages) -> dict[str, Any]:
    """Make the row's model below `folder` and measure it. SystemExit without a GPU."""
    row, calibration = ROWS[o.row], Calibration()
    driver = gpus.find_gpu(o.fake)  # first: the process's memory is counted after this
    if isinstance(driver, gpus.NoGpu):
        raise SystemExit(f"no GPU: {driver.why}")
    missing = gpus.missing_for_kernels()
    if missing is not None:
        raise SystemExit(f"{driver.name} is there, but {missing}")
    config = {**shape(row.shape, o.layers), **o.config}
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
    stages.begin("noise and embedding")
    model = calibrated(folder, row.shape, config, calibration)
    coming = model.prospect(row.tag)
    plan = place(coming, settings, available_bytes(), core_count())  # raises an engine's errors
    stages.begin("speeds")
    speeds = measured(gpus.open_context(driver), coming, plan.threads)
    stages.begin("weights")
    manifest: Manifest = model.ours(row.tag)
    stages.begin("loading")
    with Engine.open(manifest, model.folder(row.tag), settings, model.settings) as engine:
        assert engine.gpu is not None
        found = measure(engine, model.settings, speeds, text[: o.prompt], text[o.prompt :], stages)
        return {
            "gpu": engine.gpu.placement.gpu,
            "driver": driver.driver_version,
            "version": "this clone",
            **found,
        }


def beside(o: argparse.Namespace, folder: Path, stages: Stages) -> dict[str, Any]:
    """Run another program in the row. SystemExit where it cannot run."""
    row, calibration = ROWS[o.row], Calibration()
    config = {**shape(row.shape, o.layers), **o.config}
    text = tokens(calibration, config["vocab_size"], o.prompt + o.tokens)
    memory = parse_memory(o.device_memory or row.device_memory)
    stages.begin("noise and embedding")
    model = calibrated(folder, row.shape, config, calibration)
    asked = Asked(
        o.program, o.python, row.tag, memory, text[: o.prompt], text[o.prompt :], core_count(),
        stages.began_at + o.limit, o.fake,
    )  # fmt: skip
    return run_program(asked, model, stages)


def main(arguments: list[str] | None = None) -> None:
    """Print the row; SystemExit (1) when it could not end in time."""
    o = _options(arguments)
    if o.row is None:
        print("\n".join(ROWS))
        return
    if o.fake is not None:
        from tests.fake_device import pretend  # the tests' own; only on request

        pretend(o.fake)
    about = {"row": o.row, "program": o.program or OURS, "date": now(), "command": _command()}
    about |= {"machine": machine()}
    stages, found = Stages(), dict[str, Any]()
    try:
        with ending(o.limit), folder_that_goes(o.disk, "moeinf-gpu-") as folder:
            found = run(o, folder, stages) if o.program is None else beside(o, folder, stages)
    except Ended as why:
        stages.end()
        found = {"unfinished": f"{why}, at: {stages.now}"}
    print(json.dumps({**about, **found, "seconds": stages.seconds}, indent=1))
    if "unfinished" in found:
        raise SystemExit(1)


def _command() -> str:
    return "python -m benchmarks.gpu " + shlex.join(sys.argv[1:])


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("row", nargs="?", choices=list(ROWS))
    parser.add_argument("--program", choices=list(PROGRAMS), help="another one than ours")
    parser.add_argument(
        "--python", default=sys.executable, metavar="PATH", help="that has the other program"
    )
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
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="of the whole row"
    )
    parser.add_argument("--fake", metavar="LIBRARY", help="the tests' fake libcuda")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
