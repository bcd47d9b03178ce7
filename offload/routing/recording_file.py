"""Convert recordings to bytes and back (`.eam` files): ids, weights and next-layer hints.

The container is that of array_file.py, of kind "recording". Arrays, with n = all rows of all
passes, row by row in the order of the passes:

    phases [P] u1 (0 encode, 1 prefill, 2 decode)      lengths [P] i4: rows of each pass
    rows [n] i8: the request of each row               accepted [n] b1
    ids [n, L, K] i2                                    weights [n, L, K] f4, if recorded
    hints [n, L, H] i2, if recorded
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.format.array_file import Arrays, BadContainer, pack, unpack
from moeinf.offload.routing.trace import Pass, Phase, Recording, RoutingShape

KIND = "recording"
VERSION = 1
_PHASES: tuple[Phase, ...] = ("encode", "prefill", "decode")


def recording_to_bytes(recording: Recording) -> bytes:
    """Return the recording as bytes.

    Weights are written if every pass has them, hints if any pass has them. Hints are padded with -1
    to one width.
    """
    passes = recording.passes
    shape = recording.shape
    arrays: Arrays = {
        "phases": np.array([_PHASES.index(p.phase) for p in passes], np.uint8),
        "lengths": np.array([len(p.rows) for p in passes], np.int32),
        "rows": _joined([p.rows for p in passes], (0,), np.int64),
        "accepted": _joined([p.accepted for p in passes], (0,), np.bool_),
        "ids": _by_row([p.ids for p in passes], shape.layers, shape.top_k, np.int16),
    }
    weights = [p.weights for p in passes if p.weights is not None]
    if passes and len(weights) == len(passes):
        arrays["weights"] = _by_row(weights, shape.layers, shape.top_k, np.float32)
    hints = [p.hints for p in passes if p.hints is not None]
    if hints:
        width = max(h.shape[2] for h in hints)
        arrays["hints"] = _by_row(
            [_padded(p, width) for p in passes], shape.layers, width, np.int16
        )
    labels = {str(request): label for request, label in recording.labels.items()}
    meta = {"name": recording.name, "shape": asdict(shape), "labels": labels}
    return pack(KIND, VERSION, meta, arrays)


def recording_from_bytes(data: bytes) -> Recording:
    """Read a recording. Raises BadContainer if the bytes are not a complete, consistent one."""
    meta, arrays = unpack(data, KIND, VERSION)
    try:
        shape = RoutingShape(**{key: int(value) for key, value in meta["shape"].items()})
        labels = {int(request): str(label) for request, label in meta["labels"].items()}
        recording = Recording(str(meta["name"]), shape, labels=labels)
        _check(shape, arrays)
        recording.passes.extend(_passes(arrays))
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        if isinstance(error, BadContainer):
            raise
        raise BadContainer(f"not a recording: {error}") from error
    return recording


def _check(shape: RoutingShape, arrays: Arrays) -> None:
    n, ids = len(arrays["rows"]), arrays["ids"]
    wanted = {"rows": (n,), "accepted": (n,), "ids": (n, shape.layers, shape.top_k)}
    if "weights" in arrays:
        wanted["weights"] = wanted["ids"]
    if "hints" in arrays:
        wanted["hints"] = (n, shape.layers, arrays["hints"].shape[-1])
    for name, size in wanted.items():
        if arrays[name].shape != size:
            raise BadContainer(f"{name} is {arrays[name].shape}, not {size}")
    phases, lengths = arrays["phases"], arrays["lengths"]
    if phases.shape != lengths.shape or lengths.sum() != n or (lengths < 1).any():
        raise BadContainer("the lengths of the passes do not add up")
    for values in (ids, arrays.get("hints", ids)):
        if n and not (values.min() >= -1 and values.max() < shape.experts):
            raise BadContainer(f"expert ids outside -1 … {shape.experts - 1}")
    if not 0 <= shape.encoder_layers <= shape.layers or (n and phases.max() >= len(_PHASES)):
        raise BadContainer("phases or layers are invalid")


def _passes(arrays: Arrays) -> list[Pass]:
    ends = np.concatenate([[0], np.cumsum(arrays["lengths"])]).tolist()
    weights, hints = arrays.get("weights"), arrays.get("hints")

    def by_layer(array: NDArray[Any] | None, start: int, end: int) -> NDArray[Any] | None:
        return None if array is None else array[start:end].transpose(1, 0, 2)

    return [
        Pass(
            _PHASES[phase],
            arrays["rows"][start:end],
            cast(NDArray[np.int16], by_layer(arrays["ids"], start, end)),
            arrays["accepted"][start:end],
            by_layer(weights, start, end),
            by_layer(hints, start, end),
        )
        for phase, (start, end) in zip(arrays["phases"].tolist(), pairwise(ends), strict=True)
    ]


def _padded(done: Pass, width: int) -> NDArray[np.int16]:
    padded = np.full((*done.ids.shape[:2], width), -1, np.int16)
    if done.hints is not None:
        padded[:, :, : done.hints.shape[2]] = done.hints
    return padded


def _by_row(parts: list[Any], layers: int, width: int, dtype: Any) -> NDArray[Any]:
    """Join the passes' [L, T, W] to [n, L, W]."""
    return _joined([part.transpose(1, 0, 2) for part in parts], (0, layers, width), dtype)


def _joined(parts: list[Any], empty: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.zeros(empty, dtype), *parts]).astype(dtype, copy=False)
