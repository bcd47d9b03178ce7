"""python -m benchmarks.pipeline: layers over two machines, against a machine that reads experts.

A model that does not fit into one machine's memory decodes given tokens in two ways:

    replica     one engine, with a part of the experts in memory; it reads the others
    pipeline    two processes, each with the same memory and half of the layers; the hidden state
                goes from one to the other over TCP, a message to each side per token

Both have one thread per process. A stage is an engine of the whole model with the other layers left
out, so its memory holds the experts of its own layers only. Each message takes `delay`, as in
hops.py. The logits of both must have the same bits. Routing is that of a real model
(recorded_routing.py). Another text, and the first quarter of the tokens, warm up and do not count.

With two streams the stages work at the same time, on two cores. A second replica would have its own
drive on another machine, so the replica's speed counts twice beside two streams.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.hops import Line, listener
from benchmarks.models import RaceModel
from benchmarks.recorded_routing import fitted, routed, text
from benchmarks.shapes import Config, shape
from moeinf.models.base import Embedding
from moeinf.runtime.config import EngineConfig, read_environment
from moeinf.runtime.dense.cpu_block import NativeBlocks, joined
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.jobs.bench import machine
from moeinf.runtime.sizes import parse_memory

ROUTING = "deepseek-v2-lite"
_WARM = 4  # one part of so many warms up
_STREAMS = 1, 1, 2  # of the runs through the pipeline; the first one warms up
_NAME = "olmoe-pipeline"


def config_of(layers: int) -> Config:
    return shape("olmoe", layers) | {
        "hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }  # fmt: skip


def opened(model: RaceModel, o: argparse.Namespace, policy: str) -> Engine:
    manifest = model.ours("q4")
    config = EngineConfig(
        memory=parse_memory(o.share), context=o.tokens, threads=1, policy=policy, trace=False,
        speculation=False, prefix=None, direct_io=True,
    )  # fmt: skip
    return Engine.open(manifest, model.folder("q4"), config, model.settings)


def make_stage(engine: Engine, number: int, line: Line) -> None:
    """Leave half of the layers to the other stage, and pass the hidden state to it by `line`.

    Stage 0 sends it; stage 1 takes it in place of embeddings. Rows are single tokens.
    """
    model: Any = engine.model
    body, vocab = model.body, model.vocab_size
    layers = [
        block
        for part in body.blocks
        for block in (part.blocks if isinstance(part, NativeBlocks) else [part])
    ]
    half = len(layers) // 2

    def sent(x: Tensor) -> Tensor:
        line.send(bytes(x.contiguous().view(torch.uint8).numpy()))
        return x

    def received(_: Tensor) -> Tensor:
        return torch.frombuffer(bytearray(line.receive()), dtype=torch.bfloat16)[None]

    if number == 0:
        step = replace(
            body, blocks=joined(layers[:half]), norm=sent, head=lambda _: torch.zeros(1, vocab)
        )
    else:
        embedding = Embedding(received, body.embedding.dtype, body.embedding.device)
        step = replace(body, blocks=joined(layers[half:]), embedding=embedding, embedding_scale=1.0)
    model.body = model._decode = step


def last_stage(up: Connection, model: RaceModel, o: argparse.Namespace) -> None:
    """Answer streams with a checksum of the logits of each token."""
    with listener() as door, opened(model, o, "lru") as engine:
        up.send(door.getsockname()[1])
        end = door.accept()[0]
        size = 2 * config_of(o.layers)["hidden_size"]
        make_stage(engine, 1, Line(end, size, o.delay / 1e3))
        back = Line(end, 4, o.delay / 1e3)
        for streams in _STREAMS:
            answer(engine, back, streams, o.tokens)


def answer(engine: Engine, back: Line, streams: int, tokens: int) -> None:
    """Compute the second half of the layers for a token of each stream in turn."""
    states = [engine.new_state() for _ in range(streams)]
    for state in states:
        engine.begin_request(state)
    for _ in range(tokens):
        for state in states:
            back.send(checksum(engine.extend(state, [0])))


def checksum(logits: NDArray[np.float32]) -> bytes:
    return crc32(logits.tobytes()).to_bytes(4, "little")


@contextmanager
def pipeline(model: RaceModel, o: argparse.Namespace) -> Iterator[tuple[Engine, Line]]:
    """Yield the engine of stage 0, and the line by which stage 1 answers."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=last_stage, args=(theirs, model, o), daemon=True)
    process.start()
    with opened(model, o, "lru") as engine:
        end = socket.create_connection(("127.0.0.1", ours.recv()))
        with end:
            size = 2 * config_of(o.layers)["hidden_size"]
            make_stage(engine, 0, Line(end, size, o.delay / 1e3))
            yield engine, Line(end, 4, o.delay / 1e3)
            process.join()


def run_pipeline(
    engine: Engine, back: Line, texts: Sequence[Sequence[int]]
) -> tuple[float, list[list[bytes]]]:
    """Return the seconds of the tokens that count, and each stream's checksums."""
    states = [engine.new_state() for _ in texts]
    for state in states:
        engine.begin_request(state)
    found: list[list[bytes]] = [[] for _ in texts]
    begin, warm = 0.0, len(texts[0]) // _WARM
    for place in range(len(texts[0])):
        if place == warm:
            begin = time.perf_counter()
        for number, state in enumerate(states):
            if place:
                found[number].append(back.receive())
            engine.extend(state, [texts[number][place]])
    for checks in found:
        checks.append(back.receive())
    return time.perf_counter() - begin, found


def run_replica(
    model: RaceModel, texts: Sequence[Sequence[int]], o: argparse.Namespace
) -> dict[str, Any]:
    """Return the figures of the first text, in one engine that reads what is not in memory."""
    tokens, warm = texts[0], o.tokens // _WARM
    checks = list[bytes]()
    with opened(model, o, EngineConfig().policy) as engine:
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
    with pipeline(model, o) as (engine, back):
        run_pipeline(engine, back, texts[1:])
        one_s, (one,) = run_pipeline(engine, back, texts[:1])
        two_s, (two, _) = run_pipeline(engine, back, texts)
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
