"""Represent routing as data: expert activation matrices (EAM) and recordings of routing events.

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
    """The sizes of a model that its routing depends on.

    The first encoder_layers of the L layers run once per request. The sizes in bytes are those of
    the recorded model (0: unknown): of one routed expert, and of all weights outside routed
    experts.
    """

    layers: int
    experts: int
    top_k: int
    encoder_layers: int = 0
    expert_bytes: int = 0
    dense_bytes: int = 0


@dataclass(frozen=True)
class Pass:
    """The routing of one forward pass of T rows.

    rows [T] int64: each row's request.
    ids [L, T, K] int16: -1 for no expert, or for a layer that did not run for that row.
    accepted [T]: True for rows that became history.
    weights [L, T, K] float32: None if not recorded.
    hints [L, T, H] int16: the choice of layer l's gate, applied to the hidden state of layer l-1;
    -1 for no expert; None if not recorded.
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
        """Return the iEAM [L, E] of the rows that `chosen` [T] selects."""
        layers = len(self.ids)
        ids = self.ids[:, chosen].reshape(layers, -1)  # one bincount for all layers
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
        """Record that `layer` chose ids [T, K] with weights [T, K]."""
        self.ids[layer] = ids
        if self._weights is not None and weights is not None:
            self._weights[layer] = weights

    def hint(self, layer: int, ids: NDArray[np.integer]) -> None:
        """Record the ids [T, H] that the gate of `layer` chose from an earlier hidden state."""
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
        """Return the finished pass; accepted [T] as in the `Experts` protocol (None: all rows)."""
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
        """Return the matrix into which passes of `phase` are summed."""
        return self.decode if phase == "decode" else self.prefill


class Tracer:
    """Sums passes into rEAMs, per request; rows that were not accepted do not count."""

    def __init__(self, shape: RoutingShape) -> None:
        self._shape = shape
        self.requests: dict[int, RequestEam] = {}

    def add(self, done: Pass) -> None:
        """Add a finished pass to each of its requests."""
        for request in done.requests:
            eam = self.requests.setdefault(request, RequestEam.empty(self._shape))
            chosen = (done.rows == request) & done.accepted
            part = eam.part(done.phase)
            part += done.eam(self._shape.experts, chosen)

    def finish(self, request: int) -> RequestEam | None:
        """Remove a request and return its rEAMs; None if it had no pass."""
        return self.requests.pop(request, None)


@dataclass
class Recording:
    """The routing events of a workload, in order.

    A request lasts from the first pass that names it to the last. labels describe requests for
    readers (the data set, the kind of task).
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
        """The rows of decode passes that became history."""
        return sum(int(p.accepted.sum()) for p in self.passes if p.phase == "decode")

    @property
    def tokens(self) -> int:
        """All rows that became history."""
        return sum(int(p.accepted.sum()) for p in self.passes)

    def request_eams(self) -> dict[int, RequestEam]:
        """Return the rEAMs of every request, in order of its first pass."""
        tracer = Tracer(self.shape)
        for done in self.passes:
            tracer.add(done)
        return tracer.requests

    def last_pass(self) -> dict[int, int]:
        """Return the index of the last pass of each request."""
        return {r: p for p, done in enumerate(self.passes) for r in done.requests}

    def select(self, requests: Sequence[int], name: str | None = None) -> Recording:
        """Return the passes of these requests only, one request after the other.

        The order is that of `requests`. Passes of several requests are cut into one per request.
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
