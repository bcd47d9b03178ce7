"""Cut a model into parts of consecutive layers, each with its own weights, experts and KV.

A part is a manifest like that of a whole model, so that plans, stores and loaders need not know.
Its MoE layers count from 0. The dense file is read and checked as a whole, and only what a part
needs stays in memory. The layers of attention keep their numbers, because memory of a KV cache is
touched only where tokens are written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from moeinf.errors import UnusableInput
from moeinf.models.base import Piece
from moeinf.models.families import family_of
from moeinf.models.layers.decoder import Block, Decoder
from moeinf.models.layers.feed_forward import DenseFfn
from moeinf.models.layers.kv_cache import CacheLayout
from moeinf.models.layers.moe import SparseFfn
from moeinf.offload.format.shards import FileRecord
from moeinf.runtime.checkpoints.checkpoint import CONFIG, read_json
from moeinf.runtime.dense.cpu_backend import CpuMath
from moeinf.runtime.dense.cpu_block import NativeBlock, joined, tuned_block
from moeinf.runtime.library.dense_views import META, DenseViews, DryMath, read_dense_header
from moeinf.runtime.library.manifest import DENSE, Manifest

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class CannotCut(UnusableInput):
    """The layers of a model cannot be in several processes, or not in these."""

    code = "cannot_cut"
    hint = "the same command without a pipeline, or other --layers"


class Part(Manifest, frozen=True, kw_only=True):
    """The manifest of some layers of a model. Its files, and so its digest, are the whole model's.

    `layers`, `forms`, `dense_bytes` and the bytes of KV are those of the part.
    """

    first: int  # of its layers, in the model
    stop: int
    of: int  # layers of the model
    dtype_of_states: str  # bfloat16 or float32
    own_shards: tuple[FileRecord, ...]
    kept: tuple[tuple[int, int], ...]  # ranges of the dense file that it needs

    def shards(self) -> list[FileRecord]:
        """See Manifest."""
        return list(self.own_shards)

    @property
    def last(self) -> int:
        """The number of its last layer."""
        return self.stop - 1

    def keeps(self, start: int, stop: int) -> bool:
        """Return whether the part needs any of these bytes of the dense file."""
        return any(begin < stop and start < end for begin, end in self.kept)


@dataclass(frozen=True)
class Layers:
    """The layers of a model that can be cut, found without reading its weights."""

    sparse: tuple[bool, ...]  # whether each one has experts
    cache: CacheLayout


def layers_of(manifest: Manifest, folder: Path) -> Layers:
    """Return the layers of a model. Raises CannotCut for one whose layers share more than states.

    Raises also what reading a damaged model raises.
    """
    values = read_json(folder / CONFIG)
    family = family_of(values)
    record, header = manifest.file(DENSE), read_dense_header(folder / DENSE)
    buffer = torch.empty(record.data_bytes, dtype=torch.uint8, device=META)
    views = DenseViews(header, buffer, record.data_offset, DryMath())
    model = family.build(family.parse(values), views)
    if not isinstance(model, Decoder):
        raise CannotCut(f"{manifest.model} cannot be cut into stages (it is an encoder-decoder)")
    cache, sparse = model.body.cache, list[bool]()
    if cache.recurrent is not None:
        raise CannotCut(f"{manifest.model} cannot be cut into stages (it has recurrent layers)")
    for block in model.body.blocks:
        if isinstance(block, Block) and isinstance(block.ffn, SparseFfn | DenseFfn):
            sparse.append(isinstance(block.ffn, SparseFfn))
    simple = not (model.body.streams or model.body.ahead or cache.indexers or cache.coarse)
    if not simple or len(sparse) < len(model.body.blocks):
        why = "its layers pass on more than one state per token"
        raise CannotCut(f"{manifest.model} cannot be cut into stages ({why})")
    return Layers(tuple(sparse), cache)


def cut(manifest: Manifest, folder: Path, first: int, stop: int) -> Part:
    """Return the part with the layers first … stop - 1. The first part has the embedding and head.

    Raises CannotCut, also for layers that do not exist or have no experts.
    """
    layers = layers_of(manifest, folder)
    sparse, of, shown = layers.sparse, len(layers.sparse), f"{first}-{stop - 1}"
    if not 0 <= first < stop <= of:
        raise CannotCut(f"{manifest.model} has the layers 0-{of - 1}, not {shown}")
    before, count = sum(sparse[:first]), sum(sparse[first:stop])
    if not count:
        raise CannotCut(f"the layers {shown} of {manifest.model} have no experts")
    record, kept, dense_bytes = manifest.file(DENSE), list[tuple[int, int]](), 0
    for name, tensor in read_dense_header(folder / DENSE).tensors.items():
        found = _LAYER.search(name)
        mine = first == 0 if found is None else first <= int(found[1]) < stop
        if mine:
            start = tensor.offset - record.data_offset
            kept.append((start, start + tensor.size_bytes))
            dense_bytes += tensor.size_bytes
    experts, forms = manifest.experts, manifest.forms
    if len(forms) > 1:
        each = len(forms) // manifest.layers
        forms = forms[before * each : (before + count) * each]
    about = {name: getattr(manifest, name) for name in Manifest.__struct_fields__} | {
        "layers": count,
        "forms": forms,
        "dense_bytes": max(1, dense_bytes),
        "kv_bytes_per_token": _kv_bytes(layers.cache, first, stop),
        "kv_q8_bytes_per_token": _kv_bytes(replace(layers.cache, form="q8"), first, stop),
        "mtp": None,
    }
    return Part(
        **about,
        first=first,
        stop=stop,
        of=of,
        dtype_of_states=str(layers.cache.dtype).removeprefix("torch."),
        own_shards=tuple(manifest.shards()[before * experts : (before + count) * experts]),
        kept=tuple(kept),
    )


def _kv_bytes(cache: CacheLayout, first: int, stop: int) -> int:
    planes = [plane for layer in cache.stored[first:stop] for plane in layer]
    return sum(heads * width for heads, width in planes) * cache.stored_dtype.itemsize


class PartMath(CpuMath):
    """The CPU's arithmetic, which keeps the blocks of one part of a model."""

    def __init__(self, part: Part) -> None:
        self._first, self._stop = part.first, part.stop

    def tuned(self, piece: Piece) -> Piece:
        """See models.base.Parts.tuned."""
        if not isinstance(piece, tuple):
            return super().tuned(piece)
        plain = [one.block if isinstance(one, NativeBlock) else one for one in piece]
        own, layer, found = plain[self._first : self._stop], 0, list[Any]()
        left = sum(isinstance(one.ffn, SparseFfn) for one in own)
        for block in own:
            if isinstance(block.ffn, SparseFfn):
                ahead = block.ffn.ahead if layer + 1 < left else None
                block = replace(block, ffn=replace(block.ffn, layer=layer, ahead=ahead))
                layer += 1
            found.append(tuned_block(block))
        return cast(Piece, joined(found))
