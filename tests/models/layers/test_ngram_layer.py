"""The rows of n-grams are wanted as soon as the tokens are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from moeinf.models.base import MemoryTable, Pending
from moeinf.models.layers.decoder import DecodeStep
from tests.fakes import WatchedExperts, load_resident
from tests.tiny import save_tiny
from tests.tiny_families import qwen4


def test_rows_are_wanted_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is in the third layer: two layers compute while its rows are read."""
    save_tiny(qwen4(ple_layer_ids=[3]), tmp_path)
    events: list[tuple[str, Any]] = []
    rows, embedded = MemoryTable.rows, DecodeStep.embedded

    def note_ahead(self: MemoryTable, ids: Tensor) -> None:
        events.append(("ahead", ids.tolist()))

    def note_rows(self: MemoryTable, ids: Tensor) -> Tensor:
        events.append(("rows", ids.tolist()))
        return rows(self, ids)

    def note_embedded(self: DecodeStep, ids: Tensor) -> Tensor:
        events.append(("embedded", ids.tolist()))
        return embedded(self, ids)

    class Noting(WatchedExperts):
        def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Pending:
            events.append(("experts", layer))
            return super().submit(layer, x, ids, weights)

    monkeypatch.setattr(MemoryTable, "ahead", note_ahead)
    monkeypatch.setattr(MemoryTable, "rows", note_rows)
    monkeypatch.setattr(DecodeStep, "embedded", note_embedded)
    loaded = load_resident(tmp_path)
    state, experts = loaded.model.new_state(40), Noting(loaded.experts)
    for ids in ([3, 1, 4, 1, 5, 9, 2], [6]):
        events.clear()
        loaded.model.extend([(ids, state)], experts)
        what = [word for word, _ in events]
        assert what == ["ahead", "embedded", *["experts"] * 2, "rows", *["experts"] * 2]
        assert events[0][1] == events[4][1]  # the rows that are read are those that are used
        assert events[1][1] == ids
        assert len(events[0][1]) == 4 * len(ids)  # two heads of each order, orders 2 and 3
