"""Routing as data: expert activation matrices (EAM) and recordings of routing events.

Does not know which experts are resident, what a policy makes of events, or where files are kept.

Source: MoE-Infinity (arXiv 2401.14361 v3), section 4. Letters: L MoE layers (encoder layers first),
E experts per layer, K experts per token, T rows (tokens) of a pass, P passes.

    EAM    M [L, E]: M[i, j] = rows routed to expert j of layer i; a row sums to rows · K
    iEAM   the EAM of one pass so far; layers that have not run yet are 0
    rEAM   the sum of a request's iEAMs, prefill and decode apart
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Phase = Literal["encode", "prefill", "decode"]
Eam = NDArray[np.uint32]  # [L, E]
Ids = NDArray[np.int16]  # [T, K], -1: no expert


@dataclass(frozen=True)
class RoutingShape:
    """What must be known of a model to read its routing.

    encoder_layers of the L layers come first and run once per request. The sizes in bytes describe
    what was recorded (0: unknown): one routed expert, and all that is not a routed expert.
    """

    layers: int
    experts: int
    top_k: int
    encoder_layers: int = 0
    expert_bytes: int = 0
    dense_bytes: int = 0


@dataclass(frozen=True)
class Pass:
    """One forward pass of T rows, as it was routed.

    rows [T] int64 names each row's request; ids [L, T, K] int16 (-1: no expert, or a layer that did
    not run for that row); weights [L, T, K] float32 and hints [L, T, H] int16 (what the gate of
    layer l, applied to the hidden state of layer l-1, chose for l; -1: none) are None when they
    were not recorded; accepted [T] says which rows became history.
    """

    phase: Phase
    rows: NDArray[np.int64]
    ids: NDArray[np.int16]
    accepted: NDArray[np.bool_]
    weights: NDArray[np.float32] | None = None
    hints: NDArray[np.int16] | None = None

    @property
    def requests(self) -> list[int]:
        """The requests in this pass, in order of their first row."""
        return list(dict.fromkeys(self.rows.tolist()))

    def eam(self, experts: int, chosen: NDArray[np.bool_]) -> Eam:
        """The iEAM [L, E] of the rows that `chosen` [T] selects."""
        layers = len(self.ids)
        ids = self.ids[:, chosen].reshape(layers, -1)  # one count for all layers, not one each
        cells = ids + np.arange(layers)[:, None] * experts
        counts = np.bincount(cells[ids >= 0], minlength=layers * experts)
        return counts.reshape(layers, experts).astype(np.uint32)


class PassBuilder:
    """Collects the events of one running pass: begin, then routed and hint per layer, then end."""

    def __init__(
        self, shape: RoutingShape, rows: NDArray[np.int64], phase: Phase, weights: bool = False
    ) -> None:
        self._phase: Phase = phase
        self.rows = np.array(rows, np.int64)
        self.ids = np.full((shape.layers, len(rows), shape.top_k), -1, np.int16)
        self._weights = np.zeros(self.ids.shape, np.float32) if weights else None
        self._hints: NDArray[np.int16] | None = None

    def routed(
        self,
        layer: int,
        ids: NDArray[np.integer],
        weights: NDArray[np.floating] | None = None,
    ) -> None:
        """`layer` has chosen ids [T, K] with weights [T, K]."""
        self.ids[layer] = ids
        if self._weights is not None and weights is not None:
            self._weights[layer] = weights

    def hint(self, layer: int, ids: NDArray[np.integer]) -> None:
        """The gate of `layer` would choose ids [T, H], says a hidden state from before it."""
        width = ids.shape[1]
        have = self._hints
        if have is None or have.shape[2] < width:
            wider = np.full((*self.ids.shape[:2], width), -1, np.int16)
            if have is not None:
                wider[:, :, : have.shape[2]] = have
            self._hints = have = wider
        have[layer] = -1
        have[layer, :, :width] = ids

    def end(self, accepted: NDArray[np.bool_] | None = None) -> Pass:
        """The finished pass; accepted [T] as in the `Experts` protocol (None: all)."""
        kept = np.ones(len(self.rows), np.bool_) if accepted is None else np.array(accepted, bool)
        return Pass(self._phase, self.rows, self.ids, kept, self._weights, self._hints)


@dataclass
class RequestEam:
    """The rEAMs of one request: prefill (with encode passes in the encoder's rows) and decode."""

    prefill: Eam  # [L, E]
    decode: Eam  # [L, E]

    @classmethod
    def empty(cls, shape: RoutingShape) -> RequestEam:
        size = (shape.layers, shape.experts)
        return cls(np.zeros(size, np.uint32), np.zeros(size, np.uint32))

    def part(self, phase: Phase) -> Eam:
        """The matrix that passes of `phase` are summed into."""
        return self.decode if phase == "decode" else self.prefill


class Tracer:
    """Sums passes into rEAMs, request by request; rows that were not accepted do not count."""

    def __init__(self, shape: RoutingShape) -> None:
        self._shape = shape
        self.requests: dict[int, RequestEam] = {}

    def add(self, done: Pass) -> None:
        """Counts a finished pass for each of its requests."""
        for request in done.requests:
            eam = self.requests.setdefault(request, RequestEam.empty(self._shape))
            chosen = (done.rows == request) & done.accepted
            part = eam.part(done.phase)
            part += done.eam(self._shape.experts, chosen)

    def finish(self, request: int) -> RequestEam | None:
        """What the request left, and forgets it; None when it had no pass."""
        return self.requests.pop(request, None)


@dataclass
class Recording:
    """The routing events of a workload, in order.

    A request lives from the first pass that names it to the last. labels tell requests apart for
    people (the data set, the kind of task).
    """

    name: str
    shape: RoutingShape
    passes: list[Pass] = field(default_factory=list)
    labels: dict[int, str] = field(default_factory=dict)

    def add(self, done: Pass) -> None:
        self.passes.append(done)

    @property
    def requests(self) -> list[int]:
        """All requests, in order of their first pass."""
        seen = (request for done in self.passes for request in done.requests)
        return list(dict.fromkeys(seen))

    @property
    def decode_tokens(self) -> int:
        return sum(len(done.rows) for done in self.passes if done.phase == "decode")

    @property
    def tokens(self) -> int:
        return sum(len(done.rows) for done in self.passes)

    def request_eams(self) -> dict[int, RequestEam]:
        """The rEAMs of every request, in order of its first pass."""
        tracer = Tracer(self.shape)
        for done in self.passes:
            tracer.add(done)
        return tracer.requests

    def last_pass(self) -> dict[int, int]:
        """Per request: the index of its last pass."""
        return {r: p for p, done in enumerate(self.passes) for r in done.requests}

    def select(self, requests: Sequence[int], name: str | None = None) -> Recording:
        """The passes of these requests alone, in the order of `requests`, one after the other.

        Passes that serve several requests are cut into one per request.
        """
        chosen = Recording(name or self.name, self.shape)
        for request in requests:
            chosen.passes.extend(self._passes_of(request))
            if request in self.labels:
                chosen.labels[request] = self.labels[request]
        return chosen

    def _passes_of(self, request: int) -> Iterator[Pass]:
        for done in self.passes:
            mine = done.rows == request
            if mine.any():
                yield Pass(
                    done.phase,
                    done.rows[mine],
                    done.ids[:, mine],
                    done.accepted[mine],
                    None if done.weights is None else done.weights[:, mine],
                    None if done.hints is None else done.hints[:, mine],
                )
