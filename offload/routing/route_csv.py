"""Read route traces of the BigMoeOnEdge project into recordings.

A file has one prompt. Its tokens become one prefill pass, and every later step a decode pass.

Format: `#` lines with name=value pairs (n_layer, n_expert, n_expert_used, per layer expert_bytes
and dense_bytes). Then CSV with at least phase, step, layer, slot and expert; phase 0 is the prompt,
1 decode. Layers that do not run for a token have no rows.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moeinf.errors import UnusableInput, reason
from moeinf.offload.routing.trace import Pass, PassBuilder, Recording, RoutingShape

_MOST_LAYERS, _MOST_EXPERTS = 1024, 1 << 15  # ids are int16
_MOST_BYTES = 256 << 20  # bytes of text: some 8 million rows
_MOST_IDS = 1 << 28  # ids of all tokens


class BadRouteTrace(UnusableInput, ValueError):
    """The file is not a route trace."""

    code = "bad_route_trace"
    hint = "`moeinf trace --out FILE.eam`, which writes a recording"


def read_route_csv(path: Path) -> Recording:
    """Read a `.csv` or `.csv.gz` file as a recording of one request.

    Raises BadRouteTrace and OSError.
    """
    with path.open("rb") as file:
        raw = file.read(_MOST_BYTES + 1)
    try:
        packed = raw[:2] == b"\x1f\x8b"
        text = gzip.GzipFile(fileobj=io.BytesIO(raw)).read(_MOST_BYTES + 1) if packed else raw
        if len(text) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES >> 20} MiB of text")
        return _parse(path.name.removesuffix(".gz").removesuffix(".csv"), text.decode())
    except (LookupError, TypeError, ValueError, EOFError, zlib.error, csv.Error, OSError) as error:
        words = f"{error} is missing" if isinstance(error, KeyError) else reason(error)
        raise BadRouteTrace(f"{path.name} is not a route trace: {words}") from error


def _parse(name: str, text: str) -> Recording:
    lines = text.splitlines()
    comments = [line[1:] for line in lines if line.startswith("#")]
    shape = _shape(comments)
    rows = csv.DictReader(io.StringIO("\n".join(x for x in lines if not x.startswith("#"))))
    tokens: dict[tuple[int, int], NDArray[np.int16]] = {}
    for row in rows:
        key = _below(2, row, "phase"), int(row["step"])
        if key not in tokens:
            if (len(tokens) + 1) * shape.layers * shape.top_k > _MOST_IDS:
                raise ValueError(f"more than {_MOST_IDS} places for experts")
            tokens[key] = np.full((shape.layers, shape.top_k), -1, np.int16)
        place = _below(shape.layers, row, "layer"), _below(shape.top_k, row, "slot")
        tokens[key][place] = _below(shape.experts, row, "expert")
    prompt = [ids for (phase, _), ids in tokens.items() if phase == 0]
    recording = Recording(name.removesuffix(".route"), shape)
    if prompt:
        recording.add(_pass(shape, prompt, decode=False))
    for (phase, _), ids in tokens.items():
        if phase == 1:
            recording.add(_pass(shape, [ids], decode=True))
    if not recording.passes:
        raise ValueError("no tokens")
    return recording


def _below(count: int, row: Mapping[str, str], name: str) -> int:
    number = int(row[name])
    if not 0 <= number < count:
        raise ValueError(f"{name} {number} of {count}")
    return number


def _pass(shape: RoutingShape, tokens: list[NDArray[np.int16]], decode: bool) -> Pass:
    builder = PassBuilder(shape, np.zeros(len(tokens), np.int64), "decode" if decode else "prefill")
    builder.ids[:] = np.stack(tokens, 1)  # [L, T, K]
    return builder.end()


def _shape(comments: Iterable[str]) -> RoutingShape:
    """Read the shape: expert_bytes is the mean over layers, dense_bytes the sum."""
    sizes: dict[str, list[int]] = {}
    for comment in comments:
        for pair in comment.split():
            name, _, value = pair.partition("=")
            if value.isdigit():
                sizes.setdefault(name, []).append(int(value))
    layers, experts = sizes["n_layer"][0], sizes["n_expert"][0]
    if not (0 < layers <= _MOST_LAYERS and 0 < experts <= _MOST_EXPERTS):
        raise ValueError(f"{layers} layers of {experts} experts")
    expert_bytes = sum(sizes.get("expert_bytes", [0])) // layers
    dense_bytes = sum(sizes.get("dense_bytes", [0]))
    top_k = sizes["n_expert_used"][0]
    if not 0 < top_k <= experts or max(expert_bytes, dense_bytes) >= 1 << 48:
        raise ValueError(f"{top_k} of {experts} experts, {expert_bytes} bytes each")
    return RoutingShape(layers, experts, top_k, 0, expert_bytes, dense_bytes)
