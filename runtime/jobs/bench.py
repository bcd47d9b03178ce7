"""Measure one model on this machine: first token, time per token, hits, bytes, and the floor.

Terms are those of docs/architecture.md, "Measurements". Every round starts with an empty KV cache;
the first round also starts with an empty expert cache.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moeinf.models.base import State
from moeinf.models.seq2seq.encoder_decoder import EncoderDecoder
from moeinf.native import read_bandwidth
from moeinf.offload.routing.hint_model import HintSource
from moeinf.offload.store.stats import StoreStats
from moeinf.runtime.checkpoints.checkpoint import read_header
from moeinf.runtime.config import Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.report import foresight, lossy, on_device
from moeinf.runtime.jobs.forced_routing import ForcedRouting, Request
from moeinf.runtime.library.manifest import DENSE
from moeinf.runtime.machine.memory import core_count, peak_rss_bytes
from moeinf.runtime.placement.bandwidth import measure
from moeinf.runtime.system import physical_bytes

_CEILING_BYTES, _CEILING_ROUNDS = 256 << 20, 4  # far above any cache

# Random tokens or one repeated word would not route as text does.
_TEXT = """The lighthouse keeper wrote down the weather every evening at six. On the third of March
the wind came from the north, and the supply boat could not land; he noted it, counted his candles
and found forty-one. "If the storm lasts nine days," he told the dog, "we shall sit in the dark for
two of them." The dog, who had heard worse, went on sleeping. What follows is a list of what was in
the store: 12 kg of flour, 3 kg of beans, two tins of butter (one open), salt, tea, and a sealed
box whose key had been lost before either of them arrived. def open(box): return box.key or None
"""


@dataclass
class Measured:
    """Times of the rounds of one engine, in seconds: per round, or per pass of one token."""

    prompt_tokens: int
    prefill_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    decode: StoreStats = field(default_factory=StoreStats)  # of the last round
    steps: int = 0  # passes of one token in the last round
    cpu_seconds: float = 0.0  # of all threads of the process in those passes


def prompt_of(engine: Engine, tokens: int) -> list[int]:
    """Return a prompt of exactly `tokens` tokens, which repeats one passage of text."""
    ids = engine.tokenizer.encode_text(_TEXT, plain=True)
    return (ids * (tokens // len(ids) + 1))[:tokens]


def prefill(
    engine: Engine, state: State, prompt: Sequence[int]
) -> tuple[NDArray[np.float32], float]:
    """Extend `state` with the prompt; return the logits after it and the seconds."""
    start = time.perf_counter()
    if isinstance(engine.model, EncoderDecoder):  # the prompt is its source
        engine.encode(state, prompt)
        prompt = [engine.model.start_token]
    logits = engine.extend(state, prompt)
    return logits, time.perf_counter() - start


def decode(
    engine: Engine,
    state: State,
    logits: NDArray[np.float32],
    steps: int,
    forced: Sequence[int] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> tuple[NDArray[np.float32], list[float]]:
    """Run passes of one token each; return the last logits and the seconds of each pass.

    The tokens are `forced`, or else the most likely ones. The choice is included in the time.
    """
    seconds = []
    for step in range(steps):
        start = time.perf_counter()
        token = int(np.argmax(logits)) if forced is None else forced[step]
        logits = engine.extend(state, [token])
        seconds.append(time.perf_counter() - start)
        advance()
    return logits, seconds


def bench(
    engine: Engine,
    prompt_tokens: int,
    new_tokens: int,
    rounds: int,
    advance: Callable[[], None] = lambda: None,
) -> Measured:
    """Measure a prompt and its greedy continuation `rounds` times, ignoring end tokens.

    advance: called after each of the rounds * (1 + new_tokens) passes.
    """
    prompt = prompt_of(engine, prompt_tokens)
    measured = Measured(prompt_tokens)
    state = engine.new_state()
    for _ in range(rounds):
        state.truncate(0)
        logits, seconds = prefill(engine, state, prompt)
        measured.prefill_seconds.append(seconds)
        advance()
        before, cpu = engine.store.stats.copy(), time.process_time()
        _, steps = decode(engine, state, logits, new_tokens, advance=advance)
        measured.cpu_seconds = time.process_time() - cpu
        measured.step_seconds += steps
        measured.steps = len(steps)
        measured.decode = engine.store.stats.since(before)
    return measured


def bench_replay(
    engine: Engine,
    requests: Sequence[Request],
    hints: HintSource | None,
    rounds: int,
    advance: Callable[[], None] = lambda: None,
) -> Measured:
    """Measure every request in turn, `rounds` times. The engine must not trace.

    A prefill time covers the whole prompt of a request that has one. advance: called after each
    pass of each round.
    """
    measured = Measured(max(request.prompt_tokens for request in requests))
    with engine.routed_through(lambda experts: ForcedRouting(experts, hints)) as forced:
        for _ in range(rounds):
            measured.steps, measured.decode, measured.cpu_seconds = 0, StoreStats(), 0.0
            for request in requests:
                steps = _replay(engine, forced, request, measured, advance)
                measured.step_seconds += steps
                measured.steps += len(steps)
    return measured


def _replay(
    engine: Engine,
    forced: ForcedRouting,
    request: Request,
    measured: Measured,
    advance: Callable[[], None],
) -> list[float]:
    """Replay one request with any text; add its times to `measured`; return the decode seconds."""
    state, ids = engine.new_state(), iter(prompt_of(engine, request.tokens))
    number = engine.begin_request(state)
    before, prefilled, steps = engine.store.stats.copy(), 0.0, list[float]()
    for done in request.passes:
        forced.play(done)
        cpu = time.process_time()
        _, seconds = prefill(engine, state, list(islice(ids, len(done.rows))))
        if done.phase == "decode":
            steps.append(seconds)
            measured.cpu_seconds += time.process_time() - cpu
        else:
            prefilled += seconds
        advance()
    engine.end_request(number, counts=False)
    if prefilled:
        measured.prefill_seconds.append(prefilled)
    measured.decode += engine.store.stats.since(before)
    return steps


@dataclass(frozen=True)
class TokenBytes:
    """Bytes that one decoded token must read: dense weights, routed experts, KV cache so far."""

    dense: int
    experts: int
    kv: int

    @property
    def total(self) -> int:
        return self.dense + self.experts + self.kv


def token_bytes(engine: Engine, context: int) -> TokenBytes:
    """Return the bytes with `context` tokens in the KV cache.

    Without a tied head, the embedding does not count: a token reads one row of it.
    """
    manifest = engine.info.manifest
    header = read_header(engine.info.folder / DENSE)
    sizes = {name: tensor.size_bytes for name, tensor in header.items()}
    dense = sum(sizes.values())
    if any(name.startswith("lm_head.") for name in sizes):  # else the embedding is the head, too
        dense -= sum(n for name, n in sizes.items() if ".embed_tokens." in name)
    return TokenBytes(
        dense=dense,
        experts=manifest.layers * manifest.top_k * manifest.expert_bytes,
        kv=context * manifest.kv_token_bytes(engine.info.kv),
    )


def read_ceiling(threads: int) -> float:
    """Return bytes per second of RAM now: the best read loop on one or `threads` threads."""
    loops = product({1, threads}, ((False, False), (True, False), (True, True)))
    return max(
        read_bandwidth(_CEILING_BYTES, number, prefetch, huge, _CEILING_ROUNDS)
        for number, (prefetch, huge) in loops
    )


def report(engine: Engine, settings: Settings, measured: Measured) -> dict[str, Any]:
    """Return one entry of `bench --json`. Measures RAM for the floor; disk speed is remembered."""
    peak = peak_rss_bytes()
    ram = read_ceiling(engine.info.threads)
    disk = measure(settings, engine.info.folder, engine.info.manifest).disk_bytes_per_s
    steps, seconds, decoded = measured.steps, measured.step_seconds, measured.decode
    last_round = sum(seconds[-steps:])
    first, *later = measured.prefill_seconds or [0.0]
    disk_bytes = decoded.decode_bytes_read / steps
    context = measured.prompt_tokens + steps // 2
    tpot, needed = statistics.median(seconds), token_bytes(engine, context).total
    floor = None  # None with a GPU: its read speed is not measured
    if engine.gpu is None:
        floor = _ms(max(needed / ram, disk_bytes / disk))  # at best, the two overlap
    return {
        "policy": engine.info.policy,
        "memory_bytes": engine.info.placement.memory_bytes,
        "threads": engine.info.threads,
        "decode_threads": engine.threads.decoding,
        "load_ms": _ms(engine.info.load_seconds),
        "first_ttft_ms": _ms(first),
        "ttft_ms": _ms(statistics.median(later or [first])),
        "tpot_ms_median": _ms(tpot),
        "tpot_ms_p95": _ms(float(np.quantile(seconds, 0.95))),
        "tokens_per_s": round(1 / tpot, 3),
        "tokens_per_s_mean": round(steps / last_round, 3),
        "tokens_per_cpu_s": round(steps / measured.cpu_seconds, 3),
        "hit_rate": round(decoded.hit_rate, 4) if decoded.hit_rate is not None else None,
        "bytes_read_per_token": round(disk_bytes),
        "stall_share": round(decoded.decode_stall_seconds / last_round, 4),
        "device": on_device(engine, decoded, steps),
        "kv": engine.info.kv,
        "lossy": lossy(engine, decoded),
        **foresight(decoded, steps),
        "peak_rss_bytes": peak,
        "floor_ms": floor,
        "token_bytes": needed,
        "ram_bytes_per_s": round(ram),
        "disk_bytes_per_s": round(disk),
    }


def machine() -> dict[str, Any]:
    """Return the machine and versions on which figures depend."""
    ours = "not installed"
    with suppress(PackageNotFoundError):
        ours = version("moeinf")
    return {
        "cpu": processor(),
        "cores": core_count(),
        "memory_bytes": physical_bytes(),
        "system": platform.system() + " " + platform.release(),
        "moeinf": ours,
        "torch": torch.__version__,
    }


def processor(path: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name, family and model as `lscpu` shows them.

    Several processors share a name; family and model tell them apart.
    """
    facts = dict[str, str]()
    with suppress(OSError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    name = facts.get("model name") or platform.processor() or platform.machine()
    if "cpu family" not in facts or "model" not in facts:
        return name
    return f"{name} (family {facts['cpu family']}, model {facts['model']})"


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
