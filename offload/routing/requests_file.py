"""Read the routing of many requests from an `.npz` file of plain arrays.

Letters: R requests, T tokens of all requests, L MoE layers, K experts per token.

    ids         u1 or u2 [T, L, K]   the experts of each token
    weights     f2 or f4 [T, L, K]   the gate's weights of these experts; may be absent
    offsets     i4 or i8 [R + 1]     request r has the tokens offsets[r] … offsets[r + 1]
    prompt_len  i4 or i8 [R]         the leading tokens of request r that are its prompt
    label       U        [R]         the kind of request
    experts, expert_bytes  i4 or i8 []  E and the bytes of one expert; may be absent: largest id + 1
                                        and unknown

The bytes are untrusted. Only stored and deflated members are read, pickled objects never. An
array's type and sizes are checked before its memory is allocated.
"""

from __future__ import annotations

import math
import re
import struct
import zipfile
import zlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from moeinf.errors import reason
from moeinf.offload.routing.route_csv import BadRouteTrace
from moeinf.offload.routing.trace import Pass, Recording, RoutingShape

_MOST_FILE_BYTES = 1 << 30
_MOST_IDS = 1 << 26  # T·L·K: 430,000 tokens of DeepSeek-V2-Lite
_MOST_REQUESTS = 1 << 16
_MOST_LETTERS = 256  # of a label
_MOST_LAYERS, _MOST_EXPERTS, _MOST_EXPERT_BYTES = 1024, 1 << 15, 1 << 48
_WHOLE = ("<i4", "<i8")
_TYPES = {
    "ids": ("|u1", "<u2"),
    "weights": ("<f2", "<f4"),
    "offsets": _WHOLE,
    "prompt_len": _WHOLE,
    "label": tuple(f"<U{letters}" for letters in range(1, _MOST_LETTERS + 1)),
    "experts": _WHOLE,
    "expert_bytes": _WHOLE,
}
# The header that NumPy writes for version 1.0, C order.
_HEADER = re.compile(
    rb"\{'descr': '([<|]\w{2,5})', 'fortran_order': False, 'shape': \(([0-9, ]{0,64})\), \} *\n"
)
_MAGIC = b"\x93NUMPY\x01\x00"
# A damaged archive raises these besides ValueError.
_HOSTILE = (
    ValueError, OSError, EOFError, OverflowError, RuntimeError, struct.error, zlib.error,
    zipfile.BadZipFile,
)  # fmt: skip


@dataclass(frozen=True)
class RecordedRequest:
    """The routing of one request of t tokens, prompt first.

    ids [t, L, K] u1 or u2; weights [t, L, K] f2 or f4, None if not recorded.
    """

    label: str
    prompt_len: int
    ids: NDArray[np.unsignedinteger[Any]]
    weights: NDArray[np.floating[Any]] | None

    @property
    def prompt_ids(self) -> NDArray[np.unsignedinteger[Any]]:
        return self.ids[: self.prompt_len]

    @property
    def decode_ids(self) -> NDArray[np.unsignedinteger[Any]]:
        return self.ids[self.prompt_len :]


@dataclass(frozen=True)
class RecordedRequests:
    """The requests of one file, in its order."""

    name: str
    shape: RoutingShape
    requests: list[RecordedRequest]

    @property
    def layers(self) -> int:
        return self.shape.layers

    @property
    def experts(self) -> int:
        return self.shape.experts

    @property
    def top_k(self) -> int:
        return self.shape.top_k

    def recording(self) -> Recording:
        """Return the requests one after the other: a prefill pass each, a decode pass per token.

        Request r of the file is request r of the recording.
        """
        recording = Recording(self.name, self.shape)
        for number, request in enumerate(self.requests):
            recording.labels[number] = request.label
            if request.prompt_len:
                recording.add(_pass(request, number, 0, request.prompt_len))
            for token in range(request.prompt_len, len(request.ids)):
                recording.add(_pass(request, number, token, token + 1))
        return recording


def read_requests(path: Path) -> RecordedRequests:
    """Read an `.npz` file of requests. Raises BadRouteTrace, which names the file, and OSError."""
    with path.open("rb") as file:
        try:
            if path.stat().st_size > _MOST_FILE_BYTES:
                raise ValueError(f"more than {_MOST_FILE_BYTES >> 20} MiB")
            with zipfile.ZipFile(file) as archive:
                return _requests(path.name.removesuffix(".npz"), _Members(archive))
        except _HOSTILE as error:
            raise BadRouteTrace(f"{path.name} is not a route trace: {reason(error)}") from error


class _Members:
    """The arrays of an archive, each checked before it is read."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._infos = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        if unknown := sorted(self._infos.keys() - _TYPES.keys()):
            raise ValueError(f"{unknown[0]!r} is not an array of this format")

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def read(self, name: str, shape: tuple[int | None, ...], most: int) -> NDArray[Any]:
        """Return an array of `shape` (None: any size) and at most `most` numbers."""
        if name not in self._infos:
            raise ValueError(f"{name} is missing")
        info = self._infos[name]
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{name} is neither stored nor deflated")
        with self._archive.open(info) as file:
            kind, found = _header(name, file)
            fits = len(found) == len(shape) and all(
                wanted in (None, size) for wanted, size in zip(shape, found, strict=True)
            )
            if not fits or math.prod(found) > most:
                raise ValueError(f"{name} has the invalid shape {found}")
            size = math.prod(found) * kind.itemsize
            data = file.read(size + 1)
        if len(data) != size:
            raise ValueError(f"{name} does not have {size} bytes")
        return np.frombuffer(data, kind).reshape(found)

    def number(self, name: str, most: int) -> int | None:
        """Return an array of one whole number from 1 to `most`; None if it is absent."""
        if name not in self:
            return None
        number = int(self.read(name, (), 1))
        if not 1 <= number <= most:
            raise ValueError(f"{name} is {number}")
        return number


def _header(name: str, file: IO[bytes]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Read a member's type and shape."""
    start = file.read(len(_MAGIC) + 2)
    length = int.from_bytes(start[len(_MAGIC) :], "little")
    match = _HEADER.fullmatch(file.read(length)) if start.startswith(_MAGIC) else None
    if match is None:
        raise ValueError(f"{name} is not an array in NumPy's format 1.0")
    kind = match[1].decode()
    if kind not in _TYPES[name]:
        raise ValueError(f"{name} has the type {kind}")
    return np.dtype(kind), tuple(int(size) for size in match[2].replace(b",", b" ").split())


def _requests(name: str, members: _Members) -> RecordedRequests:
    ids = members.read("ids", (None, None, None), _MOST_IDS)
    tokens, layers, top_k = ids.shape
    offsets = members.read("offsets", (None,), _MOST_REQUESTS + 1)
    count = len(offsets) - 1
    prompts = members.read("prompt_len", (count,), _MOST_REQUESTS)
    labels = members.read("label", (count,), _MOST_REQUESTS)
    weights = members.read("weights", ids.shape, _MOST_IDS) if "weights" in members else None
    if not (0 < layers <= _MOST_LAYERS and top_k > 0 and tokens > 0 and count > 0):
        raise ValueError(f"{count} requests of {tokens} tokens, {layers} layers, {top_k} experts")
    largest = int(ids.max())
    experts = members.number("experts", _MOST_EXPERTS) or largest + 1
    if not max(largest + 1, top_k) <= experts <= _MOST_EXPERTS:
        raise ValueError(f"an id is {largest}, of {experts} experts, {top_k} per token")
    ordered = np.sort(ids, axis=2)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise ValueError("a token has an expert twice in a layer")
    if weights is not None and not (np.isfinite(weights).all() and (weights >= 0).all()):
        raise ValueError("a weight is negative or not finite")
    lengths = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != tokens or (lengths < 1).any():
        raise ValueError(f"the offsets do not divide {tokens} tokens")
    if (prompts < 0).any() or (prompts > lengths).any():
        raise ValueError("a prompt is longer than its request")
    shape = RoutingShape(
        layers, experts, top_k, 0, members.number("expert_bytes", _MOST_EXPERT_BYTES) or 0
    )
    requests = [
        RecordedRequest(label, prompt, ids[a:b], None if weights is None else weights[a:b])
        for label, prompt, (a, b) in zip(
            labels.tolist(), prompts.tolist(), pairwise(offsets.tolist()), strict=True
        )
    ]
    return RecordedRequests(name, shape, requests)


def _pass(request: RecordedRequest, number: int, start: int, end: int) -> Pass:
    """Return tokens start … end as one pass."""
    weights = request.weights
    return Pass(
        "prefill" if start < request.prompt_len else "decode",
        np.full(end - start, number, np.int64),
        request.ids[start:end].transpose(1, 0, 2).astype(np.int16),
        np.ones(end - start, np.bool_),
        None if weights is None else weights[start:end].transpose(1, 0, 2).astype(np.float32),
    )
