"""Write an installed model as a GGUF file, in the bits that it has.

Dense tensors are read in blocks of rows, experts one after the other. Each block is written at its
place in the file, so memory is bounded by one expert, or by one matrix whose rows change places.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moeinf.errors import Conflict, problem
from moeinf.models.families import family_of
from moeinf.native import BLOCK_ROWS, crc32c
from moeinf.offload.format.layout import ExpertLayout, plain_form, stored_bytes
from moeinf.offload.format.shards import FileRecord
from moeinf.runtime.checkpoints.checkpoint import (
    CONFIG,
    BadCheckpoint,
    SourceTensor,
    read_exactly,
    read_json,
)
from moeinf.runtime.checkpoints.inventory import WantedParts
from moeinf.runtime.engine.loader import check_small_files
from moeinf.runtime.files.atomic import replaced
from moeinf.runtime.files.regular import check_regular, open_regular
from moeinf.runtime.gguf.writing.architectures import written
from moeinf.runtime.gguf.writing.blocks import encode_rows, factors_of, kind_of
from moeinf.runtime.gguf.writing.description import CannotExport, Change, Place, Written
from moeinf.runtime.gguf.writing.factors import Factors, applies_factor
from moeinf.runtime.gguf.writing.names import expert_name, places
from moeinf.runtime.gguf.writing.writer import (
    FileLayout,
    FileWriter,
    Kind,
    WrittenTensor,
    lay_out,
)
from moeinf.runtime.jobs.export_tables import exported_tables, write_table
from moeinf.runtime.jobs.exported_keys import FILE_TYPES, general_keys, tokenizer_keys
from moeinf.runtime.library.dense_views import (
    FORMS_BY_SIZE,
    DenseHeader,
    read_dense_header,
)
from moeinf.runtime.library.manifest import DENSE, DamagedModel, Manifest
from moeinf.runtime.sizes import Progress, format_bytes

Bytes = NDArray[np.uint8]
Note = Callable[[str], None]
_BLOCK_BYTES = 4 << 20  # of a dense matrix, read at once


class FileExists(Conflict, FileExistsError):
    """A file of that name exists, and the command does not replace it."""

    code = "file_exists"
    hint = "another name, or --force"


@dataclass(frozen=True)
class Exported:
    """The file that was written: its architecture, its tensors by type, its bytes."""

    architecture: str
    tensors: Mapping[str, int]
    size_bytes: int


@dataclass(frozen=True)
class _Output:
    """A tensor of the file that is made of a stored one."""

    tensor: WrittenTensor
    change: Change | None


@dataclass(frozen=True)
class _Stored:
    """A dense tensor of the model: where its bytes are, its format, its rows and columns."""

    source: SourceTensor
    form: str
    rows: int
    columns: int
    outputs: tuple[_Output, ...]

    @property
    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield (first row, number of rows). A tensor whose rows change places is one block."""
        step = self.rows
        if all(output.change is None for output in self.outputs):
            row_bytes = -(-self.source.size_bytes // self.rows)
            step = max(1, _BLOCK_BYTES // row_bytes // BLOCK_ROWS) * BLOCK_ROWS
        for first in range(0, self.rows, step):
            yield first, min(step, self.rows - first)


def export_gguf(
    folder: Path, manifest: Manifest, target: Path, progress: Progress, note: Note, force: bool
) -> Exported:
    """Write the model in `folder` to the GGUF file `target`, completely or not at all.

    Raises CannotExport, FileExists unless `force`, DamagedModel, and OSError (disk full, a folder).
    """
    if os.path.lexists(target):
        if not force:
            raise FileExists(f"{target} already exists")
        check_regular(target)
    check_small_files(folder, manifest)
    _check_forms(folder, manifest)
    values = read_json(folder / CONFIG)
    family = family_of(values)
    config = family.parse(values)
    about = written(family.model_type, config)
    wanted = WantedParts()
    family.build(config, wanted)
    dense = _dense(folder, manifest, about, wanted.shapes)
    experts = _experts(manifest, about)
    keys = general_keys(manifest, about) | tokenizer_keys(folder, about)
    divisors = {
        WrittenTensor(name, Kind.F32, (len(values),)): np.array(values, "<f4")
        for name, values in about.factors.items()
    }
    matrices = [output.tensor for stored in dense for output in stored.outputs]
    matrices += experts.values()
    factors = Factors(about.architecture, matrices)
    tables = exported_tables(manifest, about.tables)
    tensors = [*matrices, *divisors, *factors.tensors, *(one.tensor for one in tables)]
    layout = lay_out(keys, tensors)
    _check_space(target, layout)
    for words in about.notes:
        note(words)
    total = sum(file.data_bytes for file in (manifest.file(DENSE), *manifest.shards()))
    total += sum(one.table.disk_bytes for one in tables)
    done = 0

    def tell(size_bytes: int) -> None:
        nonlocal done
        done += size_bytes
        progress("exporting", done, total)

    with replaced(target) as descriptor:
        file = FileWriter(target, descriptor, layout)
        file.begin()
        for tensor, numbers in divisors.items():
            file.write(tensor, numbers.view(np.uint8), 0)
        _write_experts(file, folder, manifest, experts, factors, tell)
        _write_dense(file, manifest, dense, factors, tell)
        factors.write(file)
        for table in tables:
            with _reading(manifest, manifest.table_files(table.number)[0].path):
                write_table(file, folder, manifest, table, tell)
    kinds = [tensor.kind.name for tensor in tensors]
    counted = {kind.name: kinds.count(kind.name) for kind in Kind if kind.name in kinds}
    return Exported(about.architecture, counted, layout.size_bytes)


def _check_space(target: Path, layout: FileLayout) -> None:
    """Raise OSError (ENOSPC) with the bytes needed unless the disk has room for the file."""
    free = shutil.disk_usage(target.parent).free
    if free < layout.size_bytes:
        needed = format_bytes(layout.size_bytes)
        text = f"{needed} are needed, the disk has {format_bytes(free)} free"
        raise OSError(errno.ENOSPC, text, str(target))


def _check_forms(folder: Path, manifest: Manifest) -> None:
    """Raise CannotExport for a format whose tiles cannot be turned back into blocks."""
    experts = {form for layout in manifest.expert_layouts for form in layout.forms}
    known = FILE_TYPES.keys()
    if unknown := (experts | set(_header(folder, manifest).forms.values())) - known:
        error = CannotExport(f"{manifest.model} has weights in {', '.join(sorted(unknown))}")
        error.hint = "another tag, such as q4, or the GGUF file that it was pulled from"
        raise error


def _header(folder: Path, manifest: Manifest) -> DenseHeader:
    """Read the header of the dense file. Raises DamagedModel."""
    try:
        return read_dense_header(folder / DENSE)
    except BadCheckpoint as error:
        raise DamagedModel(f"{manifest.model}: {error}".replace(f"{folder}/", "")) from error


def _dense(
    folder: Path, manifest: Manifest, about: Written, shapes: Mapping[str, tuple[int, ...]]
) -> list[_Stored]:
    """Return the dense tensors in the order of their bytes. Raises DamagedModel."""
    tensors, forms = _header(folder, manifest)
    return [
        _stored(source, _form_of(source, forms, shapes[source.name]), shapes[source.name], about)
        for source in sorted(tensors.values(), key=lambda tensor: tensor.offset)
    ]


def _form_of(source: SourceTensor, forms: Mapping[str, str], shape: tuple[int, ...]) -> str:
    """Return the format of a dense tensor; the header shows tiles as U8 of one dimension."""
    if source.dtype != "U8":
        return source.dtype
    known = (forms[source.name],) if source.name in forms else FORMS_BY_SIZE
    return next(form for form in known if source.size_bytes == stored_bytes(form, shape))


def _stored(source: SourceTensor, form: str, shape: tuple[int, ...], about: Written) -> _Stored:
    rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, shape[0])
    outputs = tuple(
        _Output(_tensor(place, form, about.architecture), place.change)
        for place in places(source.name, shape, about)
    )
    return _Stored(source, form, rows, columns, outputs)


def _tensor(place: Place, form: str, architecture: str) -> WrittenTensor:
    whole = place.shape if place.whole is None else (*place.shape[:-1], place.whole)
    if place.integers:
        return WrittenTensor(place.name, Kind.I32, place.shape)
    exact = place.exact or (form == "NVFP4" and not applies_factor(architecture, place.name))
    return WrittenTensor(place.name, kind_of(form, whole, exact), place.shape)


def _experts(manifest: Manifest, about: Written) -> dict[tuple[int, str], WrittenTensor]:
    """Return the tensors with all experts of a layer, by MoE layer and role."""
    found: dict[tuple[int, str], WrittenTensor] = {}
    layouts = manifest.expert_layouts
    for layer, number in enumerate(about.moe_layers):
        for part in _parts(layouts[layer * manifest.experts]):
            shape = (part.rows, part.columns) if part.columns > 1 else (part.rows,)
            kind = kind_of(part.form, shape, exact=part.columns == 1)
            found[layer, part.role] = WrittenTensor(
                expert_name(number, part.role), kind, (manifest.experts, *shape)
            )
    return found


@dataclass(frozen=True)
class _Part:
    """One matrix or bias of an expert: its place in the expert's bytes, its format and shape."""

    role: str
    form: str
    offset_bytes: int
    size_bytes: int
    rows: int
    columns: int = 1  # of a bias


def _parts(layout: ExpertLayout) -> list[_Part]:
    """Return the parts of an expert, with gate and up apart."""
    f, d = layout.intermediate, layout.hidden
    found: list[_Part] = []
    for span in layout.spans:
        at, size = span.offset_bytes, span.size_bytes
        form = layout.down if span.name == "down" else layout.dtype
        bias = span.name.endswith("_bias")
        columns = 1 if bias else f if span.name == "down" else d
        if bias:
            form = plain_form(form)
        rows = d if span.name.startswith("down") else f
        stem = span.name.removesuffix("_bias")
        roles = ("gate", "up") if stem == "gate_up" else (stem,)
        share = size // len(roles)
        for number, role in enumerate(roles):
            name = f"{role}_bias" if bias else role
            found.append(_Part(name, form, at + number * share, share, rows, columns))
    return found


def _write_dense(
    file: FileWriter,
    manifest: Manifest,
    dense: Sequence[_Stored],
    factors: Factors,
    tell: Callable[[int], None],
) -> None:
    """Write the dense tensors. Raises DamagedModel unless they are what was pulled."""
    record, checksum = manifest.file(DENSE), 0
    path = dense[0].source.path
    with _reading(manifest, DENSE):
        source = open_regular(path)
    try:
        for stored in dense:
            at = stored.source.offset
            for first, rows in stored.blocks:
                size_bytes = stored_bytes(stored.form, (rows, stored.columns))
                data = np.empty(size_bytes, np.uint8)
                with _reading(manifest, DENSE):
                    read_exactly(source, data.data, at, path)
                at += size_bytes
                checksum = crc32c(data.data, checksum)
                for output in stored.outputs:
                    _write_rows(file, stored, output, data, first, rows, factors)
                tell(size_bytes)
    finally:
        os.close(source)
    if checksum != record.crc32c:
        raise DamagedModel(f"{manifest.model}: {DENSE} is not what was pulled")


def _write_rows(
    file: FileWriter,
    stored: _Stored,
    output: _Output,
    data: Bytes,
    first: int,
    rows: int,
    factors: Factors,
) -> None:
    tensor = output.tensor
    found = encode_rows(data, stored.form, rows, stored.columns, tensor.kind)
    if output.change is not None:
        found = output.change(found)
    if tensor.kind == Kind.NVFP4:
        factors.add(tensor.name, factors_of(data, rows, stored.columns))
    file.write(tensor, found, first * tensor.row_bytes)


def _write_experts(
    file: FileWriter,
    folder: Path,
    manifest: Manifest,
    tensors: Mapping[tuple[int, str], WrittenTensor],
    factors: Factors,
    tell: Callable[[int], None],
) -> None:
    """Write every expert into the tensors of its layer. Raises DamagedModel."""
    layouts = manifest.expert_layouts
    for cell, record in enumerate(manifest.shards()):
        layer, expert = divmod(cell, manifest.experts)
        data = _shard(folder, manifest, record)
        for part in _parts(layouts[cell]):
            tensor = tensors[layer, part.role]
            piece = data[part.offset_bytes : part.offset_bytes + part.size_bytes]
            rows = encode_rows(piece, part.form, part.rows, part.columns, tensor.kind)
            if tensor.kind == Kind.NVFP4:
                factors.add(tensor.name, factors_of(piece, part.rows, part.columns), expert)
            file.write(tensor, rows, expert * rows.nbytes)
        tell(data.nbytes)


@contextmanager
def _reading(manifest: Manifest, name: str) -> Iterator[None]:
    """Turn an error of reading a model's file into DamagedModel."""
    try:
        yield
    except BadCheckpoint as error:
        raise DamagedModel(f"{manifest.model}: {name} is truncated") from error
    except OSError as error:
        raise DamagedModel(f"{manifest.model}: {name}: {problem(error)}") from error


def _shard(folder: Path, manifest: Manifest, record: FileRecord) -> Bytes:
    """Return the checked bytes of an expert. Raises DamagedModel."""
    path, data = folder / record.path, np.empty(record.data_bytes, np.uint8)
    with _reading(manifest, record.path):
        source = open_regular(path)
        try:
            read_exactly(source, data.data, record.data_offset, path)
        finally:
            os.close(source)
    if crc32c(data.data) != record.crc32c:
        raise DamagedModel(f"{manifest.model}: {record.path} is not what was pulled")
    return data
