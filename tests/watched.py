"""`Experts` for tests that watch or disturb passes through `Engine.routed_through`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moeinf.models.base import Experts, Pending, Phase


class Watched:
    """Forwards all calls. A test overrides the ones it watches."""

    def __init__(self, experts: Experts) -> None:
        self._experts = experts

    @property
    def wants_hints(self) -> bool:
        return self._experts.wants_hints

    def begin_pass(self, rows: Tensor, phase: Phase, pieces: Sequence[slice] = ()) -> None:
        self._experts.begin_pass(rows, phase, pieces)

    def hint(self, layer: int, ids: Tensor, scores: Tensor) -> None:
        self._experts.hint(layer, ids, scores)

    def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Pending:
        return self._experts.submit(layer, x, ids, weights)

    def end_pass(self, accepted_rows: Tensor | None = None) -> None:
        self._experts.end_pass(accepted_rows)
