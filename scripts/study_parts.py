"""Independent parts of the study: policies compared, parts removed, knobs, shifts, length.

study.py runs them on recordings and prints their results.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np

from moeinf.offload.policy.base import Policy, Setup
from moeinf.offload.policy.eamc import EamcKnobs, EamcPolicy
from moeinf.offload.policy.table import POLICIES
from moeinf.offload.routing.hint_model import HintSource, ModelledHints, RecordedHints
from moeinf.offload.routing.trace import Recording
from moeinf.offload.simulator.outcome import Outcome
from scripts.study_policies import ABLATED, COMPARED, Case, Way, knobs

SHARES = (0.05, 0.1, 0.2, 0.35, 0.6)
# Kinds of exercises whose requests look alike, for shifts within a group and from group to group.
GROUPS = {
    "numbers": ("add", "subtract", "count", "convert"),
    "letters": ("upper", "reverse", "spell", "digits"),
    "structure": ("sort", "json", "brackets"),
    "facts": ("weekday", "capital", "dialogue"),
}
_NEAR = 1.05  # of the later mean: the bound for recovered
_GATE = 0.8  # recall and precision of the modelled gate, for a recording without hints
# Values of every knob to try; the default is among them.
ADAPTIVE_VALUES: dict[str, tuple[Any, ...]] = {
    "hysteresis": (-1.0, 0.0, 0.1, 0.25, 0.5, 1.0, 3.0),
    "matches": (1, 2, 5, 10, 30),
    "worth": (0.05, 0.1, 0.25, 0.5, 0.75),
    "sure": (0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 2.0),
    "decays": ((0.8,), (0.95,), (0.98,), (0.8, 0.95), (0.8, 0.95, 0.98), (0.7, 0.9, 0.97, 0.99)),
    "step": (0.0, 0.01, 0.02, 0.05, 0.1, 0.2),
    "prompt": (0.0, 0.3, 1.0, 3.0),
}
EAMC_VALUES: dict[str, tuple[Any, ...]] = {
    "matches": (1, 3, 5, 10),
    "epsilon": (0.0, 1e-4, 1e-3, 1e-2, 0.1),
}


def hints_of(recording: Recording) -> HintSource:
    """Return the recorded hints, or those of a modelled gate."""
    if any(done.hints is not None for done in recording.passes):
        return RecordedHints()
    return ModelledHints(_GATE, _GATE, recording.shape.experts)


def case(recording: Recording, share: float) -> Case:
    return Case(recording, share, hints_of(recording))


def compared(recording: Recording) -> dict[str, dict[float, float]]:
    """Return the hit rate of decode events by policy and share, the offline optimum last."""
    found = {
        way.name: {s: case(recording, s).run(way).hit_rate for s in SHARES} for way in COMPARED
    }
    return found | {"belady": {s: case(recording, s).best().hit_rate for s in SHARES}}


def ablated(recording: Recording, share: float) -> dict[str, Outcome]:
    """Return the outcomes of `adaptive` without each of its parts."""
    return {way.name: case(recording, share).run(way) for way in ABLATED}


def sensitivity(
    recording: Recording, share: float
) -> Iterator[tuple[str, str, list[tuple[Any, Outcome]]]]:
    """Yield (policy, knob, [(value, outcome)]); `adaptive` has hints."""
    for knob, values in ADAPTIVE_VALUES.items():
        ways = [Way("", knobs(**{knob: value}), hints=True) for value in values]
        yield "adaptive", knob, _tried(recording, share, values, ways)
    for knob, values in EAMC_VALUES.items():
        ways = [Way("", _eamc(replace(EamcKnobs(), **{knob: value}))) for value in values]
        yield "eamc", knob, _tried(recording, share, values, ways)


def _tried(
    recording: Recording, share: float, values: Sequence[Any], ways: Sequence[Way]
) -> list[tuple[Any, Outcome]]:
    """Run each way with the same hints: every case makes a new modelled gate."""
    outcomes = [case(recording, share).run(way) for way in ways]
    return list(zip(values, outcomes, strict=True))


def _eamc(changed: EamcKnobs) -> Callable[[Setup], Policy]:
    return lambda setup: EamcPolicy(setup, changed)


def sparsity_of_many(recording: Recording, counts: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Return the mean shares of experts used, at all and twice or more, by number of requests."""
    eams = [eam.decode for eam in recording.request_eams().values()]
    found = {}
    for count in counts:
        sums = [np.sum(eams[at : at + count], 0) for at in range(0, len(eams) - count + 1, count)]
        found[count] = tuple(float(np.mean([(s >= n).mean() for s in sums])) for n in (1, 2))
    return found  # type: ignore[return-value]


def recovery(
    recording: Recording, before: Sequence[int], after: Sequence[int], share: float
) -> int:
    """Return the number of requests from a change of workload until the stall has recovered.

    Recovered is within 5 % of its later mean. The stall is a mean over a window of an eighth of the
    requests after the change. The EAMC begins empty.
    """
    outcome = case(recording.select([*before, *after]), share).run(
        Way("adaptive", POLICIES["adaptive"])
    )
    sums: dict[int, list[float]] = {}
    for token in outcome.tokens:
        sums.setdefault(token.request, []).append(token.stall_seconds)
    moved = [statistics.fmean(sums[request]) for request in after if request in sums]
    window = max(2, len(moved) // 8)
    smooth = np.convolve(moved, np.ones(window) / window, "valid")
    settled = smooth[len(smooth) // 2 :].mean()
    return int(np.argmax(smooth <= settled * _NEAR))


def shifts(recording: Recording, share: float) -> dict[str, list[int]]:
    """Return the requests to recovery for ordered pairs: kinds within a group, whole groups."""
    of: dict[str, list[int]] = {}
    for request in recording.requests:
        of.setdefault(recording.labels.get(request, ""), []).append(request)
    groups = {name: [kind for kind in kinds if kind in of] for name, kinds in GROUPS.items()}
    within = [
        recovery(recording, of[a], of[b], share)
        for kinds in groups.values()
        for a, b in permutations(kinds, 2)
    ]
    whole = [
        sorted(request for kind in kinds for request in of[kind])
        for kinds in groups.values()
        if kinds
    ]
    across = [recovery(recording, a, b, share) for a, b in permutations(whole, 2)]
    return {"within a group": within, "from group to group": across}


def between(recordings: Sequence[Recording], share: float) -> list[int]:
    """Return the same between data sets. Raises ValueError for recordings of different models."""
    if len({recording.shape for recording in recordings}) > 1:
        raise ValueError("recordings of different models have no shift between them")
    joined = Recording("joined", recordings[0].shape)
    sets: list[list[int]] = []
    first = 0
    for recording in recordings:
        for done in recording.passes:
            joined.add(replace(done, rows=done.rows + first))
        sets.append([request + first for request in recording.requests])
        first = max(sets[-1]) + 1
    return [recovery(joined, a, b, share) for a, b in permutations(sets, 2)]


def as_conversations(recording: Recording, turns: int) -> Recording:
    """Return the same requests, `turns` at a time as turns of one conversation."""
    requests = recording.requests
    places = {request: requests[i - i % turns] for i, request in enumerate(requests)}
    longer = Recording(f"{recording.name}, {turns} turns", recording.shape)
    for done in recording.passes:
        longer.add(replace(done, rows=np.array([places[int(row)] for row in done.rows])))
    return longer


def by_place(recording: Recording, share: float, way: Way, width: int) -> list[float]:
    """Return the hit rate by place in the answer, `width` tokens at a time."""
    sums: dict[int, list[int]] = {}
    for token in case(recording, share).run(way).tokens:
        part = sums.setdefault(token.age // width, [0, 0])
        part[0] += token.hits
        part[1] += token.events
    return [hits / max(1, events) for _, (hits, events) in sorted(sums.items())]
