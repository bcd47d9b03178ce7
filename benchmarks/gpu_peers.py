"""Another program in a row of the GPU table: the same weights, text and device bytes.

peers/ and worker.py drive a program. Its weights get the same part of the row's memory as ours.
That is all memory except the bytes planned for CUDA, a prefill chunk and the KV cache
(runtime/placement/gpu_plan.py). The device memory that it really held is measured from outside.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.ending import Stages
from benchmarks.models import GGUF_OF_TAG, RaceModel
from benchmarks.peers.table import PEERS
from benchmarks.worker import Worker, WorkerFailed
from moeinf.native import DRIVER_LIBRARY, DeviceError, Driver, NoDriver
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.machine.nvml import HeldMemory
from moeinf.runtime.placement.gpu_plan import CONTEXT_BYTES, dense_workspace_bytes
from moeinf.runtime.sizes import MemorySize

PROGRAMS = {
    "accelerate": PEERS["accelerate gpu"],
    "llama.cpp": PEERS["llama.cpp gpu"],
    "moe-infinity": PEERS["MoE-Infinity"],
}
_WARM_TOKENS = 2  # of a first answer, the warm-up: some programs take seconds for a token
_SPARE_S = 20.0  # of the row's time, for cleanup
_EVERY_S = 0.02  # between two readings of the device's memory


@dataclass(frozen=True)
class Asked:
    """One row for a program.

    python: the interpreter that has the program; library: the libcuda to ask. end_at is a time of
    time.monotonic(). An answer that is not complete shortly before it is cut off; its tokens so far
    are measured.
    """

    program: str
    python: str
    tag: str
    device_memory: MemorySize
    prompt: list[int]
    answer: list[int]
    threads: int
    end_at: float
    library: str | None = None

    @property
    def context(self) -> int:
        return len(self.prompt) + len(self.answer)


def weight_bytes(manifest: Manifest, budget_bytes: int, context: int) -> int:
    """Return the bytes of a budget for weights, dense ones included."""
    besides = dense_workspace_bytes(manifest, context) + manifest.kv_bytes(context)
    return budget_bytes - CONTEXT_BYTES - besides


def run(asked: Asked, model: RaceModel, stages: Stages) -> dict[str, Any]:
    """Make the program's weights and measure it.

    Raises SystemExit when the program is absent, cannot run, or fails.
    """
    peer = PROGRAMS[asked.program]
    try:
        driver = Driver(asked.library or DRIVER_LIBRARY)
        gpu, total_bytes, bus = driver.info(0)  # no context: all of the device is the program's
    except (NoDriver, DeviceError) as error:
        raise SystemExit(f"no GPU: {error}") from error
    why = peer.problem(asked.python, None, None, gpu=True)
    if why is not None:
        raise SystemExit(f"{asked.program} is {why}")
    held = HeldMemory(bus)
    budget = asked.device_memory.of(total_bytes)
    weights = weight_bytes(model.prospect(asked.tag), budget, asked.context)
    if weights <= 0:
        raise SystemExit(f"{budget} bytes of device memory leave none for weights")
    stages.begin("weights")
    if peer.weights == "gguf":
        kind = GGUF_OF_TAG[asked.tag]
        file = model.peer(kind, asked.python)
    else:
        kind, file = "BF16", model.huggingface()
    offload = model.cache / "offload"
    offload.mkdir()
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # some would use all GPUs
    command = ["env", f"CUDA_VISIBLE_DEVICES={first}"]
    command += [asked.python, "-m", f"benchmarks.peers.{peer.module}", os.fspath(file)]
    command += ["--threads", str(asked.threads), "--context", str(asked.context)]
    command += ["--setting", peer.setting, "--folder", os.fspath(offload)]
    command += ["--device-bytes", str(weights)]
    stages.begin("loading")
    try:
        with seen(held) as most, Worker(command) as worker:
            for number, count in (("first", _WARM_TOKENS), ("second", len(asked.answer))):
                stages.begin(f"{number} prompt and answer")
                worker.ask("reset")
                text = {"prompts": [asked.prompt], "answers": [asked.answer[:count]]}
                left = asked.end_at - _SPARE_S - time.monotonic()
                turn = worker.ask("turn", **text, limit_s=max(0.0, left))
            about = worker.ask("about")
    except WorkerFailed as error:
        raise SystemExit(f"{asked.program}, at: {stages.now}: {error}") from error
    stages.end()
    if not turn["steps"]:
        raise SystemExit(f"{asked.program}: no second token in time")
    return {
        "gpu": gpu,
        "driver": driver.version,
        "version": about["version"],
        "weights": kind,
        "placed": about.get("placed"),
        "forced": turn["forced"],
        "decoded_tokens": len(turn["steps"]),
        "ttft_ms": round(turn["first"] * 1e3, 1),
        "tpot_ms": round(statistics.median(turn["steps"]) * 1e3, 2),
        "device_budget_bytes": budget,
        "device_weight_bytes": weights,
        "device_held_bytes": most.bytes or None,
        "device_held_is_measured": most.bytes > 0,
        "host_peak_bytes": turn["peak_bytes"],
    }


@dataclass
class Most:
    """The most bytes seen; 0 when no reading is available."""

    bytes: int = 0


@contextmanager
def seen(held: HeldMemory) -> Iterator[Most]:
    """Track the peak of `held.now_bytes()` inside the block."""
    most, over = Most(), threading.Event()

    def look() -> None:
        while True:
            most.bytes = max(most.bytes, held.now_bytes() or 0)
            if over.wait(_EVERY_S):
                return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()
