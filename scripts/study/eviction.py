"""Replays of eviction: policies, the value of past requests, several users, parts and knobs.

Each section starts its replays and returns the function that waits for them and writes the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from moeinf.offload.policy.adaptive import AdaptiveKnobs
from moeinf.offload.policy.eamc import EamcKnobs
from scripts.study.replays import (
    Bench,
    gain,
    hit_rate,
    percent,
    recording_of,
    table,
)

Text = Callable[[], str]
SHARES = (0.2, 0.1, 0.35, 0.5)
POLICIES = ("lru", "lfu", "eamc", "adaptive", "learned", "belady")
CAPACITIES = (1, 10, 50, 100, 200)
USERS = (2, 4, 8)
LATE = ("lru", "adaptive", "learned")
# Values of every knob to try; the default is among them.
ADAPTIVE_VALUES: dict[str, tuple[Any, ...]] = {
    "hysteresis": (-1.0, 0.0, 0.25, 1.0, 3.0),
    "matches": (1, 3, 5, 10, 30),
    "worth": (0.1, 0.25, 0.5),
    "sure": (0.3, 0.5, 0.7, 2.0),
    "decays": ((0.95,), (0.8, 0.95), (0.8, 0.95, 0.98), (0.9, 0.98, 0.995)),
    "step": (0.0, 0.01, 0.05, 0.2),
    "prompt": (0.0, 0.3, 1.0, 3.0),
}
EAMC_VALUES: dict[str, tuple[Any, ...]] = {
    "matches": (1, 3, 5, 10),
    "epsilon": (0.0, 1e-3, 0.1),
}
# `adaptive` without a part: knobs, and whether finished requests are forgotten.
PARTS: dict[str, tuple[tuple[tuple[str, Any], ...], bool]] = {
    "past requests: the EAMC stays empty": ((), True),
    "matching: the mean of all entries": ((("matches", 1 << 20),), False),
    "the prompt's counts": ((("prompt", 0.0),), False),
    "the mixture of decays: 0.95 alone": ((("decays", (0.95,)),), False),
    "reading ahead": ((("sure", 2.0),), False),
    "admission": ((("hysteresis", -1.0),), False),
}


def policies(bench: Bench, path: Path) -> Text:
    """Compare the policies over shares of the experts."""
    shares = sorted(bench.some(SHARES))
    asked = {(p, s): bench.replay(path, p, s) for p in POLICIES for s in shares}

    def text() -> str:
        found = {case: wait() for case, wait in asked.items()}
        bench.curves[f"policies {path.stem}"] = {
            policy: [(share, found[policy, share].rate) for share in shares] for policy in POLICIES
        }
        rows = [[p, *(hit_rate(found[p, s]) for s in shares)] for p in POLICIES]
        for name, other in (("adaptive", "lru"), ("adaptive", "eamc"), ("learned", "adaptive")):
            gains = (gain(found[name, s], found[other, s]) for s in shares)
            rows.append([f"{name} − {other}", *gains])
        for name in ("adaptive", "learned"):
            closed = [
                (found[name, s].rate - found["lru", s].rate)
                / (found["belady", s].rate - found["lru", s].rate)
                for s in shares
            ]
            rows.append([f"({name} − lru) ÷ (belady − lru)", *(f"{c:.2f}" for c in closed)])
        for policy in ("lru", "adaptive", "learned"):
            reads = [found[policy, s] for s in shares]
            per_token = [c.reads.sum() / c.tokens.sum() for c in reads]
            rows.append([f"experts read per token, {policy}", *(f"{r:.1f}" for r in per_token)])
        return table(["decode hit rate, %", *(f"{s:.0%} fits" for s in shares)], rows)

    return text


def warm_against_cold(bench: Bench, path: Path) -> Text:
    """Replay the second half of the requests without and with the first half in the EAMC."""
    requests = tuple(range(len(recording_of(path).requests)))
    half = len(requests) // 2
    past, now = requests[:half], requests[half:]
    if bench.quick:
        past, now = past[:2], now[:2]
    asked = {
        (policy, memory): bench.replay(path, policy, requests=now, past=memory)
        for policy in ("eamc", "adaptive", "learned")
        for memory in ((), past)
    }
    lru = bench.replay(path, "lru", requests=now)

    def text() -> str:
        found = {case: wait() for case, wait in asked.items()}
        base = lru()
        rows = [["lru", percent(base.early_hits, base.early_events), "", hit_rate(base), ""]]
        for policy in ("eamc", "adaptive", "learned"):
            cold, warm = found[policy, ()], found[policy, past]
            for name, one in (("cold", cold), ("warm", warm)):
                more = [gain(one, cold, early) if one is warm else "" for early in (True, False)]
                early = percent(one.early_hits, one.early_events)
                rows.append([f"{policy}, {name}", early, more[0], hit_rate(one), more[1]])
        return table(
            ["20 % fits", "first 16 tokens", "warm − cold", "all tokens", "warm − cold"], rows
        )

    return text


def capacities(bench: Bench, path: Path) -> Text:
    """Replay with EAMCs of several capacities, which begin empty."""
    tried = [*bench.some(CAPACITIES), None]
    asked = {
        (policy, capacity): bench.replay(path, policy, capacity=capacity)
        for policy in ("eamc", "adaptive")
        for capacity in tried
    }

    def text() -> str:
        found = {case: wait() for case, wait in asked.items()}
        bench.curves[f"capacity {path.stem}"] = {
            policy: [(c, found[policy, c].rate) for c in tried if c]
            for policy in ("eamc", "adaptive")
        }
        names = ["automatic" if c is None else str(c) for c in tried]
        rows = [
            [policy, *(hit_rate(found[policy, capacity]) for capacity in tried)]
            for policy in ("eamc", "adaptive")
        ]
        return table(["entries", *names], rows)

    return text


def users(bench: Bench, path: Path) -> Text:
    """Replay with several requests at once, in one pass and in turn, and with late routing."""
    some, counts = bench.few(path), bench.some(USERS)
    ways = [(1, False), *((c, together) for together in (True, False) for c in counts)]
    asked = {
        (policy, *way): bench.replay(path, policy, requests=some, users=way[0], together=way[1])
        for policy in POLICIES
        for way in ways
    }
    late = {p: bench.replay(path, p, requests=some, late=True) for p in LATE}

    def text() -> str:
        rows = [
            [
                policy,
                *(hit_rate(asked[policy, *way]()) for way in ways),
                hit_rate(late[policy]()) if policy in late else "",
            ]
            for policy in POLICIES
        ]
        bench.curves[f"users {path.stem}"] = {
            p: [(c, asked[p, c, c > 1]().rate) for c in (1, *counts)] for p in POLICIES
        }
        names = (f"{c} in a pass" if together else f"{c} in turn" for c, together in ways[1:])
        return table(["20 % fits", "1 user", *names, "1 user, told late"], rows)

    return text


def parts(bench: Bench, path: Path) -> Text:
    """Replay `adaptive` without each of its parts."""
    some = bench.few(path)
    whole = bench.replay(path, "adaptive", requests=some)
    asked = {
        name: bench.replay(path, "adaptive", requests=some, knobs=knobs, forget=forget)
        for name, (knobs, forget) in PARTS.items()
    }

    def text() -> str:
        rows = [
            [name, gain(wait(), whole()), f"{wait().reads.sum() / wait().tokens.sum():.1f}"]
            for name, wait in {"nothing": whole, **asked}.items()
        ]
        rows[0][1] = hit_rate(whole())
        return table(["without", "hit rate, points", "experts read per token"], rows)

    return text


def knobs(bench: Bench, path: Path) -> Text:
    """Replay with every knob's values, one knob at a time."""
    some = bench.few(path)
    tried = [("adaptive", ADAPTIVE_VALUES, AdaptiveKnobs()), ("eamc", EAMC_VALUES, EamcKnobs())]
    asked = {}
    for policy, all_values, defaults in tried:
        asked[policy] = bench.replay(path, policy, requests=some)
        for knob, values in all_values.items():
            for value in bench.some(values):
                if value != getattr(defaults, knob):
                    asked[policy, knob, value] = bench.replay(
                        path, policy, requests=some, knobs=((knob, value),)
                    )

    def text() -> str:
        rows = []
        for policy, all_values, defaults in tried:
            for knob, values in all_values.items():
                cells = [f"**{_shown(getattr(defaults, knob))}**"]
                for value in values:
                    if (policy, knob, value) in asked:
                        change = gain(asked[policy, knob, value](), asked[policy]())
                        cells.append(f"{_shown(value)}: {change}")
                rows.append([f"`{policy}` {knob}", ", ".join(cells)])
        return table(["knob", "**default**, other values: points of hit rate"], rows)

    return text


def _shown(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)
