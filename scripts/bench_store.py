"""Measure the store's bookkeeping per decoded token, without reads and arithmetic.

Run: python scripts/bench_store.py [--tokens 60] [--rounds 5] [--bank 4096]

Routing is recorded, and folded into OLMoE's shape: 16 layers of 64 experts, 8 per token. Reads
have ended when they are asked for, experts compute nothing. A prompt of --bank tokens fills the
bank of `learned` first. Prints CPU µs of the decoding thread per token: all of the store, and the
part that the store itself counts as the policy's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeinf.native import SlotPool
from moeinf.offload.format.layout import ExpertLayout
from moeinf.offload.policy.base import Setup
from moeinf.offload.policy.table import POLICIES, PREFETCH
from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.routing.route_csv import read_route_csv
from moeinf.offload.routing.trace import RoutingShape
from moeinf.offload.store.compute import SlotMath
from moeinf.offload.store.expert_store import ExpertStore
from moeinf.offload.store.host_tier import HostTier

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.fakes import AtOnce, NoMath

TRACE = Path(__file__).parents[1] / "tests/data/traces/qwen3-30b-a3b.route.csv.gz"
SHAPE = RoutingShape(16, 64, 8)
CASES = (("lru", 1.0), ("lru", 0.35), ("adaptive", 0.35), ("learned", 0.35))
ROW = torch.zeros(1, dtype=torch.int64)


def routing(tokens: int) -> NDArray[np.int64]:
    """Return routing [tokens, L, 1, K], folded from a recording of another shape.

    The recording has more layers and experts, and fewer experts per token. The missing ones are
    those that the token before has chosen first.
    """
    recording = read_route_csv(TRACE)
    ids = np.concatenate([done.ids for done in recording.passes], 1)  # [L, T, K]
    ids = np.ascontiguousarray(ids[: SHAPE.layers, :tokens], np.int64) % SHAPE.experts
    before = np.roll(ids, 1, 1)[:, :, : SHAPE.top_k - ids.shape[2]]
    ids = np.concatenate([ids, before], 2)
    for row in ids.reshape(-1, SHAPE.top_k):
        for k in range(1, SHAPE.top_k):
            while row[k] in row[:k]:
                row[k] = (row[k] + 1) % SHAPE.experts
    return ids.transpose(1, 0, 2)[:, :, None]


def build(name: str, share: float) -> ExpertStore:
    layout, cells = ExpertLayout(1, 1, "F32"), SHAPE.layers * SHAPE.experts
    slots = round(share * cells)
    policy = POLICIES[name](Setup(SHAPE, slots, Eamc(8, SHAPE.layers, SHAPE.experts)))
    pool, transfer = SlotPool(slots, layout.slot_bytes), AtOnce()
    host = HostTier(
        [layout] * (SHAPE.layers * SHAPE.experts), SHAPE.experts, pool, transfer, policy, NoMath()
    )  # type: ignore[arg-type]
    ahead = name in PREFETCH
    return ExpertStore((host,), most_prefetches=2 * SHAPE.top_k if ahead else 0, hints=ahead)


def run(store: ExpertStore, tokens: Sequence[Sequence[Tensor]]) -> list[float]:
    """Return the CPU seconds of every token."""
    x, weights, spent = torch.zeros(1, 1), torch.ones(1, SHAPE.top_k), list[float]()
    for layers in tokens:
        start = time.thread_time()
        store.begin_pass(ROW, "decode")
        for layer, (ids, later) in enumerate(pairwise([*layers, layers[0]])):
            if layer + 1 < SHAPE.layers and store.wants_hints:
                store.hint(layer + 1, later, weights)
            store.submit(layer, x, ids, weights).result()
        store.end_pass()
        spent.append(time.thread_time() - start)
    return spent


def fill_bank(store: ExpertStore, count: int, piece: int = 1024) -> None:
    """Tell the policy of a prompt of `count` random tokens."""
    random, policy = np.random.default_rng(0), store.host.policy
    for _ in range(0, count, piece):
        policy.begin_pass(np.zeros(piece, np.int64), "prefill")
        for layer in range(SHAPE.layers):
            policy.routed(layer, random.integers(SHAPE.experts, size=(piece, SHAPE.top_k)))
        policy.end_pass(None)


def nothing(*_: Any) -> None:
    """Compute no expert."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bank", type=int, default=4096)
    options = parser.parse_args()
    SlotMath.run = nothing  # type: ignore[method-assign]
    time.perf_counter = time.thread_time
    torch.set_num_threads(1)
    tokens = [[torch.from_numpy(ids) for ids in token] for token in routing(options.tokens)]
    for name, share in CASES:
        store = build(name, share)
        fill_bank(store, options.bank)
        run(store, tokens)  # warm-up
        for _ in range(options.rounds):
            before = store.stats.copy()
            all_of_it = statistics.median(run(store, tokens))
            policy = store.stats.since(before).decode_policy_seconds / len(tokens)
            print(f"{name} {share:.0%} {1e6 * all_of_it:.1f} {1e6 * policy:.1f}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
