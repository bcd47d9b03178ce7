"""View the dense tensors of a pulled model in one buffer, with data or as a dry run without."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from moeinf.models.base import (
    Embedding,
    Family,
    KvForm,
    Linear,
    MemoryTable,
    ModelDataError,
    Piece,
    Table,
)
from moeinf.models.families import family_of
from moeinf.offload.format.layout import LAYOUT_VERSIONS, TILE_ALIGNMENT, is_tiled, stored_bytes
from moeinf.runtime.checkpoints.checkpoint import (
    CONFIG,
    TORCH_DTYPE,
    BadCheckpoint,
    SourceTensor,
    read_described,
    read_json,
)
from moeinf.runtime.checkpoints.quantised.fused_experts import MXFP4
from moeinf.runtime.dense.cpu_linear import DenseMath, Rows
from moeinf.runtime.library.manifest import DENSE, MTP, Manifest

META = torch.device("meta")
FORMS_BY_SIZE = ("Q4", "Q8")  # formats that the size of a matrix's tiles tells apart


class DenseHeader(NamedTuple):
    """The header of dense.safetensors."""

    tensors: Mapping[str, SourceTensor]
    forms: Mapping[str, str]  # of tensors in tiles, by name; one that is missing: FORMS_BY_SIZE


def read_dense_header(path: Path) -> DenseHeader:
    """Return the tensors of a dense file, and the formats that its metadata names.

    Raises BadCheckpoint, also for a format that is not tiled.
    """
    tensors, metadata = read_described(path)
    text = metadata.get("forms", "{}") if isinstance(metadata, dict) else "{}"
    try:
        forms = _FORMS.decode(msgspec.convert(text, str))
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{path} names invalid formats ({error})") from error
    for name, form in forms.items():
        if form not in LAYOUT_VERSIONS or not is_tiled(form):
            raise BadCheckpoint(f"{path}: {name!r} has the unknown format {form!r}")
    return DenseHeader(tensors, forms)


class DenseViews:
    """The `Parts` of a pulled model: views of one buffer that holds the data of dense.safetensors.

    Its tables (base.Table) have no data.

    header       its tensors and their formats
    data_offset  the offset of the buffer's first byte in the file
    """

    def __init__(
        self,
        header: DenseHeader,
        buffer: Tensor,
        data_offset: int,
        math: DenseMath,
        kv: KvForm = "full",
    ) -> None:
        self._tensors, self._forms, self._buffer = header.tensors, header.forms, buffer
        self._data_offset, self._math = data_offset, math
        self.kv: KvForm = kv

    def tensor(self, name: str, *shape: int) -> Tensor:
        found = self._tensors.get(name)
        if found is None or found.shape != shape or found.dtype not in TORCH_DTYPE:
            raise ModelDataError(f"{DENSE} lacks {name} of shape {list(shape)}")
        dtype, data = TORCH_DTYPE[found.dtype], self._bytes_of(found)
        if data.storage_offset() % dtype.itemsize:  # version 0.1 placed some vectors unaligned
            data = data.clone()
        return data.view(dtype).view(shape)

    def linear(
        self, prefix: str, out_features: int, in_features: int, bias: bool = False
    ) -> Linear:
        offset = self.tensor(f"{prefix}.bias", out_features) if bias else None
        tiles = self._tiles(f"{prefix}.weight", out_features, in_features)
        if tiles is not None:
            return self._math.tiled_linear(*tiles, out_features, in_features, offset)
        weight = self.tensor(f"{prefix}.weight", out_features, in_features)
        return self._math.plain_linear(weight, offset)

    def embedding(self, prefix: str, count: int, width: int) -> Embedding:
        tiles = self._tiles(f"{prefix}.weight", count, width)
        if tiles is not None and tiles[1] != MXFP4:  # no kernel reads single rows of it
            rows = self._math.tiled_embedding(*tiles, count, width)
            return Embedding(rows, torch.bfloat16, self._math.place)
        return Embedding.of(self.tensor(f"{prefix}.weight", count, width))

    def table(self, prefix: str, count: int, width: int) -> Table:
        return MemoryTable(torch.empty(count, width, device=META))

    def tuned(self, piece: Piece) -> Piece:
        return self._math.tuned(piece)

    def _tiles(self, name: str, rows: int, columns: int) -> tuple[Tensor, str] | None:
        """Return the tiles of a matrix and their format; None if it is not stored as tiles."""
        found = self._tensors.get(name)
        if found is None or found.dtype != "U8":
            return None
        forms = (self._forms[name],) if name in self._forms else FORMS_BY_SIZE
        for form in forms:
            if found.size_bytes == stored_bytes(form, (rows, columns)):
                tiles = self._bytes_of(found)
                aligned = tiles.storage_offset() % TILE_ALIGNMENT == 0
                return tiles if aligned else tiles.clone(), form
        return None  # then `tensor` refuses it

    def _bytes_of(self, found: SourceTensor) -> Tensor:
        start = found.offset - self._data_offset
        return self._buffer[start : start + found.size_bytes]


def check_opens(folder: Path, manifest: Manifest) -> None:
    """Build the model of a folder as the loader does, on views without memory.

    This finds a file that no engine could open at the time of the pull. Raises BadCheckpoint,
    ModelDataError, or any exception of a view.
    """
    values = read_json(folder / CONFIG)
    family = family_of(values)
    config = family.parse(values)
    _check_builds(family, config, folder, manifest)
    if (modules := manifest.modules) is not None:
        own = family.mtp(config)
        assert own is not None
        _check_builds(own, own.parse(values), folder / MTP, modules)


def _check_builds(family: Family, config: Any, folder: Path, manifest: Manifest) -> None:
    record, header = manifest.file(DENSE), read_dense_header(folder / DENSE)
    buffer = torch.empty(record.data_bytes, dtype=torch.uint8, device=DryMath.place)
    family.build(config, DenseViews(header, buffer, record.data_offset, DryMath()))


class DryMath:
    """A `linears.DenseMath` that computes nothing."""

    place = META

    def tiled_linear(
        self, tiles: Tensor, form: str, out_features: int, in_features: int, bias: Tensor | None
    ) -> Linear:
        return lambda x: x.new_empty(*x.shape[:-1], out_features)

    def plain_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return lambda x: x.new_empty(*x.shape[:-1], len(weight))

    def tiled_embedding(self, tiles: Tensor, form: str, count: int, width: int) -> Rows:
        return lambda ids: torch.empty(len(ids), width, device=self.place)

    def tuned(self, piece: Piece) -> Piece:
        return piece


_FORMS = msgspec.json.Decoder(dict[str, str])
