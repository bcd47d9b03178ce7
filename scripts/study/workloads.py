"""Changes of workload, and how alike and how sparse requests are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from moeinf.offload.simulator.cases import shifted
from scripts.study.replays import Bench, Counts, Floats, percent, recording_of, table

Text = Callable[[], str]
_GROUPS = (1, 3, 10, 30, 100)
_PARTS = ((0, 3), (3, 8), (8, 1000))  # of the requests after a shift
_BEFORE = 10  # the last requests before the first shift
SHIFTS = {"deepseek-v2-lite": "intent,law,translation", "gpt-oss-20b": "mmlu,gpqa"}


def kinds(path: Path) -> list[str]:
    """Return the labels of the shift, in order: SHIFTS, else the two most frequent families."""
    if path.stem in SHIFTS:
        return SHIFTS[path.stem].split(",")
    families = [label.split(":")[0] for label in recording_of(path).labels.values()]
    return sorted(set(families), key=lambda family: (-families.count(family), family))[:2]


def shift(bench: Bench, path: Path) -> Text:
    """Replay kind after kind, and the same requests in the file's order."""
    chosen = kinds(path)
    groups = [shifted(recording_of(path), kind).requests for kind in chosen]
    if bench.quick:
        groups = [group[:2] for group in groups]
    order = tuple(request for group in groups for request in group)
    names = ("lru", "eamc", "adaptive", "learned")
    asked = {name: bench.replay(path, name, requests=order) for name in names}
    shuffled = bench.replay(path, "adaptive", requests=tuple(sorted(order)))

    def text() -> str:
        head, places = [f"{chosen[0]}, last {_BEFORE}"], [groups[0][-_BEFORE:]]
        for kind, group in zip(chosen[1:], groups[1:], strict=True):
            for start, end in _PARTS:
                if group[start:end]:
                    last = min(end, len(group))
                    head.append(f"{kind} {start + 1}–{last}")
                    places.append(group[start:end])
        found = {name: wait() for name, wait in asked.items()}
        found["adaptive, kinds mixed"] = shuffled()
        rows = [[name, *(_of(counts, place) for place in places)] for name, counts in found.items()]
        adaptive = asked["adaptive"]()
        bench.curves[f"shift {path.stem}"] = (
            [(name, wait().hits / wait().events) for name, wait in asked.items()],
            np.cumsum([len(group) for group in groups[:-1]]).tolist(),
        )
        moved = [
            f"{kind}: {recovery(adaptive, group)}"
            for kind, group in zip(chosen[1:], groups[1:], strict=True)
        ]
        note = f"Requests until `adaptive` is within 5 % of its later mean: {', '.join(moved)}."
        return f"{table(['20 % fits', *head], rows)}\n\n{note}"

    return text


def _of(counts: Counts, requests: list[int]) -> str:
    chosen = np.isin(counts.requests, requests)
    return percent(counts.hits[chosen], counts.events[chosen])


def recovery(counts: Counts, group: list[int]) -> int:
    """Return the requests from the shift on until the mean of four misses no more than later."""
    chosen = np.isin(counts.requests, group)
    misses = 1 - counts.hits[chosen] / counts.events[chosen]
    window = min(4, len(misses))
    smooth = np.convolve(misses, np.ones(window) / window, "valid")
    settled = smooth[len(smooth) // 2 :].mean()
    return int(np.argmax(smooth <= settled * 1.05))


def alike(path: Path) -> list[tuple[str, Floats]]:
    """Return rows of figures: sparsity of groups of requests, and the nearest past request."""
    recording = recording_of(path)
    parts = list(recording.request_eams().values())
    eams = np.stack([part.decode for part in parts]).astype(np.float64)
    rows = []
    for least, name in ((1, "at all"), (2, "twice or more")):
        shares = []
        for count in _GROUPS:
            starts = range(0, len(eams) - count + 1, count)
            sums = [eams[at : at + count].sum(0) for at in starts]
            shares.append(np.mean([(s >= least).mean() for s in sums]) if sums else np.nan)
        rows.append((f"experts used {name}, %", 100 * np.array(shares)))
    # The nearest of the requests before, by both phases, and whether it has the same label.
    both = [np.concatenate([part.prefill, part.decode]).ravel().astype(float) for part in parts]
    vectors = np.stack([one / np.linalg.norm(one) for one in both])
    cosines = vectors @ vectors.T
    families = np.array([label.split(":")[0] for label in recording.labels.values()])
    nearest, same = [], []
    last = len(parts)
    for count in _GROUPS:  # of the requests just before
        pairs = [
            (request, request - count + int(np.argmax(cosines[request, request - count : request])))
            for request in range(count, last)
        ]
        nearest.append(np.mean([cosines[pair] for pair in pairs]) if pairs else np.nan)
        same.append(np.mean([families[a] == families[b] for a, b in pairs]) if pairs else np.nan)
    rows.append(("cosine to the nearest of so many earlier requests", np.array(nearest)))
    rows.append(("the nearest has the same label, %", 100 * np.array(same)))
    total = eams.sum(0)
    p = total / total.sum(1, keepdims=True)
    entropy = -(p * np.log(np.maximum(p, 1e-12))).sum(1).mean() / np.log(p.shape[1])
    rows.append(("entropy of use over all requests, % of uniform", np.array([100 * entropy])))
    return rows


def sparsity(bench: Bench, path: Path) -> Text:
    """Write how many experts requests share, and how near past requests are."""
    wait = bench.ask(alike, path)

    def text() -> str:
        rows = []
        for name, values in wait():
            cells = ["" if np.isnan(v) else f"{v:.2f}" if v <= 1 else f"{v:.1f}" for v in values]
            rows.append([name, *cells, *[""] * (len(_GROUPS) - len(cells))])
        return table(["requests", *map(str, _GROUPS)], rows)

    return text
