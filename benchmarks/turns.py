"""python -m benchmarks.turns: a next turn of few tokens against a decode step.

The first part replays recorded requests through the store, without bytes: the prompt without its
last tokens, the answer, then these tokens as a turn. It prints the experts that a layer chooses and
reads. The second part (--shape) measures turns of an engine with recorded routing. --drive limits
the drive and needs gcc.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.long_prompt import on_slow_drive
from benchmarks.recorded_routing import ROUTINGS, fitted, recorded, routed, text
from benchmarks.shapes import SHAPES, shape
from moeinf.native import SlotPool
from moeinf.offload.format.layout import ExpertLayout
from moeinf.offload.policy.base import Setup
from moeinf.offload.policy.table import POLICIES
from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.store.expert_store import ExpertStore
from moeinf.offload.store.host_tier import HostTier
from moeinf.runtime.config import EngineConfig, read_environment
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.jobs.bench import machine
from moeinf.runtime.sizes import parse_memory
from tests.fakes import AtOnce, NoMath

_LAYOUT = ExpertLayout(1, 1, "F32")
_SETTLED = 5  # requests before the first that counts
_PROMPT, _ANSWER = 200, 24  # tokens before a measured turn


def replayed(routing: str, policy: str, share: float, tokens: int, most: int) -> dict[str, Any]:
    """Return the experts of a layer that turns choose and read, and that decode steps read."""
    requests = recorded(routing)
    layers, experts = requests.layers, requests.experts
    slots, cells = int(share * layers * experts), layers * experts
    made = POLICIES[policy](Setup(requests.shape, slots, Eamc(64, layers, experts)))
    pool, layouts = SlotPool(slots, _LAYOUT.slot_bytes), [_LAYOUT] * cells
    host = HostTier(layouts, experts, pool, AtOnce(), made, NoMath())  # type: ignore[arg-type]
    store = ExpertStore((host,))

    def read(ids: Any, weights: Any, number: int) -> float:
        """Run one pass; return the experts that a layer read."""
        before, x = store.stats.loads, torch.zeros(len(ids), 1)
        rows = torch.full((len(ids),), number)
        store.begin_pass(rows, "decode" if len(ids) == 1 else "prefill")
        for layer in range(layers):
            chosen = torch.from_numpy(ids[:, layer].astype(np.int64))
            mix = torch.from_numpy(np.ascontiguousarray(weights[:, layer], np.float32))
            store.submit(layer, x, chosen, mix).result()
        store.end_pass(None)
        return (store.stats.loads - before) / layers

    turns, steps, chosen = [], [], []
    long = [r for r in requests.requests if r.prompt_len >= 3 * tokens and len(r.decode_ids) > 8]
    for number, one in enumerate(long[:most]):
        assert one.weights is not None
        end = one.prompt_len
        read(one.ids[: end - tokens], one.weights[: end - tokens], number)
        answer = [
            read(one.ids[at : at + 1], one.weights[at : at + 1], number)
            for at in range(end, len(one.ids))
        ]
        turn = slice(end - tokens, end)
        seconds = read(one.ids[turn], one.weights[turn], number)
        store.end_request(number)
        if number >= _SETTLED:
            turns.append(seconds)
            steps += answer
            chosen.append(np.mean([len(np.unique(one.ids[turn, n])) for n in range(layers)]))
    store.close()
    figures = {"chosen": chosen, "read_by_a_turn": turns, "read_by_a_step": steps}
    row: dict[str, Any] = {"policy": policy, "share": share, "requests": len(turns)}
    row |= {name: round(float(np.mean(values)), 2) for name, values in figures.items()}
    return row | {"ratio": round(float(np.mean(turns) / np.mean(steps)), 1)}


def measured(o: argparse.Namespace) -> dict[str, Any]:
    """Return milliseconds and megabytes of turns and decode steps of an engine."""
    config = shape(o.shape, o.layers)
    name = o.shape if o.layers is None else f"{o.shape}-{o.layers}"
    model, words = routed(o.cache, name, config, o.routing), fitted(config, o.routing)
    manifest, folder = model.ours(o.tag), model.folder(o.tag)
    limits = EngineConfig(
        memory=parse_memory(o.share), context=1024, trace=False, direct_io=True, device="cpu"
    )
    found: dict[str, list[tuple[float, int]]] = {"step": [], "turn": []}
    with Engine.open(manifest, folder, limits, model.settings) as engine:

        def extend(kind: str, ids: list[int]) -> None:
            before, start = engine.store.stats.bytes_read, time.perf_counter()
            engine.extend(state, ids)
            seconds = time.perf_counter() - start
            found[kind].append((seconds, engine.store.stats.bytes_read - before))

        for number in range(o.rounds):
            ids = text(o.routing, words, _PROMPT + _ANSWER, _PROMPT, seed=number)
            state = engine.new_state()
            request = engine.begin_request(state)
            engine.extend(state, ids[:_PROMPT])
            for token in ids[_PROMPT:]:
                extend("step", [token])
            extend("turn", text(o.routing, words, o.tokens, o.tokens, seed=number + 3))
            engine.end_request(request, counts=False)
    times = {kind: statistics.median(s for s, _ in runs) for kind, runs in found.items()}
    row = {f"{kind}_ms": round(1e3 * seconds, 1) for kind, seconds in times.items()}
    for kind, runs in found.items():
        row[f"{kind}_mb"] = round(float(np.mean([read for _, read in runs])) / 1e6, 1)
    row["ratio"] = round(times["turn"] / times["step"], 1)
    return {"machine": machine(), "drive": o.drive, "share": o.share, **row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--routing", default=ROUTINGS[0], choices=ROUTINGS[:2])
    parser.add_argument("--policies", default="learned,adaptive")
    parser.add_argument("--shares", default="0.2,0.35,0.6")
    parser.add_argument("--requests", type=int, default=45)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tag", default="q4")
    parser.add_argument("--share", default="35%", help="of the experts that fit")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--drive", help="bytes per second that the drive is limited to: 500MB")
    parser.add_argument("--cache", type=Path, default=read_environment().home / "benchmarks")
    o = parser.parse_args()
    if o.shape:
        if not on_slow_drive("benchmarks.turns", o.drive):
            print(json.dumps(measured(o), indent=1))
        return
    for policy in o.policies.split(","):
        for share in o.shares.split(","):
            row = replayed(o.routing, policy, float(share), o.tokens, o.requests)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
