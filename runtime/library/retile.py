"""Brings a model in an older layout to today's, file by file and where it lies: nothing is fetched.

Does not know commands, sources, or what the bytes of a layout mean.

A batch of files is written anew below `.retile`, made durable, and each renamed over the old one;
the manifest, which until then names the older layout, comes last. So whenever this is killed every
file is whole, in one layout or the other: a rerun tells which by its hash and its header. While it
runs it takes one batch of extra disk space.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from moeinf.models import family_of
from moeinf.offload.format.layout import LAYOUT_VERSIONS, ExpertKey
from moeinf.offload.format.older_layouts import older_bytes, retiled
from moeinf.offload.format.shards import FileRecord, shard_header, shard_path, write_file
from moeinf.runtime.atomic_files import sync_filesystem
from moeinf.runtime.checkpoints.checkpoint import (
    CONFIG,
    SourceTensor,
    header_length,
    memory_of,
    read_header,
    read_json,
)
from moeinf.runtime.checkpoints.inventory import WantedParts
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import (
    DENSE,
    DamagedModel,
    Manifest,
    is_current,
    read_manifest,
    write_manifest,
)
from moeinf.runtime.library.shard_writer import Slice, dense_header, hash_file
from moeinf.runtime.library.staging import only_maker
from moeinf.runtime.names import ModelName
from moeinf.runtime.sizes import Progress

_BATCH_BYTES = 256 << 20
_WORKERS = 4
_ASIDE = ".retile"


def retile(library: Library, name: ModelName, progress: Progress) -> Manifest:
    """The manifest of the model in today's layout, which it now has.

    Raises ModelInUse, PullInProgress, DamagedModel for a file that is of neither layout; OSError.
    """
    folder = library.folder(name)
    with only_maker(folder, library.locks):
        manifest = read_manifest(folder)
        if is_current(manifest):
            return manifest
        library.check_unused(name)
        job = _Job(folder, manifest)
        shutil.rmtree(job.aside, ignore_errors=True)
        total, done = manifest.size_bytes, 0
        records: dict[str, FileRecord] = {}
        with ThreadPoolExecutor(_WORKERS) as pool:
            for batch in _batches(manifest.files):
                progress("re-tiling", done, total)
                fresh = list(pool.map(job.rewrite, batch))
                sync_filesystem(folder)
                for record in fresh:
                    records[record.path] = record
                    if (job.aside / record.path).exists():
                        (job.aside / record.path).replace(folder / record.path)
                done += sum(record.size_bytes for record in batch)
        shutil.rmtree(job.aside, ignore_errors=True)
        sync_filesystem(folder)
        files = tuple(records[file.path] for file in manifest.files)
        dense = records[DENSE].data_bytes
        version = LAYOUT_VERSIONS[manifest.dtype]
        manifest = replace(manifest, files=files, dense_bytes=dense, layout=version)
        write_manifest(folder, manifest)
        progress("re-tiling", total, total)
        return manifest


def _batches(files: Iterable[FileRecord]) -> Iterator[list[FileRecord]]:
    batch: list[FileRecord] = []
    for file in files:
        batch.append(file)
        if sum(record.size_bytes for record in batch) >= _BATCH_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


class _Job:
    """One model on its way; `rewrite` may run on several threads."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.aside = folder / _ASIDE
        self._folder, self._manifest = folder, manifest
        self._layout = manifest.expert_layout
        cells = (
            ExpertKey(layer, expert)
            for layer in range(manifest.layers)
            for expert in range(manifest.experts)
        )
        self._keys = {shard_path(key): key for key in cells}

    def rewrite(self, old: FileRecord) -> FileRecord:
        """Writes the file anew below `aside` unless it is of today's layout, or of none."""
        path = self._folder / old.path
        try:
            now = hash_file(path, old.path, old.data_offset)
        except OSError as error:
            raise DamagedModel(f"{self._manifest.model}: {old.path}: {error.strerror}") from error
        if not old.data_offset and now == old:
            return old  # config, tokenizer and the like
        if now != old:
            if old.data_offset and _layout_of(path) == self._layout.version:
                return now
            raise DamagedModel(f"{self._manifest.model}: {old.path} is not what was pulled")
        key = self._keys.get(old.path)
        return self._dense(path) if key is None else self._shard(path, key)

    def _shard(self, path: Path, key: ExpertKey) -> FileRecord:
        tensors = read_header(path)
        f, d = self._layout.intermediate, self._layout.hidden
        shapes = {"gate": (f, d), "up": (f, d), "down": (d, f)}
        data = (self._tiles(tensors[role], shape) for role, shape in shapes.items())
        return write_file(self.aside, shard_path(key), shard_header(key, self._layout), data)

    def _dense(self, path: Path) -> FileRecord:
        tensors = read_header(path)
        values = read_json(self._folder / CONFIG)
        family = family_of(values)
        wanted = WantedParts()
        family.build(family.parse(values), wanted)
        slices = {}
        for name, tensor in tensors.items():
            form = tensor.dtype if tensor.dtype != "U8" else self._form(tensor, wanted.shapes[name])
            slices[name] = Slice(form, wanted.shapes[name])
        header, order = dense_header(slices, self._layout.dtype)
        data = (
            self._tiles(tensors[name], slices[name].shape)
            if tensors[name].dtype == "U8"
            else _bytes_of(tensors[name])
            for name in order
        )
        return write_file(self.aside, DENSE, header, data)

    def _form(self, tensor: SourceTensor, shape: tuple[int, ...]) -> str:
        for form in ("Q4", "Q8"):
            if tensor.size_bytes == older_bytes(form, self._manifest.layout, *_sides(shape)):
                return form
        raise DamagedModel(f"{self._manifest.model}: {DENSE}: {tensor.name} has no format's size")

    def _tiles(self, tensor: SourceTensor, shape: tuple[int, ...]) -> memoryview:
        form, data = (
            self._form(tensor, shape),
            torch.frombuffer(_bytes_of(tensor), dtype=torch.uint8),
        )
        return memory_of(retiled(data, form, self._manifest.layout, *_sides(shape)))


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = shape
    return rows, columns


def _bytes_of(tensor: SourceTensor) -> memoryview:
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        return memoryview(bytearray(file.read(tensor.size_bytes)))


def _layout_of(path: Path) -> int | None:
    """The version that a file's header names; None when it names none."""
    try:
        with path.open("rb") as file:
            length = header_length(path, path.stat().st_size, file.read(8))
            return int(json.loads(file.read(length))["__metadata__"]["layout"])
    except (KeyError, TypeError, ValueError):
        return None
