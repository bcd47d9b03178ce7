"""Replay one case of a study (policy, capacity, knobs), and cut and mix its workloads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from moeinf.errors import InvalidInput
from moeinf.offload.gpu_tier.miss_split import Miss
from moeinf.offload.policy.adaptive import Adaptive, AdaptiveKnobs
from moeinf.offload.policy.base import Policy, Setup
from moeinf.offload.policy.belady import Belady
from moeinf.offload.policy.eamc import EamcKnobs, EamcPolicy
from moeinf.offload.policy.table import POLICIES
from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.routing.hint_model import HintSource
from moeinf.offload.routing.trace import Pass, Recording, RoutingShape
from moeinf.offload.simulator.clock import DeviceSpeeds, TimeModel
from moeinf.offload.simulator.outcome import Outcome
from moeinf.offload.simulator.replay import Conditions, Progress, Replay
from moeinf.offload.simulator.simulated_device import Above
from moeinf.offload.simulator.tiered_replay import TieredReplay


class UnknownChoice(InvalidInput, ValueError):
    """A study names an unknown knob or label."""

    code = "unknown_choice"
    hint = "`moeinf simulate --help`"


@dataclass(frozen=True)
class Case:
    """A policy by name, the share of all experts that fit, and knobs by name.

    Knobs of another policy are ignored, so that one sweep can compare several policies.
    """

    policy: str
    share: float
    eamc_capacity: int | None = None  # None: automatic
    knobs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OnDevice:
    """The share of all experts that fit on a device, how misses are handled, and its speeds."""

    share: float
    miss: Miss
    speeds: DeviceSpeeds


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
    device: OnDevice | None = None,
    progress: Progress = lambda _passes: None,
) -> Outcome:
    """Replay one case. Raises UnknownChoice for an unknown knob.

    eamc: collection of earlier requests, which grows. device: adds a device tier above the host.
    """
    if unknown := set(case.knobs) - _KNOBS:
        known = ", ".join(sorted(_KNOBS))
        raise UnknownChoice(f"unknown knob {', '.join(sorted(unknown))} (expected {known})")
    shape = recording.shape
    slots = _slots(case.share, shape)
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

    conditions = Conditions(slots, time, hints, late)
    if device is None:
        return Replay(recording, make, conditions, eamc).run(progress)
    above = Above(_slots(device.share, shape), device.miss, device.speeds)
    return TieredReplay(recording, make, conditions, above, eamc).run(progress)


def _slots(share: float, shape: RoutingShape) -> int:
    return max(1, round(share * shape.layers * shape.experts))


def shifted(recording: Recording, labels: str) -> Recording:
    """Select requests by label in order; raises UnknownChoice.

    `A+B,C` selects the requests labelled A or B, then those labelled C. A label `A:B` is an A, too.
    """
    chosen: list[int] = []
    for part in labels.split(","):
        wanted = set(part.split("+"))
        found = [
            request
            for request in recording.requests
            if (label := recording.labels.get(request, "")) in wanted
            or label.partition(":")[0] in wanted
        ]
        if not found:
            known = ", ".join(sorted(set(recording.labels.values()))) or "no labels"
            raise UnknownChoice(f"no request is labelled {part!r}; {recording.name} has {known}")
        chosen += found
    return recording.select(chosen, f"{recording.name} {labels}")


def batched(recording: Recording, users: int) -> Recording:
    """Return the same requests, `users` at a time, that decode in one pass, as in the engine.

    A prompt has passes of its own, when its request takes the place of one that has ended.
    """
    waiting = deque(recording.requests)
    mixed = Recording(f"{recording.name} x{users}", recording.shape, labels=recording.labels)
    active: list[deque[Pass]] = []
    while waiting or active:
        while waiting and len(active) < users:
            passes = deque(recording.select([waiting.popleft()]).passes)
            while passes and passes[0].phase != "decode":
                mixed.add(passes.popleft())
            active += [passes] if passes else []
        if active:
            mixed.add(_joined([passes.popleft() for passes in active]))
        active = [passes for passes in active if passes]
    return mixed


def _joined(parts: list[Pass]) -> Pass:
    """Return one decode pass of the rows of several; without hints."""
    weights = [part.weights for part in parts if part.weights is not None]
    return Pass(
        "decode",
        np.concatenate([part.rows for part in parts]),
        np.concatenate([part.ids for part in parts], 1),
        np.concatenate([part.accepted for part in parts]),
        np.concatenate(weights, 1) if len(weights) == len(parts) else None,
    )


def interleaved(recording: Recording, users: int) -> Recording:
    """Return the same requests interleaved: `users` at a time, one pass of each in turn."""
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
