"""What a study replays: one case of policy, capacity and knobs; workloads cut and mixed.

Does not know faces, files or pictures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from moeinf.offload.eamc import Eamc
from moeinf.offload.hints import HintSource
from moeinf.offload.policy import POLICIES
from moeinf.offload.policy.adaptive import Adaptive, AdaptiveKnobs
from moeinf.offload.policy.base import Policy, Setup
from moeinf.offload.policy.belady import Belady
from moeinf.offload.policy.eamc import EamcKnobs, EamcPolicy
from moeinf.offload.simulate import Conditions, Outcome, Replay
from moeinf.offload.timing import TimeModel
from moeinf.offload.trace import Pass, Recording


@dataclass(frozen=True)
class Case:
    """A policy by name, the share of all experts that fit, and knobs by name.

    Knobs of another policy are ignored, so that one sweep can compare several policies.
    """

    policy: str
    share: float
    eamc_capacity: int | None = None  # None: automatic
    knobs: dict[str, Any] = field(default_factory=dict)


_KNOBS = frozenset(knob.name for kind in (AdaptiveKnobs, EamcKnobs) for knob in fields(kind)) | {
    "eamc_capacity"
}


def run_case(
    recording: Recording,
    case: Case,
    time: TimeModel,
    hints: HintSource | None = None,
    late: bool = False,
    eamc: Eamc | None = None,
) -> Outcome:
    """Replays; a given EAMC of earlier requests is used and grows. ValueError: no such knob."""
    if unknown := set(case.knobs) - _KNOBS:
        known = ", ".join(sorted(_KNOBS))
        raise ValueError(f"no knob {', '.join(sorted(unknown))}; there are {known}")
    shape = recording.shape
    slots = max(1, round(case.share * shape.layers * shape.experts))
    capacity = case.knobs.get("eamc_capacity", case.eamc_capacity)
    if eamc is None:
        size = shape.layers, shape.experts
        eamc = Eamc.automatic(*size) if capacity is None else Eamc(capacity, *size)

    def make(setup: Setup) -> Policy:
        if case.policy == "belady":
            return Belady(setup, _events(recording))
        if case.policy == "adaptive":
            return Adaptive(setup, _chosen(AdaptiveKnobs(), case.knobs))
        if case.policy == "eamc":
            return EamcPolicy(setup, _chosen(EamcKnobs(), case.knobs))
        return POLICIES[case.policy](setup)

    return Replay(recording, make, Conditions(slots, time, hints, late), eamc).run()


def shifted(recording: Recording, labels: str) -> Recording:
    """`A+B,C`: the requests labelled A or B, then those labelled C. ValueError: nobody is."""
    chosen: list[int] = []
    for part in labels.split(","):
        wanted = set(part.split("+"))
        found = [r for r in recording.requests if recording.labels.get(r) in wanted]
        if not found:
            known = ", ".join(sorted(set(recording.labels.values()))) or "no labels"
            raise ValueError(f"no request is labelled {part!r}; {recording.name} has {known}")
        chosen += found
    return recording.select(chosen, f"{recording.name} {labels}")


def interleaved(recording: Recording, users: int) -> Recording:
    """The same requests, `users` at a time, one pass of each in turn."""
    waiting = deque(recording.requests)
    mixed = Recording(f"{recording.name} x{users}", recording.shape, labels=recording.labels)
    active: deque[Iterator[Pass]] = deque()
    while waiting or active:
        while waiting and len(active) < users:
            active.append(iter(recording.select([waiting.popleft()]).passes))
        running = active.popleft()
        following = next(running, None)
        if following is not None:
            mixed.add(following)
            active.append(running)
    return mixed


def _events(recording: Recording) -> Iterator[tuple[int, Any]]:
    for done in recording.passes:
        for layer, ids in enumerate(done.ids):
            if (ids >= 0).any():
                yield layer, ids


def _chosen(defaults: Any, knobs: dict[str, Any]) -> Any:
    mine = {knob.name for knob in fields(defaults)}
    return replace(defaults, **{name: value for name, value in knobs.items() if name in mine})
