"""Replay a recording against a cache policy, event by event, under the time model of clock.py.

A replay computes no expert: it moves cells between a set and a link. The policies are the same
objects as in the engine. The engine prefetches only if waiting takes a share of its time, and only
what is worth its time (prefetch_gate.py). A replay always prefetches. If it is `judged`,
the same rule weighs the prefetches, by the model's times.

One layer in time (expert_store.py does the same with real bytes):

    dense share ─ route ─ hits compute ─ misses compute as they arrive ─▶ next layer
                    └ demand reads, then what the policy prefetches ─────▶

*Stall* is the time of a layer minus its compute time. A *hit* was resident when its layer asked. A
read in flight is a miss, but is not read again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.policy.base import Policy, Setup, Weights, chosen_cells
from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.routing.hint_model import HintSource
from moeinf.offload.routing.trace import Pass, Recording, RequestEam, Tracer
from moeinf.offload.simulator.clock import Link, TimeModel
from moeinf.offload.simulator.outcome import Outcome, Token
from moeinf.offload.store.prefetch_gate import Judge

MakePolicy = Callable[[Setup], Policy]
Progress = Callable[[int], None]  # passes replayed since the last call; their sum is all of them
_TELL_EVERY = 64


@dataclass(frozen=True)
class Conditions:
    """The conditions of a replay.

    late: the policy receives the routing after its pass, as from a captured graph.
    collect: finished requests are added to the EAMC.
    judged: prefetches have to be worth their time.
    """

    slots: int
    time: TimeModel = field(default_factory=TimeModel)
    hints: HintSource | None = None
    late: bool = False
    collect: bool = True
    judged: bool = False


def weights_for(policy: Policy, running: Pass) -> Sequence[Weights | None]:
    """Return per layer what the policy is given of the gate's weights [T, K]."""
    recorded = running.weights if policy.wants_weights else None
    return [None] * len(running.ids) if recorded is None else list(recorded)


class Walk(ABC):
    """Goes through a recording, pass by pass; a subclass defines the effect on its tiers.

    Call `run` once. It reports ended requests to `policies`.
    """

    def __init__(self, recording: Recording, conditions: Conditions, eamc: Eamc | None) -> None:
        shape = conditions.time.sized(recording.shape)
        self._recording = replace(recording, shape=shape)
        self._shape, self._conditions, self._eamc = shape, conditions, eamc
        self.policies: list[Policy] = []
        self._now = 0.0
        self._decoding = False
        self._token = Token(-1, 0)
        self._ages: dict[int, int] = {}
        self._tracer = Tracer(self._shape)
        self.outcome = Outcome(shape.expert_bytes)

    @abstractmethod
    def _pass(self, running: Pass, hinted: NDArray[np.int16] | None) -> None:
        """Replay one pass with hints [L, T, H]: advance `_now` and add to `_token`."""

    def run(self, progress: Progress = lambda _passes: None) -> Outcome:
        """Replay every pass."""
        recording = self._recording
        last = recording.last_pass()
        for index, running in enumerate(recording.passes):
            if index and index % _TELL_EVERY == 0:
                progress(_TELL_EVERY)
            self.step(running)
            for request in running.requests:
                if last[request] == index:
                    self.end_request(request)
        count = len(recording.passes)
        progress(count - max(0, count - 1) // _TELL_EVERY * _TELL_EVERY)
        return self.outcome

    def step(self, running: Pass) -> None:
        """Replay one more pass; only decode passes count in `outcome`."""
        self._decoding = running.phase == "decode"
        if self._decoding:
            request = int(running.rows[0])
            age = self._ages[request] = self._ages.get(request, -1) + 1
            self._token = Token(request, age)
        else:
            self._token = Token(-1, 0)
        hints = self._conditions.hints
        hinted = hints.of_pass(running) if hints is not None else None
        self._pass(running, hinted)
        if self._decoding:
            self.outcome.tokens.append(self._token)
            self.outcome.rows += len(running.rows)
        if self._eamc is not None and self._conditions.collect:
            self._tracer.add(running)

    def end_request(self, request: int) -> RequestEam | None:
        """Report that a request has ended; return its rEAMs, if they are collected."""
        self._ages.pop(request, None)
        for policy in self.policies:
            policy.end_request(request)
        eam = self._tracer.finish(request)
        if eam is not None and self._eamc is not None:
            self._eamc.add(eam.prefill, eam.decode)
        return eam


class Replay(Walk):
    """One policy over one tier."""

    def __init__(
        self,
        recording: Recording,
        make: MakePolicy,
        conditions: Conditions,
        eamc: Eamc | None = None,
    ) -> None:
        super().__init__(recording, conditions, eamc)
        shape, time = self._shape, conditions.time
        self.policy = make(Setup(shape, conditions.slots, eamc))
        self.policies = [self.policy]
        self._ahead: set[int] = set()  # prefetched, neither used nor evicted yet
        self.judge = time.judge(shape) if conditions.judged else Judge(shape.layers, shape.experts)
        self._dense, self._expert = time.dense_seconds(shape), time.expert_seconds(shape)
        self._link = Link(
            time.read_seconds(shape), time.piece_seconds(), self._begin_ahead, self._drop_ahead
        )
        self._resident: set[int] = set()
        self._pinned: dict[int, None] = {}  # in order of computation
        self._most_prefetches = 2 * shape.top_k

    def _pass(self, running: Pass, hinted: NDArray[np.int16] | None) -> None:
        policy, late = self.policy, self._conditions.late
        begin, insertions = self._now, policy.insertions
        self.judge.begin_pass()
        policy.begin_pass(running.rows, running.phase)
        weights = weights_for(policy, running)
        for layer, ids in enumerate(running.ids):
            cells = chosen_cells(layer, ids, self._shape.experts)
            if not cells:
                continue
            self._now += self._dense
            self._link.run_until(self._now)
            if self._link.arriving:
                self._settle()
            if not late:
                policy.routed(layer, ids, weights[layer])
                if hinted is not None and layer + 1 < len(hinted):
                    policy.hinted(layer + 1, hinted[layer + 1])
            self._layer(layer, cells)
        if late:
            for layer, ids in enumerate(running.ids):
                if (ids >= 0).any():
                    policy.routed(layer, ids, weights[layer])
        policy.end_pass(running.accepted)
        self._token.seconds += self._now - begin
        self._token.insertions += policy.insertions - insertions

    def _layer(self, layer: int, cells: list[int]) -> None:
        """Compute the hits, read and compute the misses, then queue the policy's prefetches."""
        resident, start = self._resident, self._now
        hits = [cell for cell in cells if cell in resident]
        misses = [cell for cell in cells if cell not in resident]
        if self._decoding:
            self._token.events += len(cells)
            self._token.hits += len(hits)
            self.outcome.used_ahead += len(self._ahead.intersection(cells))
        if self._ahead:
            for cell in self._ahead.intersection(cells):
                self.judge.judged(cell, used=True)
            self._ahead.difference_update(cells)
        self._pinned = dict.fromkeys(hits)
        done = start + len(hits) * self._expert
        self._link.hasten(misses)
        for cell in misses:
            there = self._link.arriving.pop(cell, None)
            if there is None:
                self.judge.missed(cell)
                self._make_room(cell)
                there = self._link.demand(start)
                self._read()
                self.outcome.demand_reads += self._decoding
            resident.add(cell)
            self._pinned[cell] = None
            self.policy.admitted(cell)
            done = max(done, there) + self._expert
        if not self._conditions.late:
            prefetches = self.policy.prefetch(self._most_prefetches)
            prefetches = self.judge.worth(prefetches, layer, self._link.arriving)
            self._link.prefetch([prefetch.cell for prefetch in prefetches], start)
        self._token.stall_seconds += done - start - len(cells) * self._expert
        self._now = done

    def _make_room(self, cell: int) -> None:
        if len(self._resident) + len(self._link.arriving) < self._conditions.slots:
            return
        victim = self.policy.victim(lambda other: other not in self._pinned)
        while victim is None and self._pinned:  # more misses than slots: evict the next computed
            del self._pinned[next(iter(self._pinned))]
            victim = self.policy.victim(lambda other: other not in self._pinned)
        if victim is None:  # reads fill every slot: drop the first to arrive, unused
            there = next(iter(self._link.arriving))
            del self._link.arriving[there]
            return
        self._evict(victim)

    def _evict(self, victim: int) -> None:
        self._resident.remove(victim)
        self._drop_ahead(victim)

    def _drop_ahead(self, cell: int) -> None:
        if cell in self._ahead:
            self._ahead.remove(cell)
            self.judge.judged(cell, used=False)

    def _begin_ahead(self, cell: int) -> bool:
        """Take a slot for a prefetch that could begin now; return False if it cannot."""
        if cell in self._resident or cell in self._link.arriving:
            return False
        if len(self._resident) + len(self._link.arriving) >= self._conditions.slots:
            victim = self.policy.victim(lambda other: other not in self._pinned)
            if victim is None:
                return False
            self._evict(victim)
            self.judge.displaced(victim)
        self._read()
        self._ahead.add(cell)
        self.outcome.fetched_ahead += self._decoding
        return True

    def _settle(self) -> None:
        for cell in self._link.arrived(self._now):
            self._resident.add(cell)
            self.policy.admitted(cell)

    def _read(self) -> None:
        self._token.reads += self._decoding
