"""Measure the cost of `adaptive` and `learned` per decoded token: matching, deciding and tracing.

Run: python scripts/bench_policy.py [--entries 0,120,1000]
Routing is drawn: each layer's experts by Zipf's law, half of a token's from the previous token. A
tenth of the experts fits. Misses and prefetches are reported to the policy like an engine does, and
cost no time. Prints medians per token; every shape alternates between the numbers of entries.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.policy.base import Setup
from moeinf.offload.policy.table import POLICIES
from moeinf.offload.routing.eamc import Eamc, Matcher
from moeinf.offload.routing.trace import PassBuilder, RoutingShape

SHAPES = {
    "demo": RoutingShape(6, 32, 4),
    "OLMoE": RoutingShape(16, 64, 8),
    "DeepSeek-V2-Lite": RoutingShape(26, 64, 6),
    "Qwen3-30B-A3B": RoutingShape(48, 128, 8),
}
ROW = np.zeros(1, np.int64)


def routing(shape: RoutingShape, tokens: int, seed: int) -> NDArray[np.int64]:
    """Return [tokens, L, 1, K] ids by Zipf's law, in a random order of experts per layer.

    Half of a token's experts stay from the previous token.
    """
    random = np.random.default_rng(seed)
    weight = 1 / np.arange(1, shape.experts + 1)
    ids = np.empty((tokens, shape.layers, 1, shape.top_k), np.int64)
    for layer in range(shape.layers):
        p = random.permutation(weight / weight.sum())
        for token in range(tokens):
            drawn = random.choice(shape.experts, shape.top_k, False, p)
            if token:
                stay = ids[token - 1, layer, 0, : shape.top_k // 2]
                drawn = np.concatenate([stay, drawn[~np.isin(drawn, stay)]])[: shape.top_k]
            ids[token, layer, 0] = drawn
    return ids


def collection(shape: RoutingShape, entries: int) -> Eamc:
    """Return a collection of `entries` requests of 32 decode tokens each."""
    random = np.random.default_rng(1)
    eamc = Eamc(max(1, entries), shape.layers, shape.experts)
    weight = 1 / np.arange(1, shape.experts + 1)
    for _ in range(entries):
        p = random.permutation(weight / weight.sum())
        eamc.add(*random.multinomial(32 * shape.top_k, p, (2, shape.layers)))
    return eamc


def deciding(
    name: str, shape: RoutingShape, eamc: Eamc, tokens: NDArray[np.int64], hints: bool
) -> list[float]:
    """Return the seconds per token in the policy."""
    slots = shape.layers * shape.experts // 10
    policy = POLICIES[name](Setup(shape, slots, eamc))
    resident, spent = set[int](), list[float]()
    for ids in tokens:
        start = time.perf_counter()
        policy.begin_pass(ROW, "decode")
        for layer, chosen in enumerate(ids):
            policy.routed(layer, chosen)
            if hints and layer + 1 < shape.layers:
                policy.hinted(layer + 1, ids[layer + 1])
            cells = {layer * shape.experts + e for e in chosen[0].tolist()}
            for cell in cells - resident:
                if len(resident) >= slots:
                    victim = policy.victim(lambda c, pinned=cells: c not in pinned)
                    assert victim is not None
                    resident.remove(victim)
                policy.admitted(cell)
                resident.add(cell)
            policy.prefetch(2 * shape.top_k)
        policy.end_pass(None)
        spent.append(time.perf_counter() - start)
    return spent


def matching(shape: RoutingShape, eamc: Eamc, tokens: NDArray[np.int64]) -> list[float]:
    """Return the seconds per token of matching.

    Cosine and best match run after every layer, like in the policy `eamc`.
    """
    matcher, spent = Matcher(eamc, "decode"), []
    for ids in tokens:
        start = time.perf_counter()
        matcher.begin_pass()
        for layer, chosen in enumerate(ids):
            matcher.observe(layer, chosen)
            eamc.best(matcher.similarity())
        spent.append(time.perf_counter() - start)
    return spent


def tracing(shape: RoutingShape, tokens: NDArray[np.int64]) -> list[float]:
    """Return the seconds per token to record routing."""
    spent = []
    for ids in tokens:
        start = time.perf_counter()
        builder = PassBuilder(shape, ROW, "decode")
        for layer, chosen in enumerate(ids):
            builder.routed(layer, chosen)
        builder.end()
        spent.append(time.perf_counter() - start)
    return spent


def median_us(spent: list[float]) -> str:
    return f"{1e6 * float(np.median(spent)):7.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", default="0,120,1000")
    parser.add_argument("--tokens", type=int, default=120)
    options = parser.parse_args()
    print(
        "µs per token          entries  adaptive with hints   learned with hints  matching  tracing"
    )
    for name, shape in SHAPES.items():
        tokens = routing(shape, options.tokens, 0)
        for entries in map(int, options.entries.split(",")):
            eamc = collection(shape, entries)
            columns = [
                deciding("adaptive", shape, eamc, tokens, False),
                deciding("adaptive", shape, eamc, tokens, True),
                deciding("learned", shape, eamc, tokens, False),
                deciding("learned", shape, eamc, tokens, True),
                matching(shape, eamc, tokens) if entries else [0.0],
                tracing(shape, tokens),
            ]
            print(f"{name:20} {entries:8}", *(f"{median_us(spent):>10}" for spent in columns))


if __name__ == "__main__":
    main()
