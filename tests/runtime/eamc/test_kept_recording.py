"""Test the recording that a model keeps: the newest requests, without weights and hints."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moeinf.offload.routing.recording_file import recording_from_bytes
from moeinf.offload.routing.trace import Pass, Recording, RoutingShape
from moeinf.runtime.eamc.kept_recording import MOST_BYTES, MOST_IDS, drop_oldest, keep

SHAPE = RoutingShape(layers=2, experts=8, top_k=2)


def recorded(requests: int, rows: int = 3) -> Recording:
    """Return requests of two passes of `rows` rows: 4 · rows ids each."""
    found = Recording("some", SHAPE)
    for request in range(requests):
        found.labels[request] = f"kind {request}"
        for phase in ("prefill", "decode"):
            ids = np.full((2, rows, 2), request % 8, np.int16)
            weights = np.ones((2, rows, 2), np.float32)
            accepted = np.ones(rows, bool)
            each = np.full(rows, request, np.int64)
            found.add(Pass(phase, each, ids, accepted, weights, ids))  # type: ignore[arg-type]
    return found


def test_the_oldest_requests_leave_whole() -> None:
    found = recorded(4)  # 24 ids a request
    drop_oldest(found, 96)
    assert found.requests == [0, 1, 2, 3]
    drop_oldest(found, 60)
    assert (found.requests, len(found.passes)) == ([2, 3], 4)
    assert found.labels == {2: "kind 2", 3: "kind 3"}
    drop_oldest(found, 1)  # the newest stays
    assert (found.requests, len(found.passes)) == ([3], 2)


def test_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "state/recording.eam"
    whole = recorded(3)
    keep(whole, path)
    found = recording_from_bytes(path.read_bytes())
    assert (found.requests, found.labels, found.shape) == ([0, 1, 2], whole.labels, SHAPE)
    assert all(done.weights is None and done.hints is None for done in found.passes)
    assert [done.ids.tolist() for done in found.passes] == [p.ids.tolist() for p in whole.passes]
    assert whole.passes[0].weights is not None
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_largest_fits_the_reader(tmp_path: Path) -> None:
    """Rows of one layer and one expert have the most bytes beside their ids."""
    path, rows = tmp_path / "recording.eam", MOST_IDS // 64
    found = Recording("wide", RoutingShape(layers=1, experts=8, top_k=1))
    one = np.zeros(rows, np.int64)
    for request in range(64):
        found.add(Pass("decode", one + request, np.zeros((1, rows, 1), np.int16), one == 0))
    keep(found, path)
    assert len(recording_from_bytes(path.read_bytes()).requests) == 64
    assert path.stat().st_size <= MOST_BYTES
