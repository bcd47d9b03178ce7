"""Write the files of a model from tensors that arrive source file by source file.

A target whose tensors are all available is written and hashed in one pass. A target with tensors in
several source files gets its parts as each file arrives. They are written at their final offsets in
`<name>.parts`, which is hashed once it is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from moeinf.models.base import Role
from moeinf.native import SHARD_DATA_OFFSET, crc32c
from moeinf.offload.format.direct_io import BLOCK_BYTES
from moeinf.offload.format.drives import spread_path
from moeinf.offload.format.layout import (
    ITEM_BYTES,
    LAYOUT_VERSIONS,
    TILE_ALIGNMENT,
    ExpertLayout,
    is_tiled,
    plain_form,
    stored_bytes,
)
from moeinf.offload.format.row_table import RowTable, table_header, table_path
from moeinf.offload.format.shards import (
    FileRecord,
    padded_header,
    shard_header,
    write_file,
)
from moeinf.runtime.checkpoints.checkpoint import SourceTensor
from moeinf.runtime.checkpoints.encode import Look, encoded, unseen
from moeinf.runtime.checkpoints.finite import WeightCheck
from moeinf.runtime.checkpoints.inventory import Inventory
from moeinf.runtime.checkpoints.quantised.fp8 import files_of
from moeinf.runtime.checkpoints.table_blocks import table_blocks
from moeinf.runtime.files.regular import check_regular
from moeinf.runtime.library.dense_views import FORMS_BY_SIZE
from moeinf.runtime.library.manifest import DENSE, MTP
from moeinf.runtime.library.staging import StagingFolder, unfinished_path

_WORKERS = 4
_COMMIT_S = 5.0  # a killed pull repeats the work of this time at most


@dataclass(frozen=True)
class Target:
    """One file to write: its header, and the source tensors that follow it in this order."""

    name: str
    header: bytes
    parts: tuple[SourceTensor, ...]
    forms: tuple[str, ...]  # the format of each part
    table: tuple[RowTable, int] | None = None  # its one part is this file of the table

    def size(self, number: int) -> int:
        """Return the bytes of part `number`."""
        if self.table is not None:
            table, file = self.table
            return table.file_bytes(file) - len(self.header)
        return stored_bytes(self.forms[number], self.parts[number].shape)

    def offset(self, number: int) -> int:
        """Return the offset of part `number` in the file, in bytes."""
        return len(self.header) + sum(self.size(n) for n in range(number))

    def data(self, number: int, look: Look = unseen) -> Iterator[memoryview]:
        """Yield part `number` in blocks. A block is valid until the next one is taken."""
        if self.table is not None:
            return table_blocks(self.parts[number], self.table[0], look)
        return encoded(self.parts[number], self.forms[number], look)


def all_targets(inventory: Inventory, dtype: str, drives: int = 1) -> list[Target]:
    """Return the targets of a model: dense.safetensors, one shard per expert, files of tables.

    The modules of multi-token prediction have the same files in a folder. They and tables
    are on the first drive.
    """
    layouts, wanted = inventory.expert_layouts(dtype), inventory.moe.parts
    found = [_dense_target(inventory, dtype)]
    for key, roles in sorted(inventory.experts.items()):
        layout = layouts[key.layer * inventory.moe.experts + key.expert]
        parts = tuple(roles[role] for role in wanted)
        forms = tuple(_form_of(role, shape, layout) for role, shape in wanted.items())
        path = spread_path(key, drives)
        found.append(Target(path, shard_header(key, layout), parts, forms))
    for number, table in enumerate(inventory.row_tables(dtype)):
        for file, part in enumerate(inventory.tables[table.name]):
            header, one = table_header(table, file), (table, file)
            found.append(Target(table_path(number, file), header, (part,), (table.form,), one))
    if inventory.mtp is not None:
        more = all_targets(inventory.mtp, inventory.mtp_dtype or dtype)
        found += [replace(target, name=f"{MTP}/{target.name}") for target in more]
    return found


def _form_of(role: Role, shape: tuple[int, ...], layout: ExpertLayout) -> str:
    """Return the format of an expert's tensor: a matrix, or a bias."""
    if len(shape) != 2:
        return plain_form(layout.dtype)
    return layout.down if role == "down" else layout.dtype


def _dense_target(inventory: Inventory, dtype: str) -> Target:
    dense = inventory.dense
    slices = {n: Slice(inventory.form_of(n, dtype), tensor.shape) for n, tensor in dense.items()}
    header, order = dense_header(slices, dtype)
    parts = tuple(dense[name] for name in order)
    return Target(DENSE, header, parts, tuple(slices[name].form for name in order))


class Slice(NamedTuple):
    """The stored format and shape of a dense tensor."""

    form: str
    shape: tuple[int, ...]


def dense_header(slices: Mapping[str, Slice], dtype: str) -> tuple[bytes, list[str]]:
    """Return the header of dense.safetensors for the format `dtype`, and the order of its tensors.

    Tiles are described as U8 of one dimension. For a tiled format the header's metadata gives the
    version of the layout. Its `forms` has the format of all tiles, by name, where some are not Q4
    or Q8: these two differ in size (dense_views.py).
    """
    sizes = {name: stored_bytes(*piece) for name, piece in slices.items()}

    def place(name: str) -> tuple[bool, int, str]:
        """Return the sort key: aligned sizes first, then the others by descending item size.

        So every tensor begins at a multiple of its item's size, without the holes that safetensors
        forbids: an F32 vector never follows a BF16 one of odd length. The size of tiles is a
        multiple of the alignment, except for an odd number of MXFP4 tiles: half of one.
        """
        odd = sizes[name] % TILE_ALIGNMENT != 0
        return odd, -ITEM_BYTES.get(slices[name].form, TILE_ALIGNMENT) if odd else 0, name

    order = sorted(slices, key=place)
    about = {"format": "moeinf"}
    if is_tiled(dtype):
        about["layout"] = str(LAYOUT_VERSIONS[dtype])
    tiled = {name: slices[name].form for name in order if is_tiled(slices[name].form)}
    if not {*tiled.values()} <= {*FORMS_BY_SIZE}:
        about["forms"] = json.dumps(tiled, separators=(",", ":"))
    header: dict[str, object] = {"__metadata__": about}
    offset = 0
    for name in order:
        span = [offset, offset + sizes[name]]
        form, shape = slices[name]
        described = ("U8", [sizes[name]]) if is_tiled(form) else (form, list(shape))
        header[name] = {"dtype": described[0], "shape": described[1], "data_offsets": span}
        offset = span[1]
    return padded_header(header, SHARD_DATA_OFFSET), order


_Jobs = dict[Future[FileRecord | dict[int, int]], Target]


class Assembler:
    """The writer of all targets. It takes source files in any order."""

    def __init__(self, targets: Iterable[Target], work: StagingFolder, check: WeightCheck) -> None:
        self._work, self._check = work, check
        self._touched: dict[Path, list[Target]] = defaultdict(list)
        self._lock = threading.Lock()
        self.bytes = 0  # written now or by an earlier attempt
        for target in targets:
            for path in {path for part in target.parts for path in files_of(part)}:
                self._touched[path].append(target)
            self._recheck(target)
            if target.name in work.files:
                self.bytes += target.offset(len(target.parts)) - len(target.header)
            for number in range(len(target.parts)):
                if target.name not in work.files and (target.name, number) in work.parts:
                    self.bytes += target.size(number)

    def _recheck(self, target: Target) -> None:
        """Discard changed parts of an earlier attempt; their sources are read again."""
        work = self._work
        aside = [n for n in range(len(target.parts)) if (target.name, n) in work.parts]
        if not aside or target.name in work.files:
            return
        with unfinished_path(work.folder, target.name).open("rb", buffering=0) as file:
            for number in aside:
                file.seek(target.offset(number))
                if _crc_of(file, target.size(number)) != work.parts[target.name, number]:
                    del work.parts[target.name, number]
                    work.done -= {source.name for source in files_of(target.parts[number])}

    def feed(
        self, path: Path, available: Callable[[Path], bool], progress: Callable[[], None]
    ) -> None:
        """Write the tensors of the source file `path` durably.

        If a target still lacks other files, its parts from `path` go into its unfinished file.
        Afterwards `path` is not needed again (see `spent`), with one exception: weights wait for
        scales in a file that is not available yet.
        """
        work = self._work
        open_targets = [t for t in self._touched[path] if t.name not in work.files]
        with ThreadPoolExecutor(_WORKERS) as pool:
            jobs: _Jobs = {}
            for target in open_targets:
                here = [n for n in range(len(target.parts)) if self._readable(target, n, available)]
                aside = [n for n in range(len(target.parts)) if (target.name, n) in work.parts]
                if len({*here, *aside}) == len(target.parts):
                    jobs[pool.submit(self._finish, target)] = target
                    continue
                here = [n for n in here if n not in aside and path in files_of(target.parts[n])]
                if here:
                    jobs[pool.submit(self._write_parts, target, here)] = target
            try:
                self._collect(jobs, progress)
            except BaseException:
                for job in jobs:
                    job.cancel()
                raise
        self._commit()

    def _collect(self, jobs: _Jobs, progress: Callable[[], None]) -> None:
        """Record the results of the jobs as they end, and commit them now and then."""
        waiting, committed = set(jobs), time.monotonic()
        while waiting:
            ended, waiting = wait(waiting, timeout=0.1, return_when=FIRST_EXCEPTION)
            for job in ended:
                self._note(jobs[job], job.result())
            if time.monotonic() - committed >= _COMMIT_S:
                self._commit()
                committed = time.monotonic()
            progress()

    def _commit(self) -> None:
        for name in self._check.found:
            self._work.add_broken(name)
        for name in self._check.rounded:
            self._work.add_rounded(name)
        self._work.commit()

    def spent(self, path: Path) -> bool:
        """Return whether the source file `path` will not be needed again."""
        work = self._work
        return not any(
            path in files_of(part) and (target.name, number) not in work.parts
            for target in self._touched[path]
            if target.name not in work.files
            for number, part in enumerate(target.parts)
        )

    @staticmethod
    def _readable(target: Target, number: int, available: Callable[[Path], bool]) -> bool:
        return all(available(path) for path in files_of(target.parts[number]))

    def _note(self, target: Target, made: FileRecord | dict[int, int]) -> None:
        if isinstance(made, FileRecord):
            self._work.add_file(made)
            return
        for number, crc in made.items():
            self._work.add_part(target.name, number, crc)

    def _finish(self, target: Target) -> FileRecord:
        aside = [n for n in range(len(target.parts)) if (target.name, n) in self._work.parts]
        if not aside:
            data = self._metered(target, range(len(target.parts)))
            return write_file(self._work.folder, target.name, target.header, data)
        rest = [n for n in range(len(target.parts)) if n not in aside]
        self._write_parts(target, rest)
        unfinished = unfinished_path(self._work.folder, target.name)
        record = hash_file(unfinished, target.name, len(target.header))
        unfinished.rename(self._work.folder / target.name)
        return record

    def _write_parts(self, target: Target, numbers: list[int]) -> dict[int, int]:
        """Write parts at their final offsets into the unfinished file; return their CRC-32C."""
        crcs: dict[int, int] = {}
        path = unfinished_path(self._work.folder, target.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _write_at(descriptor, memoryview(target.header), 0)
            os.ftruncate(descriptor, target.offset(len(target.parts)))
            for number in numbers:
                at, crc = target.offset(number), 0
                for block in self._metered(target, [number]):
                    crc = crc32c(block, crc)
                    at += _write_at(descriptor, block, at)
                crcs[number] = crc
        finally:
            os.close(descriptor)
        return crcs

    def _metered(self, target: Target, numbers: Iterable[int]) -> Iterator[memoryview]:
        for number in numbers:
            for block in target.data(number, self._check.look):
                with self._lock:
                    self.bytes += block.nbytes
                yield block


def _write_at(descriptor: int, block: memoryview, offset: int) -> int:
    done = 0
    while done < block.nbytes:
        done += os.pwrite(descriptor, block[done:], offset + done)
    return done


def _crc_of(file: FileIO, size_bytes: int) -> int:
    """Return the CRC-32C of the next bytes of a file. They may be fewer at its end."""
    crc = 0
    while size_bytes > 0 and (block := file.read(min(size_bytes, BLOCK_BYTES))):
        crc = crc32c(block, crc)
        size_bytes -= len(block)
    return crc


def hash_file(path: Path, name: str, data_offset: int) -> FileRecord:
    """Return the record of a complete file, as `write_file` would. Raises OSError."""
    sha, crc, size = hashlib.sha256(), 0, 0
    check_regular(path)
    with path.open("rb", buffering=0) as file:
        header = file.read(data_offset)
        sha.update(header)
        size += len(header)
        while block := file.read(BLOCK_BYTES):
            sha.update(block)
            crc = crc32c(block, crc)
            size += len(block)
    return FileRecord(name, size, sha.hexdigest(), crc, data_offset)
