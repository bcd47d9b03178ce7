"""python -m benchmarks.prefixes: the KV of ended requests, after a new start and in a next turn.

The first part writes and restores random KV of a shape, without a model; files are read from the
drive. The second part asks an installed model, with a share of its experts in memory, for a turn of
20 new tokens, and compares its time to the first token with that of a decode step.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from moeinf.models.layers.kv_cache import CacheLayout, KvCache
from moeinf.offload.format.direct_io import BLOCK_BYTES, DirectReader
from moeinf.runtime.config import EngineConfig, read_environment
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.jobs.bench import machine
from moeinf.runtime.library.library import Library
from moeinf.runtime.prefix.cache import PrefixCache
from moeinf.runtime.prefix.folder import PrefixFolder
from moeinf.runtime.sizes import parse_memory

_NEW_TOKENS = 20


def restored(o: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return sizes and times of a prompt that is written, and restored by a new cache."""
    planes = ((o.heads, o.width),) * 2
    layout = CacheLayout(o.layers, planes, torch.bfloat16, torch.device("cpu"))
    state, ids = KvCache(layout, o.tokens), list(range(o.tokens))
    for column in state.columns(0, o.tokens):
        column.view(torch.int16).random_(0, 1 << 14)
    state.resume(o.tokens)
    size = o.tokens * layout.bytes_per_token

    def opened() -> PrefixCache:
        files = PrefixFolder(folder, bytes(16), 64 << 30, print)
        return PrefixCache(layout, bytes(16), size + (1 << 20), False, files, print)

    first = opened()
    first.keep(state, ids)
    while first.stats.bytes_written < size:
        time.sleep(0.05)
    first.close()
    seconds, fresh, plain = [], [], []
    for number in range(2 * o.rounds):
        back = KvCache(layout, o.tokens)
        if number % 2:
            plain.append(plain_read(folder))
        else:
            for column in back.columns(0, o.tokens):
                column.zero_()  # its pages exist, as those of an engine that has served
        start = time.perf_counter()
        again = opened()
        found = again.find([*ids, 1])
        tokens = again.restore(back, found)
        (fresh if number % 2 else seconds).append(time.perf_counter() - start)
        again.close()
        assert tokens == o.tokens
        pairs = zip(state.columns(0, o.tokens), back.columns(0, o.tokens), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    times = {"restored": seconds, "restored_into_new_memory": fresh, "read_alone": plain}
    found = {f"{name}_s": round(statistics.median(s), 3) for name, s in times.items()}
    return {"bytes": size, **found}


def plain_read(folder: Path) -> float:
    """Return the seconds of reading the same files by direct I/O in four threads."""
    start = time.perf_counter()
    with ThreadPoolExecutor(4) as readers:
        list(readers.map(_read, folder.glob("*.kv")))
    return time.perf_counter() - start


def _read(path: Path) -> None:
    with DirectReader(path) as file:
        for at in range(0, path.stat().st_size, BLOCK_BYTES):
            file.read(at, BLOCK_BYTES)


def next_turn(model: str, share: str, rounds: int) -> dict[str, Any]:
    """Return the milliseconds of a decode step, and of the first token of a next turn."""
    settings = read_environment()
    manifest, folder = Library(settings).read(model)
    config = EngineConfig(memory=parse_memory(share), trace=False, device="cpu")
    steps, turns, whole = [], [], []
    with Engine.open(manifest, folder, config, settings) as engine:
        for number in range(rounds):
            state, ids = engine.new_state(), [16 + (number + 7 * i) % 200 for i in range(300)]
            engine.extend(state, ids)
            for token in range(24):
                start = time.perf_counter()
                engine.step([(state, 20 + token)])
                steps.append(time.perf_counter() - start)
            asked = [*ids, *range(20, 44), *(30 + (number + i) % 150 for i in range(_NEW_TOKENS))]
            state.truncate(len(asked) - _NEW_TOKENS)
            start = time.perf_counter()
            engine.extend(state, asked[-_NEW_TOKENS:])
            turns.append(time.perf_counter() - start)
            state.truncate(256)  # the rule of whole chunks
            start = time.perf_counter()
            engine.extend(state, asked[256:])
            whole.append(time.perf_counter() - start)
    found = {"decode_step": steps, "next_turn": turns, "next_turn_of_whole_chunks": whole}
    return {f"{name}_ms": round(1e3 * statistics.median(s), 2) for name, s in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16, help="of OLMoE, as the next two")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--model", help="an installed model; without it only the first part runs")
    parser.add_argument("--share", default="35%", help="of the experts that fit")
    parser.add_argument("--rounds", type=int, default=3)
    o = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "tokens": o.tokens}
    folder = Path(tempfile.mkdtemp(dir=Path.cwd()))
    try:
        result["restored"] = restored(o, folder)
    finally:
        shutil.rmtree(folder)
    if o.model:
        result["turn"] = next_turn(o.model, o.share, o.rounds)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
