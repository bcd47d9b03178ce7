"""Test the reader of `.npz` files of requests, on the real data and on hostile files."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeinf.offload.routing import requests_file
from moeinf.offload.routing.requests_file import read_requests
from moeinf.offload.routing.route_csv import BadRouteTrace
from moeinf.offload.routing.trace import RoutingShape

TRACES = Path(__file__).parents[2] / "data" / "traces"


def arrays(**changed: Any) -> dict[str, Any]:
    """Return three tokens of two requests, over 2 layers of 4 experts, 2 per token."""
    good = {
        "ids": np.array([[[0, 3], [1, 2]], [[3, 0], [2, 1]], [[1, 0], [0, 2]]], np.uint8),
        "weights": np.linspace(0, 1, 12, dtype=np.float16).reshape(3, 2, 2),
        "offsets": np.array([0, 2, 3]),
        "prompt_len": np.array([1, 0], np.int32),
        "label": np.array(["law", "intent"]),
    }
    return {name: value for name, value in {**good, **changed}.items() if value is not None}


def saved(tmp_path: Path, **changed: Any) -> Path:
    path = tmp_path / "some.npz"
    np.savez_compressed(path, **arrays(**changed))
    return path


def test_requests_become_a_prefill_pass_and_a_decode_pass_per_token(tmp_path: Path) -> None:
    found = read_requests(saved(tmp_path))
    assert found.name == "some"
    assert (found.layers, found.experts, found.top_k) == (2, 4, 2)
    assert [request.label for request in found.requests] == ["law", "intent"]
    assert found.requests[0].decode_ids.tolist() == [[[3, 0], [2, 1]]]
    recording = found.recording()
    assert [done.phase for done in recording.passes] == ["prefill", "decode", "decode"]
    assert [done.requests for done in recording.passes] == [[0], [0], [1]]
    assert recording.labels == {0: "law", 1: "intent"}
    assert recording.passes[2].ids.tolist() == [[[1, 0]], [[0, 2]]]
    weights = recording.passes[1].weights
    assert weights is not None
    assert weights.dtype == np.float32
    assert weights[1, 0].tolist() == arrays()["weights"][1, 1].tolist()


def test_sizes_may_be_given_and_weights_may_be_absent(tmp_path: Path) -> None:
    sizes = {"experts": np.int64(6), "expert_bytes": np.int32(77)}
    found = read_requests(saved(tmp_path, weights=None, **sizes))
    assert found.shape == RoutingShape(2, 6, 2, 0, 77)
    assert found.recording().passes[0].weights is None


@pytest.mark.parametrize(
    ("name", "requests", "decoded", "shape"),
    [
        ("deepseek-v2-lite", 107, 4032, RoutingShape(26, 64, 6, 0, 17301504)),
        ("gpt-oss-20b", 119, 23150, RoutingShape(24, 32, 4, 0, 13219200)),
    ],
)
def test_the_real_data(name: str, requests: int, decoded: int, shape: RoutingShape) -> None:
    found = read_requests(TRACES / f"{name}.npz")
    assert found.shape == shape
    assert len(found.requests) == requests
    assert sum(len(request.decode_ids) for request in found.requests) == decoded


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ids": None}, "ids is missing"),
        ({"label": None}, "label is missing"),
        ({"extra": np.zeros(1)}, "'extra' is not an array"),
        ({"ids": arrays()["ids"].astype(np.int16)}, "ids has the type <i2"),
        ({"ids": arrays()["ids"][0]}, "ids has the invalid shape"),
        ({"ids": np.ones((3, 2, 2), np.uint8)}, "an expert twice"),
        ({"ids": np.asfortranarray(arrays()["ids"])}, "ids is not an array"),
        ({"ids": np.zeros((0, 2, 2), np.uint8), "weights": None}, "2 requests of 0 tokens"),
        ({"weights": np.zeros((3, 2, 1), np.float16)}, "weights has the invalid shape"),
        ({"weights": np.full((3, 2, 2), np.nan, np.float16)}, "negative or not finite"),
        ({"weights": np.full((3, 2, 2), -1, np.float32)}, "negative or not finite"),
        ({"offsets": np.array([0, 2, 4])}, "the offsets do not divide 3 tokens"),
        ({"offsets": np.array([0, 0, 3])}, "the offsets do not divide 3 tokens"),
        ({"offsets": np.array([1, 2, 3])}, "the offsets do not divide 3 tokens"),
        ({"prompt_len": np.array([3, 0])}, "a prompt is longer"),
        ({"prompt_len": np.array([-1, 0])}, "a prompt is longer"),
        ({"prompt_len": np.array([0])}, "prompt_len has the invalid shape"),
        ({"label": np.array(["a", None], object)}, "label is not an array|label has the type"),
        ({"label": np.array(["a" * 300, "b"])}, "label has the type <U300"),
        ({"experts": np.int64(3)}, "an id is 3, of 3 experts"),
        ({"experts": np.int64(1 << 20)}, "experts is 1048576"),
        ({"expert_bytes": np.int64(-5)}, "expert_bytes is -5"),
    ],
)
def test_invalid_arrays_are_refused(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRouteTrace, match=rf"some.npz is not a route trace: .*({words})"):
        read_requests(saved(tmp_path, **changed))


def test_sizes_are_checked_before_bytes_are_read(tmp_path: Path) -> None:
    """A header may claim any shape; the member behind it is short."""
    path = tmp_path / "huge.npz"
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (4000000, 26, 6), }\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ids.npy", b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(BadRouteTrace, match="ids has the invalid shape"):
        read_requests(path)


def test_the_longest_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    monkeypatch.setattr(requests_file, "_MOST_FILE_BYTES", 100)
    with pytest.raises(BadRouteTrace, match=r"some.npz is not a route trace: more than"):
        read_requests(path)


def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    whole = saved(tmp_path).read_bytes()
    path = tmp_path / "cut.npz"
    for end in range(0, len(whole), 97):
        path.write_bytes(whole[:end])
        with pytest.raises(BadRouteTrace, match=r"cut.npz is not"):
            read_requests(path)
    at = whole.index(b"PK", whole.index(b"weights.npy")) - 5  # in the deflated numbers
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
    with pytest.raises(BadRouteTrace, match=r"cut.npz is not"):
        read_requests(path)
