"""Number the requests of one engine, and append their routing to the model's EAMC.

It is independent of models, states and texts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from moeinf.errors import reason
from moeinf.models.base import Experts
from moeinf.offload.routing.trace import Recording, RequestEam
from moeinf.runtime.eamc.collection_file import EamcState
from moeinf.runtime.eamc.recorder import Recorder, routing_shape
from moeinf.runtime.engine.notes import Notes
from moeinf.runtime.library.manifest import Manifest

Wrapped = TypeVar("Wrapped", bound=Experts)


class RequestTracing:
    """The layer between a model and its expert store. It is a Recorder if tracing is on."""

    def __init__(
        self,
        store: Experts,
        manifest: Manifest,
        eamc: EamcState | None,
        notes: Notes,
    ) -> None:
        """Wrap `store`.

        eamc: receives the routing of requests; None turns tracing off.
        """
        self.eamc = eamc
        self._store, self._model, self._notes = store, manifest.model, notes
        self._recorder = None if eamc is None else Recorder(store, routing_shape(manifest))
        self._wrapped: Experts | None = None
        self._numbers = itertools.count()

    @property
    def experts(self) -> Experts:
        """The `Experts` that the next pass runs through."""
        return self._wrapped or self._recorder or self._store

    @property
    def on(self) -> bool:
        return self._recorder is not None

    @contextmanager
    def through(self, wrap: Callable[[Experts], Wrapped]) -> Iterator[Wrapped]:
        """Wrap the experts during the context; see Engine.routed_through."""
        before, wrapped = self._wrapped, wrap(self.experts)
        self._wrapped = wrapped
        try:
            yield wrapped
        finally:
            self._wrapped = before

    def record(self, name: str, details: bool = True) -> Recording:
        """Start a recording; see Engine.record."""
        assert self._recorder is not None
        return self._recorder.record(name, details)

    def begin(self) -> int:
        """Return the number of a new request."""
        return next(self._numbers)

    def so_far(self, request: int) -> RequestEam | None:
        """Return a copy of the routing of a running request; None if nothing of it is recorded."""
        return None if self._recorder is None else self._recorder.so_far(request)

    def end(self, request: int, counts: bool) -> RequestEam | None:
        """Append the routing of the request to the EAMC if `counts`, and return it.

        If the EAMC cannot be written, add a note and stop tracing. The answer is not affected.
        """
        if self._recorder is None or self.eamc is None:
            return None
        eam = self._recorder.finish(request)
        if eam is None or not counts:
            return None
        try:
            self.eamc.append(eam)
        except OSError as error:
            self._recorder = None
            self._notes.append(f"the EAMC of {self._model} cannot be written: {reason(error)}")
        return eam
