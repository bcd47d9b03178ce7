"""Record a model's routing at the `Experts` interface.

Every pass becomes an iEAM. The iEAMs of a request are summed to one rEAM per phase. Rows that were
not accepted do not count. An optional recording keeps each event, with weights and hints.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeinf.models.base import Experts, Pending, Phase
from moeinf.native import SlotKernel
from moeinf.offload.routing.trace import (
    Pass,
    PassBuilder,
    Recording,
    RequestEam,
    RoutingShape,
    Tracer,
)
from moeinf.offload.store.resident_layers import NativeLayerExperts
from moeinf.runtime.library.manifest import Manifest

_PASSES = 64  # counted in one batch: between two tokens, all counting code has left the CPU caches


class Recorder(NativeLayerExperts):
    """`Experts` that forward to other experts and record the routing. Results never change."""

    def __init__(self, experts: Experts, shape: RoutingShape) -> None:
        self._experts = experts
        self._shape = shape
        self._tracer = Tracer(shape)
        self._pass: PassBuilder | None = None
        self._routed: list[tuple[int, Tensor, Tensor | None]] = []  # of the running pass
        self._uncounted: list[Pass] = []
        self.recording: Recording | None = None
        self._details = True
        self._forwards = False  # hints, because the experts below wanted the next one

    def record(self, name: str, details: bool = True) -> Recording:
        """Record every event from the next pass in the returned recording.

        details: with the weights and the hints.
        """
        self.recording, self._details = Recording(name, self._shape), details
        return self.recording

    @property
    def wants_hints(self) -> bool:
        """True if a recording takes them, or if the experts below prefetch."""
        self._forwards = self._experts.wants_hints
        return self._has_details or self._forwards

    @property
    def _has_details(self) -> bool:
        return self.recording is not None and self._details

    def begin_pass(self, rows: Tensor, phase: Phase, pieces: Sequence[slice] = ()) -> None:
        requests = rows.numpy(force=True)
        self._pass = PassBuilder(self._shape, requests, phase, self._has_details)
        self._routed.clear()
        self._experts.begin_pass(rows, phase, *([pieces] if pieces else []))

    def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Pending:
        """Forward to the experts and record the routing.

        The caller must not write to ids and weights before the pass ends, when they are read.
        """
        pending = self._experts.submit(layer, x, ids, weights)
        self._keep(layer, ids, weights)
        return pending

    def slots(self, layer: int) -> SlotKernel | None:
        """See NativeLayerExperts."""
        experts = self._experts
        return experts.slots(layer) if isinstance(experts, NativeLayerExperts) else None

    def computed(self, layer: int, ids: Tensor, weights: Tensor, events: int) -> None:
        """Forward to the experts and record the routing, as submit does."""
        assert isinstance(self._experts, NativeLayerExperts)
        self._experts.computed(layer, ids, weights, events)
        self._keep(layer, ids, weights)

    def _keep(self, layer: int, ids: Tensor, weights: Tensor) -> None:
        if self._pass is not None:
            self._routed.append((layer, ids, weights if self._has_details else None))

    def hint(self, layer: int, ids: Tensor, scores: Tensor) -> None:
        if self._pass is not None and self._has_details:
            self._pass.hint(layer, ids.numpy(force=True))
        if self._forwards:
            self._experts.hint(layer, ids, scores)

    def end_pass(self, accepted_rows: Tensor | None = None) -> None:
        builder, self._pass = self._pass, None
        routed, self._routed = self._routed, []
        self._experts.end_pass(accepted_rows)
        if builder is None:
            return
        accepted = None if accepted_rows is None else accepted_rows.numpy(force=True)
        if accepted is not None and not np.any(accepted):
            return  # the pass was aborted
        ids = _on_host([ids for _, ids, _ in routed])
        weights = _on_host([mix for _, _, mix in routed if mix is not None])
        for n, (layer, _, mix) in enumerate(routed):
            builder.routed(layer, ids[n], None if mix is None else weights[n])
        done = builder.end(accepted)
        self._uncounted.append(done)
        if len(self._uncounted) == _PASSES:
            self._count()
        if self.recording is not None:
            self.recording.add(done)

    def so_far(self, request: int) -> RequestEam | None:
        """Return a copy of the rEAMs of a running request; None if none of its rows counted."""
        self._count()
        return deepcopy(self._tracer.requests.get(request))

    def finish(self, request: int) -> RequestEam | None:
        """Remove and return the rEAMs of a request; None if none of its rows counted."""
        self._count()
        return self._tracer.finish(request)

    def _count(self) -> None:
        for done in self._uncounted:
            self._tracer.add(done)
        self._uncounted.clear()


def _on_host(tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
    """Copy tensors to host memory. A device copies all at once, since each copy waits."""
    if not tensors or tensors[0].device.type == "cpu" or len({x.shape for x in tensors}) > 1:
        return [x.numpy(force=True) for x in tensors]
    return list(torch.stack(list(tensors)).numpy(force=True))


def routing_shape(manifest: Manifest) -> RoutingShape:
    """Return the shape of a model's routing for a recording."""
    return RoutingShape(
        layers=manifest.layers,
        experts=manifest.experts,
        top_k=manifest.top_k,
        encoder_layers=manifest.encoder_layers,
        expert_bytes=manifest.expert_bytes,
        dense_bytes=manifest.dense_bytes,
    )
