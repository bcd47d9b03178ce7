"""python -m benchmarks.pipeline: layers over two machines, against a machine that reads experts.

A model that does not fit into one machine's memory decodes given tokens in two ways:

    replica     one engine, with a part of the experts in memory; it reads the others
    pipeline    two processes, each with the same memory and half of the layers: `moeinf stage`
                and an engine that uses it (runtime/engine/pipeline)

Both have one thread per process. Between the two processes, everything takes `delay` one way. The
logits of both must have the same bits. Routing is that of a real model (recorded_routing.py).
Another text, and the first quarter of the tokens, warm up and do not count.

Two streams go through the pipeline in passes of two rows, as a server's requests do. A second
replica would have its own drive on another machine, so the replica's speed counts twice beside
two streams.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from benchmarks.hops import listener
from benchmarks.models import RaceModel
from benchmarks.recorded_routing import fitted, routed, text
from benchmarks.shapes import Config, shape
from moeinf.runtime.config import EngineConfig, read_environment
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.engine.pipeline.stage import Stage
from moeinf.runtime.jobs.bench import machine
from moeinf.runtime.sizes import parse_memory

ROUTING = "deepseek-v2-lite"
_WARM = 4  # one part of so many warms up
_NAME = "olmoe-pipeline"
_SLACK = 29  # PR_SET_TIMERSLACK: a sleep ends within microseconds


def config_of(layers: int) -> Config:
    return shape("olmoe", layers) | {
        "hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }  # fmt: skip


def configured(o: argparse.Namespace, policy: str, share: str, *stages: str) -> EngineConfig:
    return EngineConfig(
        memory=parse_memory(share), context=o.tokens, threads=1, policy=policy, trace=False,
        speculation=False, prefix=None, direct_io=True, parallel=2, stages=stages,
    )  # fmt: skip


def delayed(door: socket.socket, port: int, delay_s: float) -> None:
    """Pass one connection on to a port of this machine, to its end.

    Every byte arrives `delay_s` later.
    """
    ends = door.accept()[0], socket.create_connection(("127.0.0.1", port))
    for end in ends:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    threads = list[threading.Thread]()
    for source, target in (ends, ends[::-1]):
        waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        threads.append(threading.Thread(target=_taken, args=(source, waiting), daemon=True))
        threads.append(
            threading.Thread(target=_given, args=(target, waiting, delay_s), daemon=True)
        )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for end in ends:
        end.close()


def _taken(source: socket.socket, waiting: queue.SimpleQueue[tuple[float, bytes]]) -> None:
    data = b"-"
    while data:
        data = source.recv(1 << 20)
        waiting.put((time.monotonic(), data))


def _given(
    target: socket.socket, waiting: queue.SimpleQueue[tuple[float, bytes]], delay_s: float
) -> None:
    ctypes.CDLL(None).prctl(_SLACK, 1, 0, 0, 0)
    while True:
        came, data = waiting.get()
        if not data:
            target.shutdown(socket.SHUT_WR)
            return
        if (wait := came + delay_s - time.monotonic()) > 0:
            time.sleep(wait)
        target.sendall(data)


def last_stage(up: Connection, model: RaceModel, o: argparse.Namespace) -> None:
    """Serve the second half of the layers until this process is ended."""
    given = configured(o, "lru", f"{min(100, 2 * float(o.share[:-1]))}%")
    manifest, folder = model.ours("q4"), model.folder("q4")
    with listener() as door, listener() as far:
        stage = Stage(manifest, folder, o.layers // 2, o.layers, given, model.settings)
        threading.Thread(
            target=delayed, args=(far, door.getsockname()[1], o.delay / 1e3), daemon=True
        ).start()
        up.send(far.getsockname()[1])
        stage.serve(door, print)


@contextmanager
def pipeline(model: RaceModel, o: argparse.Namespace) -> Iterator[Engine]:
    """Yield the engine of the first half, which uses the second one."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=last_stage, args=(theirs, model, o), daemon=True)
    process.start()
    share = f"{min(100, 2 * float(o.share[:-1]))}%"  # of its half of the experts
    given = configured(o, "lru", share, f"127.0.0.1:{ours.recv()}")
    with Engine.open(model.ours("q4"), model.folder("q4"), given, model.settings) as engine:
        yield engine
    process.terminate()
    process.join()


def checksum(logits: NDArray[np.float32]) -> int:
    return crc32(logits.tobytes())


def run_pipeline(engine: Engine, texts: Sequence[Sequence[int]]) -> tuple[float, list[list[int]]]:
    """Return the seconds of the tokens that count, and each stream's checksums."""
    states = [engine.new_state() for _ in texts]
    for state in states:
        engine.begin_request(state)
    found: list[list[int]] = [[] for _ in texts]
    begin, warm = 0.0, len(texts[0]) // _WARM
    for place in range(len(texts[0])):
        if place == warm:
            begin = time.perf_counter()
        tokens = [ids[place] for ids in texts]
        for checks, logits in zip(
            found, engine.step(list(zip(states, tokens, strict=True))), strict=True
        ):
            checks.append(checksum(logits))
    return time.perf_counter() - begin, found


def run_replica(
    model: RaceModel, texts: Sequence[Sequence[int]], o: argparse.Namespace
) -> dict[str, Any]:
    """Return the figures of the first text, in one engine that reads what is not in memory."""
    tokens, warm = texts[0], o.tokens // _WARM
    checks = list[int]()
    given = configured(o, EngineConfig().policy, o.share)
    with Engine.open(model.ours("q4"), model.folder("q4"), given, model.settings) as engine:
        state = engine.new_state()
        engine.begin_request(state)
        for token in texts[1]:
            engine.extend(state, [token])
        engine.end_request(state.request, counts=True)
        state.truncate(0)
        engine.begin_request(state)
        for place, token in enumerate(tokens):
            if place == warm:
                before, begin = engine.store.stats.copy(), time.perf_counter()
            checks.append(checksum(engine.extend(state, [token])))
        seconds, stats = time.perf_counter() - begin, engine.store.stats.since(before)
    count = len(tokens) - warm
    return {
        "checks": checks,
        "token_ms": 1e3 * seconds / count,
        "waited_ms": 1e3 * stats.decode_stall_seconds / count,
        "read_mb": stats.decode_bytes_read / 1e6 / count,
        "hits": stats.decode_hits / stats.decode_events,
    }


def main() -> None:
    o = _options()
    config = config_of(o.layers)
    model = routed(o.cache, _NAME, config, ROUTING)
    model.ours("q4")
    texts = [text(ROUTING, fitted(config, ROUTING), o.tokens, 0, seed) for seed in (0, 1)]
    replica = run_replica(model, texts, o)
    counted = o.tokens - o.tokens // _WARM
    with pipeline(model, o) as engine:
        run_pipeline(engine, texts[1:])
        one_s, (one,) = run_pipeline(engine, texts[:1])
        two_s, (two, _) = run_pipeline(engine, texts)
    assert one == two == replica.pop("checks"), "the logits differ"
    print(json.dumps({
        "replica": replica,
        "replica_tokens_per_s": 1e3 / replica["token_ms"],
        "pipeline_tokens_per_s": counted / one_s,
        "pipeline_of_two_streams_tokens_per_s": 2 * counted / two_s,
        "by_arithmetic_tokens_per_s":
            1e3 / (replica["token_ms"] - replica["waited_ms"] + 2 * o.delay),
        "share": o.share, "delay_ms": o.delay, "tokens": o.tokens, "machine": machine(),
    }, indent=1))  # fmt: skip


def _options() -> argparse.Namespace:
    cache = read_environment({**os.environ}).home / "benchmarks"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--share", default="52%", help="of the experts that fit in one machine")
    parser.add_argument("--tokens", type=int, default=240, help="of each text")
    parser.add_argument("--delay", type=float, default=0.5, help="ms, one way")
    parser.add_argument("--cache", type=Path, default=cache, help="may be deleted")
    return parser.parse_args()


if __name__ == "__main__":
    main()
