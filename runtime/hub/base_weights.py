"""Compare a few rows of each kind of tensor of a GGUF file with the repository of its checkpoint.

Only the headers and rows that are compared are fetched: some hundred KiB. An error in restoring the
order of rows, or a file that was made in another way, shows here and not as nonsense at the first
run.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from moeinf.errors import UnusableInput
from moeinf.models.base import Family, ModelDataError, MoeShape
from moeinf.models.families import family_of
from moeinf.runtime.checkpoints.checkpoint import (
    CONFIG,
    SAFETENSORS,
    BadCheckpoint,
    Checkpoint,
    SourceTensor,
    header_length,
    indexed_files,
    parse_header,
    parse_object,
)
from moeinf.runtime.checkpoints.inventory import WantedParts, unfuse
from moeinf.runtime.checkpoints.quantised.joining import joined
from moeinf.runtime.checkpoints.row_samples import CosineSimilarity, Read, compare, cosine_limit
from moeinf.runtime.hub.download import Fetcher, fetch_bytes, fetch_small
from moeinf.runtime.hub.listing import Repository

_LAYER = re.compile(r"model\.layers\.(\d++)\.(.+)")
# Tensors that belong to a quantised matrix: X.weight_scale_inv, X_blocks, …
_BESIDE = re.compile(
    r"(_scale_inv|_scale_2|_global_scale|_scale|_scales|_blocks|_packed|_shape|_zero_point)$"
)
_MOST_FILES = 8  # whose headers are read
_MOST_BYTES = {"index": 32 << 20, "header": 16 << 20, "config": 4 << 20}
_THREADS = 8  # requests in flight


class OtherWeights(UnusableInput, ValueError):
    """A tensor of a GGUF file differs from that of the repository that it was made from."""

    code = "other_weights"
    hint = "another file of the model, or `--no-base`, which compares nothing"


@dataclass(frozen=True)
class _Pair:
    """A tensor of the file, and that of the repository."""

    kind: str
    ours: SourceTensor
    theirs: SourceTensor


def compare_rows(
    checkpoint: Checkpoint, read: Read, base: Repository, fetcher: Fetcher
) -> int | None:
    """Return the number of kinds of tensors whose rows agree; 0 if none can be read by ranges.

    read: returns bytes of the GGUF file. None if it is another model: another family, or most kinds
    differ. Raises OtherWeights if some kinds differ, BadCheckpoint, DownloadFailed.
    """
    if not SAFETENSORS.given(base.files.__contains__) or CONFIG not in base.files:
        return 0
    try:
        pairs = list(_pairs(checkpoint, base, fetcher))
    except ModelDataError:
        return None
    likenesses = _compared(pairs, read, partial(_fetched, base, fetcher))
    wrong = {
        kind: found.cosine
        for kind, (limit, found) in likenesses.items()
        if not found.cosine > limit
    }
    if 2 * len(wrong) > len(likenesses):
        return None
    if wrong:
        kind = min(wrong, key=lambda kind: wrong[kind])
        name = next(pair.ours.name for pair in pairs if pair.kind == kind)
        raise OtherWeights(
            f"{name} differs from {kind} of {base.name}: the cosine similarity of sampled rows is "
            f"{wrong[kind]:.2f}, below {likenesses[kind][0]}; "
            f"{len(likenesses) - len(wrong)} of {len(likenesses)} kinds of tensors agree"
        )
    return len(likenesses)


def _compared(
    pairs: list[_Pair], our_read: Read, their_read: Read
) -> Mapping[str, tuple[float, CosineSimilarity]]:
    """Return, by kind, the least cosine and the similarity of its rows."""
    found = [CosineSimilarity() for _ in pairs]

    def one(pair: _Pair, similarity: CosineSimilarity) -> bool:
        return compare(pair.ours, our_read, pair.theirs, their_read, similarity)

    with ThreadPoolExecutor(_THREADS) as pool:
        done = list(pool.map(one, pairs, found))
    kinds: dict[str, tuple[float, CosineSimilarity]] = {}
    for pair, similarity, compared in zip(pairs, found, done, strict=True):
        if compared:
            limit = cosine_limit(pair.ours)
            before = kinds.get(pair.kind)
            if before is None or similarity.cosine - limit < before[1].cosine - before[0]:
                kinds[pair.kind] = limit, similarity
    return kinds


def _fetched(base: Repository, fetcher: Fetcher, name: str, at: int, count: int) -> bytes:
    return fetch_bytes(fetcher, base.files[name], at, at + count)


def _pairs(checkpoint: Checkpoint, base: Repository, fetcher: Fetcher) -> Iterator[_Pair]:
    """Yield the tensors to compare. Raises ModelDataError for another family, BadCheckpoint."""
    config = _object(base, CONFIG, "config", fetcher)
    family = family_of(config)
    if family.parse is not family_of(checkpoint.config).parse:
        raise ModelDataError(f"{base.name} is {family.model_type}")
    parsed = family.parse(config)
    moe = family.build(parsed, WantedParts()).moe
    dense, experts = _chosen(checkpoint), _chosen_experts(checkpoint)
    stored = _stored(base, config, fetcher, _Wanted(family, parsed, dense))
    for name, tensor in stored.items():
        for place, role, theirs in _placed(family, parsed, moe, name, tensor):
            if (ours := experts.get((*place, role))) is not None:
                yield _Pair(f"the experts' {role}", ours, theirs)
        known = _known(family, name)
        if known in dense:
            match = _LAYER.fullmatch(known)
            yield _Pair(match[2] if match else known, dense[known], tensor)


def _placed(
    family: Family, config: Any, moe: MoeShape, name: str, tensor: SourceTensor
) -> Iterator[tuple[tuple[int, int], str, SourceTensor]]:
    """Yield ((MoE layer, expert), role, tensor) of each expert's tensor in a stored one."""
    fused = family.fused(name, config)
    if fused is not None:
        for key, role, piece in unfuse(fused, tensor, moe):
            yield (key.layer, key.expert), role, piece
    elif (part := family.expert(name, config)) is not None:
        yield (part.layer, part.expert), part.role, tensor


def _chosen(checkpoint: Checkpoint) -> dict[str, SourceTensor]:
    """Return the dense tensors to compare by name: of each kind, that of the first layer."""
    first: dict[str, tuple[int, str]] = {}
    family = family_of(checkpoint.config)
    for name in map(family.rename, checkpoint.tensors):
        match = _LAYER.fullmatch(name)
        layer, kind = (int(match[1]), match[2]) if match else (0, name)
        first[kind] = min(first.get(kind, (layer, name)), (layer, name))
    names = {name for _, name in first.values()}
    return {
        known: tensor
        for name, tensor in checkpoint.tensors.items()
        if (known := family.rename(name)) in names
    }


def _chosen_experts(checkpoint: Checkpoint) -> dict[tuple[int, int, str], SourceTensor]:
    """Return the first and the last expert of the first MoE layer, by (layer, expert, role)."""
    last = max((expert for _, expert, _ in checkpoint.experts), default=0)
    return {
        place: tensor
        for place, tensor in checkpoint.experts.items()
        if place[0] == 0 and place[1] in (0, last)
    }


def _known(family: Family, name: str) -> str:
    """Return the name in a model of text alone."""
    return family.rename(name).replace("model.language_model.", "model.", 1)


@dataclass(frozen=True)
class _Wanted:
    """The names of a repository that are compared."""

    family: Family
    config: Any
    dense: Mapping[str, SourceTensor]

    def __contains__(self, name: str) -> bool:
        stem = _BESIDE.sub("", name)
        fused = self.family.fused(stem, self.config)
        if fused is not None:
            return fused.layer == 0
        part = self.family.expert(stem, self.config)
        if part is not None:
            return part.layer == 0
        return _known(self.family, stem) in self.dense


def _stored(
    base: Repository, config: Mapping[str, Any], fetcher: Fetcher, wanted: _Wanted
) -> Mapping[str, SourceTensor]:
    """Return the wanted tensors of a repository by name, from its headers."""
    if SAFETENSORS.index in base.files:
        weight_map = _object(base, SAFETENSORS.index, "index", fetcher).get("weight_map")
        indexed_files(Path(base.name), weight_map, SAFETENSORS)
        assert isinstance(weight_map, dict)
        files: dict[str, list[str]] = defaultdict(list)
        for name, file in weight_map.items():
            if name in wanted:
                files[file].append(name)
        most = sorted(files, key=lambda file: -len(files[file]))[:_MOST_FILES]
        headers = [_header(base, file, fetcher) for file in sorted(most)]
    else:
        headers = [_header(base, SAFETENSORS.single, fetcher)]
    found = {name: t for header in headers for name, t in header.items() if name in wanted}
    return joined(Checkpoint(Path(base.name), config, found))


def _object(base: Repository, name: str, kind: str, fetcher: Fetcher) -> dict[str, Any]:
    file = base.files[name]
    if file.size_bytes > _MOST_BYTES[kind]:
        raise BadCheckpoint(f"{base.name}: {name} is too large")
    return parse_object(fetch_small(fetcher, file), Path(base.name) / name)


def _header(base: Repository, name: str, fetcher: Fetcher) -> dict[str, SourceTensor]:
    file, path = base.files.get(name), Path(base.name) / name
    if file is None:
        raise BadCheckpoint(f"{base.name} has no {name}")
    start = fetch_bytes(fetcher, file, 0, min(8, file.size_bytes))
    length = header_length(path, file.size_bytes, start)
    if length > _MOST_BYTES["header"]:
        raise BadCheckpoint(f"{path} has a header of {length} bytes")
    return parse_header(path, file.size_bytes, fetch_bytes(fetcher, file, 8, 8 + length))
