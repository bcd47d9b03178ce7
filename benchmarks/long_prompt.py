"""python -m benchmarks.long_prompt: prompts with windows of many tokens, and of one chunk.

Engines of one model differ in their memory and their window alone. They take turns. The prompt's
tokens are random, as are the weights, so a chunk uses nearly all experts.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.models import RaceModel
from benchmarks.shapes import SHAPES, shape
from moeinf.runtime.config import PREFILL_CHUNK, EngineConfig, read_environment
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.jobs.bench import machine
from moeinf.runtime.placement.bandwidth import measure
from moeinf.runtime.sizes import parse_memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tag", default="q4")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--shares", default="100%,35%,18%", help="of the experts that fit")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=read_environment().home / "benchmarks")
    o = parser.parse_args()
    name = o.shape if o.layers is None else f"{o.shape}-{o.layers}"
    model = RaceModel(o.cache, name, shape(o.shape, o.layers))
    manifest = model.ours(o.tag)
    folder, window = model.folder(o.tag), -(-o.tokens // PREFILL_CHUNK) * PREFILL_CHUNK
    random.seed(0)
    ids = [random.randrange(1000) for _ in range(o.tokens)]
    found: dict[str, list[tuple[float, int]]] = {}
    with ExitStack() as opened:
        engines = {}
        for share in o.shares.split(","):
            for tokens in sorted({PREFILL_CHUNK, window}):
                config = EngineConfig(
                    memory=parse_memory(share), context=window, window=tokens, trace=False,
                    direct_io=True, device="cpu",
                )  # fmt: skip
                engine = Engine.open(manifest, folder, config, model.settings)
                engines[f"{share} of the experts, windows of {tokens}"] = opened.enter_context(
                    engine
                )
        for number in range(o.rounds + 1):
            for case, engine in engines.items():
                before, start = engine.store.stats.bytes_read, time.perf_counter()
                engine.extend(engine.new_state(), ids)
                seconds = time.perf_counter() - start
                if number:  # the first fills the slots
                    read = engine.store.stats.bytes_read - before
                    found.setdefault(case, []).append((seconds, read))
        disk = measure(model.settings, folder, manifest).disk_bytes_per_s
    result: dict[str, Any] = {"machine": machine(), "disk_bytes_per_s": disk, "tokens": o.tokens}
    for case, measured in found.items():
        seconds, read = statistics.median(s for s, _ in measured), measured[-1][1]
        result[case] = {
            "seconds": round(seconds, 2),
            "bytes": read,
            "disk_s": round(read / disk, 2),
        }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
