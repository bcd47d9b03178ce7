"""Repacks a checkpoint into a model folder: one shard per routed expert, the rest in one file.

Does not know where the checkpoint came from, nor how progress is shown.

Everything streams in blocks: memory is bounded by the workers, never by the checkpoint. The folder
is built beside its final place and gets its name only when all of it is durable, so that a model is
absent or complete, whenever this is killed.
"""

from __future__ import annotations

import datetime
import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moeinf.models import family_of
from moeinf.native import SHARD_DATA_OFFSET
from moeinf.offload.layout import ITEM_BYTES, ExpertKey, ExpertLayout
from moeinf.offload.shards import (
    FileRecord,
    padded_header,
    shard_header,
    shard_path,
    write_file,
)
from moeinf.runtime.checkpoint import (
    CONFIG,
    BadCheckpoint,
    Checkpoint,
    SourceTensor,
    blocks,
    read_json,
)
from moeinf.runtime.durable import sync_filesystem
from moeinf.runtime.inventory import Inventory, take_inventory
from moeinf.runtime.library import Library
from moeinf.runtime.manifest import DENSE, Manifest, write_manifest
from moeinf.runtime.names import ModelName

DTYPE_OF_TAG = {"bf16": "BF16", "f32": "F32"}
_KEPT = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_MAX_KEPT_BYTES = 64 << 20
_DENSE_ALIGNMENT = 64  # bytes, so that every tensor of the one dense buffer is aligned
_WORKERS = 2

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class PullInProgress(RuntimeError):
    """Another process is writing the same model."""


@dataclass(frozen=True)
class Origin:
    """Where a checkpoint came from, for the manifest."""

    source: str
    revision: str | None = None


def repack(
    checkpoint: Checkpoint,
    library: Library,
    name: ModelName,
    origin: Origin,
    progress: Progress,
    note: Callable[[str], None],
) -> Manifest:
    """Adds `checkpoint` to the library as the model `name`, replacing an older one.

    Raises ModelDataError or BadCheckpoint before anything is written when the checkpoint does not
    hold exactly a model that we can run; ModelInUse, PullInProgress; OSError (disk full) with
    nothing left behind.
    """
    inventory = take_inventory(family_of(checkpoint.config), checkpoint)
    dtype = DTYPE_OF_TAG[name.tag]
    if inventory.downcasts(dtype):
        note(f"the source has more bits than {name.tag} keeps; the tag f32 would keep all of them")
    if inventory.unused:
        more = f" and {len(inventory.unused) - 1} more" if len(inventory.unused) > 1 else ""
        note(f"not part of the family, left out: {inventory.unused[0]}{more}")
    library.check_unused(name)
    with _workplace(library.folder(name)) as work:
        _check_space(work, inventory.disk_bytes(dtype))
        files = _write_all(inventory, dtype, work, progress)
        files += _keep_small_files(checkpoint.folder, work)
        manifest = Manifest(
            name=name.name,
            tag=name.tag,
            family=inventory.family.model_type,
            source=origin.source,
            revision=origin.revision,
            created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            layers=inventory.moe.layers,
            experts=inventory.moe.experts,
            top_k=inventory.moe.top_k,
            hidden=inventory.moe.hidden,
            intermediate=inventory.moe.intermediate,
            dtype=dtype,
            dense_bytes=next(file.data_bytes for file in files if file.path == DENSE),
            kv_bytes_per_token=inventory.kv_bytes_per_token(dtype),
            max_context=inventory.max_context,
            files=tuple(sorted(files, key=lambda file: file.path)),
        )
        sync_filesystem(work)
        write_manifest(work, manifest)
        library.admit(work, name)
    return manifest


def _write_all(inv: Inventory, dtype: str, work: Path, progress: Progress) -> list[FileRecord]:
    total, meter = inv.weight_bytes(dtype), _Meter()
    layout = ExpertLayout(inv.moe.hidden, inv.moe.intermediate, dtype)

    def expert(key: ExpertKey, parts: Mapping[str, SourceTensor]) -> FileRecord:
        data = meter.read((parts[role] for role in ("gate", "up", "down")), dtype)
        return write_file(work, shard_path(key), shard_header(key, layout), data)

    with ThreadPoolExecutor(_WORKERS) as pool:
        jobs: list[Future[FileRecord]] = [pool.submit(_write_dense, inv.dense, dtype, work, meter)]
        jobs += [pool.submit(expert, key, parts) for key, parts in sorted(inv.experts.items())]
        waiting, records = set(jobs), []
        try:
            while waiting:
                ended, waiting = wait(waiting, timeout=0.1, return_when=FIRST_EXCEPTION)
                records += [job.result() for job in ended]
                progress(meter.bytes, total)
        except BaseException:
            for job in jobs:
                job.cancel()
            raise
    return records


class _Meter:
    """Counts the bytes that the workers have taken from the source, as they will be stored."""

    def __init__(self) -> None:
        self.bytes = 0
        self._lock = threading.Lock()

    def read(self, tensors: Iterable[SourceTensor], dtype: str) -> Iterator[memoryview]:
        for tensor in tensors:
            for block in blocks(tensor, dtype):
                with self._lock:
                    self.bytes += block.nbytes
                yield block


def _write_dense(
    dense: Mapping[str, SourceTensor], dtype: str, work: Path, meter: _Meter
) -> FileRecord:
    """All tensors that are not routed experts, each 64-byte aligned as far as sizes allow it."""
    sizes = {name: tensor.elements * ITEM_BYTES[dtype] for name, tensor in dense.items()}
    # Sizes that are no multiple of the alignment go last, or they would displace all behind them.
    order = sorted(dense, key=lambda name: (sizes[name] % _DENSE_ALIGNMENT != 0, name))
    header: dict[str, object] = {"__metadata__": {"format": "moeinf"}}
    offset = 0
    for name in order:
        span = [offset, offset + sizes[name]]
        header[name] = {"dtype": dtype, "shape": list(dense[name].shape), "data_offsets": span}
        offset = span[1]
    data = meter.read((dense[name] for name in order), dtype)
    return write_file(work, DENSE, padded_header(header, SHARD_DATA_OFFSET), data)


def _keep_small_files(source: Path, work: Path) -> list[FileRecord]:
    records = []
    for name in _KEPT:
        path = source / name
        if not path.is_file():
            continue
        if path.stat().st_size > _MAX_KEPT_BYTES:
            raise BadCheckpoint(f"{path} is too large ({path.stat().st_size} bytes)")
        if name.endswith(".json"):
            read_json(path)
        records.append(write_file(work, name, b"", [memoryview(path.read_bytes())]))
    return records


def _check_space(folder: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise OSError(
            28, f"the disk has {free} bytes free, the model needs {needed_bytes}", str(folder)
        )


@contextmanager
def _workplace(target: Path) -> Iterator[Path]:
    """A fresh folder beside `target`, removed at the end, held by one process at a time."""
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.with_name(f".{target.name}.partial")
    lock = os.open(target.with_name(f".{target.name}.lock"), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PullInProgress(f"another process is pulling into {target}") from error
        shutil.rmtree(work, ignore_errors=True)  # of a pull that was killed
        work.mkdir()
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)
    finally:
        os.close(lock)
