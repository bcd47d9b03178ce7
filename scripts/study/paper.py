"""The MoE-Infinity paper's figures, measured on recorded requests: docs/paper.md compares them.

Source: arXiv 2401.14361 v3. Its machine computes a token of DeepSeek-V2-Lite in 50 ms (figure 8)
and has a bus of 24 GB/s (table 1): an expert takes 0.32 ms to compute and 0.72 ms to fetch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from moeinf.offload.routing.clustering import summarise
from moeinf.offload.simulator.cases import shifted
from moeinf.offload.simulator.clock import TimeModel
from scripts.study.replays import (
    Bench,
    Counts,
    Floats,
    collection,
    gain,
    hit_rate,
    percent,
    recording_of,
    table,
)
from scripts.study.workloads import recovery

Text = Callable[[], str]
EXPERT_BYTES, PER_TOKEN = 17_301_504, 156  # of DeepSeek-V2-Lite in bf16
MACHINE = TimeModel(ram_over_link=2.25, ram_bytes_per_s=PER_TOKEN * EXPERT_BYTES / 0.05)
TOP = (0.05, 0.1, 0.2)  # shares of a layer's experts
TOKENS = (1, 4, 16, 64, 256)
BUFFERS_GB = (1, 2, 3, 6, 12)
PARTS = {  # the policy that evicts, and the one that reads ahead
    "LRU, nothing ahead": ("lru", ""),
    "LRU, the paper's prefetch": ("lru", "eamc"),
    "the paper's eviction, nothing ahead": ("eamc", ""),
    "both: the paper": ("eamc", None),
    "`adaptive`, nothing ahead": ("adaptive", ""),
    "`adaptive`, the paper's prefetch": ("adaptive", "eamc"),
}
_LEAST = 4  # requests of a kind


def concentration(path: Path) -> list[list[str]]:
    """Return rows: the events that a layer's most used experts have, and the experts in use."""
    recording = recording_of(path)
    shape = recording.shape
    eams = np.stack([eam.decode for eam in recording.request_eams().values()]).astype(float)
    drawn = np.random.default_rng(0)
    whole = eams.sum(0)
    chance = np.stack([[drawn.multinomial(int(row.sum()), use / use.sum())
                        for row, use in zip(one, whole, strict=True)] for one in eams])  # fmt: skip
    rows = []
    for top in TOP:
        most = round(top * shape.experts)
        cells = [f"the {most} most used of {shape.experts} experts, % of events"]
        for counts in (eams, chance.astype(float), whole[None]):
            sums = np.sort(counts, 2)[:, :, -most:].sum((1, 2))
            cells.append(percent(sums, counts.sum((1, 2))) if len(counts) > 1
                         else f"{100 * sums.sum() / counts.sum():.1f}")  # fmt: skip
        rows.append(cells)
    return rows


def working_set(path: Path) -> list[str]:
    """Return the share of all experts that the first tokens of an answer use, for TOKENS."""
    recording = recording_of(path)
    shape = recording.shape
    shares: dict[int, list[float]] = {count: [] for count in TOKENS}
    for request in recording.requests:
        done = [p.ids for p in recording.select([request]).passes if p.phase == "decode"]
        seen = np.zeros((shape.layers, shape.experts), bool)
        for number, ids in enumerate(done, 1):
            np.put_along_axis(seen, ids[:, 0].astype(np.int64), True, 1)
            if number in shares:
                shares[number].append(seen.mean())
    return [percent(np.array(s), np.ones(len(s))) if s else "" for s in shares.values()]


def reuse(bench: Bench, path: Path) -> Text:
    """Figure 2: how unevenly one request uses the experts, and all requests together."""
    top, used = bench.ask(concentration, path), bench.ask(working_set, path)

    def text() -> str:
        head = ["decode", "within a request", "as many, drawn by overall use", "over all requests"]
        first = ["tokens of an answer", *map(str, TOKENS)]
        return f"{table(head, top())}\n\n{table(first, [['% of all experts used', *used()]])}"

    return text


def clusters(path: Path) -> list[list[str]]:
    """Return one row: the groups of requests, the largest, and how pure their labels are."""
    recording = recording_of(path)
    eamc = collection(path, recording.requests, len(recording.requests))
    groups = summarise(eamc).groups
    families = np.array([label.split(":")[0] for label in recording.labels.values()])
    right = sum(np.unique(families[groups.of == g], return_counts=True)[1].max()
                for g in range(len(groups.sizes)))  # fmt: skip
    count = len(families)
    following = np.zeros((len(groups.sizes),) * 2)
    np.add.at(following, (groups.of[:-1], groups.of[1:]), 1)
    guess = following.max(1).sum() / max(1, count - 1)
    figures = (max(groups.sizes) / count, right / count, guess)
    return [[str(len(groups.sizes)), *(f"{100 * f:.1f}" for f in figures),
             f"{groups.silhouette:.2f}"]]  # fmt: skip


def groups(bench: Bench, path: Path) -> Text:
    """Table 2 and figure 4: k-means groups of the requests' EAMs."""
    wait = bench.ask(clusters, path)
    head = ["groups", "largest, % of requests", "of the group's main label, %",
            "next group foretold by the one before, %", "silhouette"]  # fmt: skip
    return lambda: table(head, wait())


def ablation(bench: Bench, path: Path) -> Text:
    """Eviction and prefetch of the paper, each with and without, on the paper's machine."""
    some = bench.few(path)
    asked = {
        name: bench.replay(path, evicts, requests=some, ahead=ahead, machine=MACHINE)
        for name, (evicts, ahead) in PARTS.items()
    }

    def text() -> str:
        found = {name: wait() for name, wait in asked.items()}
        base = next(iter(found.values()))
        rows = [
            [name, hit_rate(one), gain(one, base), per_token(one.reads, one),
             per_token(one.stall_ms, one)]
            for name, one in found.items()
        ]  # fmt: skip
        return table(
            ["20 % fits", "hit rate, %", "− LRU", "experts read per token", "stall, ms per token"],
            rows,
        )

    return text


def per_token(sums: Floats, counts: Counts) -> str:
    """Return a sum per token with its interval; `percent` without its hundred."""
    whole, half = percent(sums / 100, counts.tokens).split(" ")
    return f"{whole} {half}"


def machine(bench: Bench, path: Path) -> Text:
    """Table 1 and figures 7 and 8: time per token by the buffer that the KV cache leaves."""
    policies = ("lru", "eamc", "adaptive", "learned", "belady")
    shape = recording_of(path).shape
    whole = shape.layers * shape.experts * (shape.expert_bytes or EXPERT_BYTES) / 1e9
    buffers = bench.some(BUFFERS_GB)
    some = bench.few(path)
    asked = {
        (policy, size): bench.replay(
            path, policy, min(1.0, size / whole), requests=some, machine=MACHINE
        )
        for policy in policies
        for size in buffers
    }
    compute = 1e3 * shape.layers * shape.top_k * (shape.expert_bytes or EXPERT_BYTES)
    compute /= MACHINE.ram_bytes_per_s

    def text() -> str:
        rows = []
        for policy in policies:
            cells = [policy]
            for size in buffers:
                one = asked[policy, size]()
                cells.append(f"{compute + one.stall_ms.sum() / one.tokens.sum():.0f} "
                             f"({100 * one.rate:.0f} %)")  # fmt: skip
            rows.append(cells)
        return table(["ms per token (hit rate)", *(f"{size} GB" for size in buffers)], rows)

    return text


def recoveries(bench: Bench, path: Path) -> Text:
    """Table 3: requests until a policy is as good as later, after every change of kind."""
    recording = recording_of(path)
    labels = list(recording.labels.values())
    families = sorted({label.split(":")[0] for label in labels})
    kinds = [f for f in families if sum(x.split(":")[0] == f for x in labels) >= _LEAST]
    requests = {kind: shifted(recording, kind).requests[: 3 if bench.quick else 25]
                for kind in kinds}  # fmt: skip
    asked = {
        (policy, before, after): bench.replay(
            path, policy, requests=(*requests[before], *requests[after])
        )
        for policy in ("lru", "eamc", "adaptive")
        for before in kinds
        for after in kinds
        if before != after
    }

    def text() -> str:
        rows = []
        for policy in ("lru", "eamc", "adaptive"):
            found = [recovery(wait(), requests[after])
                     for (name, _, after), wait in asked.items() if name == policy]  # fmt: skip
            cells = [str(f(found)) for f in (min, max)] if found else ["", ""]
            rows.append([policy, cells[0], f"{np.mean(found or [0]):.1f}", cells[1]])
        changes = len(kinds) * (len(kinds) - 1)
        return table([f"requests to recover, {changes} changes", "least", "mean", "most"], rows)

    return text


SECTIONS = {
    "reuse": reuse,
    "groups": groups,
    "ablation": ablation,
    "machine": machine,
    "recovery": recoveries,
}
