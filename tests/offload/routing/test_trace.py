"""Test EAMs and recordings on examples computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeinf.offload.format.array_file import BadContainer, pack, unpack
from moeinf.offload.routing.recording_file import recording_from_bytes, recording_to_bytes
from moeinf.offload.routing.trace import (
    Pass,
    PassBuilder,
    Phase,
    Recording,
    RoutingShape,
    Tracer,
)

SHAPE = RoutingShape(layers=2, experts=4, top_k=2)


def one_pass(rows: list[int], phase: Phase, *layers: list[list[int]]) -> PassBuilder:
    builder = PassBuilder(SHAPE, np.array(rows), phase)
    for layer, ids in enumerate(layers):
        builder.routed(layer, np.array(ids))
    return builder


def test_prefill_and_decode_are_kept_apart_and_requests_too() -> None:
    tracer = Tracer(SHAPE)
    tracer.add(one_pass([7, 7], "prefill", [[0, 1], [1, 2]], [[3, 2], [3, 0]]).end())
    tracer.add(one_pass([7, 9], "decode", [[0, 1], [2, 3]], [[3, 2], [0, 1]]).end())
    tracer.add(one_pass([7], "decode", [[0, 2]], [[3, 1]]).end())
    seven = tracer.finish(7)
    assert seven is not None
    assert seven.prefill.tolist() == [[1, 2, 1, 0], [1, 0, 1, 2]]
    assert seven.decode.tolist() == [[2, 1, 1, 0], [0, 1, 1, 2]]
    assert tracer.finish(7) is None
    assert tracer.requests[9].decode.tolist() == [[0, 0, 1, 1], [1, 1, 0, 0]]
    assert not tracer.requests[9].prefill.any()


def test_rejected_rows_are_not_history() -> None:
    tracer = Tracer(SHAPE)
    builder = one_pass([7, 7], "decode", [[0, 1], [1, 2]], [[3, 2], [3, 0]])
    tracer.add(builder.end(np.array([True, False])))
    assert tracer.requests[7].decode.tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]


def test_encoder_rows_come_first_and_count_as_prefill() -> None:
    shape = RoutingShape(layers=3, experts=2, top_k=1, encoder_layers=1)
    builder = PassBuilder(shape, np.array([1, 1]), "encode")
    builder.routed(0, np.array([[1], [1]]))
    tracer = Tracer(shape)
    tracer.add(builder.end())
    builder = PassBuilder(shape, np.array([1]), "prefill")
    builder.routed(1, np.array([[0]]))
    builder.routed(2, np.array([[1]]))
    tracer.add(builder.end())
    assert tracer.requests[1].prefill.tolist() == [[0, 2], [1, 0], [0, 1]]


def passes() -> st.SearchStrategy[list[Pass]]:
    def build(spec: tuple[list[int], Phase, int, bool, bool]) -> Pass:
        rows, phase, seed, weights, hints = spec
        random = np.random.default_rng(seed)
        builder = PassBuilder(SHAPE, np.array(rows), phase, weights=weights)
        for layer in range(SHAPE.layers):
            ids = random.integers(-1, SHAPE.experts, (len(rows), SHAPE.top_k))
            builder.routed(layer, ids, random.random(ids.shape))
            if hints:
                builder.hint(layer, random.integers(-1, SHAPE.experts, (len(rows), 1 + seed % 3)))
        return builder.end(random.random(len(rows)) < 0.7)

    spec = st.tuples(
        st.lists(st.integers(0, 5), min_size=1, max_size=4),
        st.sampled_from(["encode", "prefill", "decode"]),
        st.integers(0, 99),
        st.booleans(),
        st.booleans(),
    )
    return st.lists(spec.map(build), max_size=5)  # type: ignore[arg-type]


@settings(max_examples=50, deadline=None)
@given(passes())
def test_a_recording_survives_its_bytes(done: list[Pass]) -> None:
    recording = Recording("mix", SHAPE, done, {3: "sums"})
    read = recording_from_bytes(recording_to_bytes(recording))
    assert (read.name, read.shape, read.labels) == ("mix", SHAPE, {3: "sums"})
    all_weighed = all(p.weights is not None for p in done)
    for before, after in zip(done, read.passes, strict=True):
        assert before.phase == after.phase
        for name in ("rows", "ids", "accepted"):
            np.testing.assert_array_equal(getattr(before, name), getattr(after, name))
        if all_weighed:
            np.testing.assert_array_equal(before.weights, after.weights)
        else:
            assert after.weights is None
        if before.hints is not None:
            width = before.hints.shape[2]
            np.testing.assert_array_equal(before.hints, after.hints[:, :, :width])
            assert (after.hints[:, :, width:] == -1).all()


def test_selecting_requests_cuts_shared_passes() -> None:
    recording = Recording("mix", SHAPE, labels={9: "sort"})
    recording.add(one_pass([7], "prefill", [[0, 1]], [[2, 3]]).end())
    recording.add(one_pass([7, 9], "decode", [[0, 1], [2, 3]], [[3, 2], [0, 1]]).end())
    assert (recording.tokens, recording.decode_tokens, recording.requests) == (3, 2, [7, 9])
    assert recording.last_pass() == {7: 1, 9: 1}
    nine = recording.select([9])
    assert nine.labels == {9: "sort"}
    assert [p.ids.tolist() for p in nine.passes] == [[[[2, 3]], [[0, 1]]]]


@pytest.mark.parametrize("damage", ["cut", "flip", "magic", "kind", "longer"])
def test_damaged_bytes_are_refused(damage: str) -> None:
    recording = Recording("x", SHAPE)
    recording.add(one_pass([7], "prefill", [[0, 1]], [[2, 3]]).end())
    data = bytearray(recording_to_bytes(recording))
    if damage == "cut":
        data = data[:-3]
    elif damage == "flip":
        data[-2] ^= 4
    elif damage == "magic":
        data[0] ^= 1
    elif damage == "longer":
        data += b"x"
    else:
        data = bytearray(pack("eamc", 1, {}, {}))
    with pytest.raises(BadContainer):
        recording_from_bytes(bytes(data))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 255))
def test_any_other_byte_is_refused_or_changes_nothing(place: int, value: int) -> None:
    """Some bits of deflate have no meaning."""
    recording = Recording("x", SHAPE)
    recording.add(one_pass([7], "prefill", [[0, 1]], [[2, 3]]).end())
    right = recording_to_bytes(recording)
    data = bytearray(right)
    data[place % len(data)] = value
    try:
        found = recording_from_bytes(bytes(data))
    except BadContainer:
        return
    assert recording_to_bytes(found) == right


def test_an_array_that_inflates_beyond_its_shape_is_refused() -> None:
    bomb = pack("t", 1, {}, {"a": np.zeros(1000, np.int64)})
    with pytest.raises(BadContainer, match="damaged"):
        unpack(bomb.replace(b"[1000]", b"[1001]"), "t", 1)
    meta, arrays = unpack(pack("t", 1, {"n": 3}, {"a": np.arange(3, dtype=np.int32)}), "t", 1)
    assert (meta, arrays["a"].tolist()) == ({"n": 3}, [0, 1, 2])


def test_ids_that_no_model_has_are_refused() -> None:
    recording = Recording("x", SHAPE)
    builder = one_pass([7], "prefill", [[0, 1]], [[2, 3]])
    builder.ids[0, 0, 0] = 4
    recording.add(builder.end())
    with pytest.raises(BadContainer, match="expert ids"):
        recording_from_bytes(recording_to_bytes(recording))
