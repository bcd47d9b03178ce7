"""Load a pulled model: dense weights into memory, experts behind a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from msgspec.structs import replace
from torch import Tensor

from moeinf.errors import problem, reason
from moeinf.models.base import Activation, Model, ModelDataError, Table
from moeinf.models.families import family_of
from moeinf.models.layers.kv_q8 import widened
from moeinf.models.layers.moe import TorchMath
from moeinf.native import SlotPool, crc32c
from moeinf.offload.format.layout import largest_slot_bytes
from moeinf.offload.format.row_table import RowTable
from moeinf.offload.format.shards import FileRecord
from moeinf.offload.gpu_tier.device_slots import DeviceTier
from moeinf.offload.gpu_tier.layer_runner import TierRunner
from moeinf.offload.policy.base import Setup
from moeinf.offload.policy.table import POLICIES, PREFETCH, USE_HINTS, USE_PAST
from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.routing.trace import RoutingShape
from moeinf.offload.store.expert_store import Choice, ExpertStore
from moeinf.offload.store.host_tier import HostTier
from moeinf.offload.store.lossy.low_copies import LowCopies
from moeinf.offload.store.table_cache import CachedTable
from moeinf.offload.store.transfer import Transfer
from moeinf.runtime.checkpoints.checkpoint import (
    CONFIG,
    TORCH_DTYPE,
    BadCheckpoint,
    memory_of,
    read_json,
)
from moeinf.runtime.config import EngineConfig
from moeinf.runtime.dense.cpu_backend import CpuMath
from moeinf.runtime.dense.cpu_linear import DenseMath
from moeinf.runtime.engine.gpu_tier import OpenGpu, device_tier
from moeinf.runtime.engine.pipeline.cut import Part
from moeinf.runtime.files.regular import check_regular, read_regular
from moeinf.runtime.library.dense_views import DenseViews, read_dense_header
from moeinf.runtime.library.manifest import DENSE, MANIFEST, DamagedModel, Manifest
from moeinf.runtime.machine.disk_bench import Reading
from moeinf.runtime.machine.page_cache import cached_share
from moeinf.runtime.placement.plan import Placement
from moeinf.runtime.system import physical_bytes

_PIECE = 8 << 20  # bytes of one read of the dense weights
_PIECES_TO_DEVICE = 8  # pieces that wait in RAM, where it does not keep them all
_SAMPLED_SHARDS = 16
_CACHED_SHARE = 0.5  # above this share, uncached data is read through the page cache
_WORTH_SHARE = 0.05  # of decode time; below it, an engine reads nothing ahead of demand


@dataclass
class LoadProgress:
    """How much of a model's dense weights is read. One thread writes it, others may look."""

    read_bytes: int = 0
    total_bytes: int = 0  # 0: it is not known yet


class DenseWeights(DenseViews):
    """The `Parts` of a pulled model: its dense.safetensors, read into one buffer and checked."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        config: EngineConfig,
        reading: Reading,
        math: DenseMath | None = None,
        progress: LoadProgress | None = None,
    ) -> None:
        """Read and check the weights. math: computes with them, on its device; None: the CPU."""
        math = math or CpuMath()
        record = manifest.file(DENSE)
        try:
            header = read_dense_header(folder / DENSE)
            keeps = manifest.keeps if isinstance(manifest, Part) else None
            buffer, self._pool, checksum = _read_dense(
                folder, record, config, reading, math, progress or LoadProgress(), keeps
            )
        except (BadCheckpoint, OSError) as error:
            words = reason(error).replace(f"{folder}/", "")
            raise DamagedModel(f"{manifest.model}: {words}") from error
        if checksum != record.crc32c:
            raise DamagedModel(f"{manifest.model}: {DENSE} is not what was pulled")
        super().__init__(header, buffer, record.data_offset, math, config.kv)
        self._folder, self._manifest = folder, manifest
        self._config, self._reading = config, reading
        self._tables: list[CachedTable] = []

    def table(self, prefix: str, count: int, width: int) -> Table:
        """Open a table, with its share of the RAM for tables."""
        tables, asked = self._manifest.tables, (prefix, count, width)
        known = [(table.name, sum(table.rows), table.width) for table in tables]
        if asked not in known:
            raise ModelDataError(f"{MANIFEST} lacks the table {prefix} [{count}, {width}]")
        number = known.index(asked)
        table = tables[number]
        paths = [file.path for file in self._manifest.table_files(number)]
        sample = [self._folder / path for path in paths[:: max(1, len(paths) // _SAMPLED_SHARDS)]]
        opened = CachedTable(
            table,
            self._folder,
            paths,
            _widener(table),
            self._config.table_bytes // len(tables),
            direct_io=_past_the_cache(self._config, self._reading, sample),
            model=str(self._manifest.model),
        )
        self._tables.append(opened)
        return opened

    def close(self) -> None:
        """End the tables' readers, and free the memory of the weights; nothing may use them."""
        for table in self._tables:
            table.close()
        self._pool.release_all()


def _widener(table: RowTable) -> Callable[[Tensor], Tensor]:
    """Return the map from stored rows [n, row_bytes] to values [n, width]."""
    if table.form == "Q8":
        return lambda rows: widened(rows, table.width, torch.bfloat16)
    return lambda rows: rows.view(TORCH_DTYPE[table.form])


def _read_dense(
    folder: Path,
    record: FileRecord,
    config: EngineConfig,
    reading: Reading,
    math: DenseMath,
    progress: LoadProgress,
    keeps: Callable[[int, int], bool] | None,
) -> tuple[Tensor, SlotPool, int]:
    """Read the dense file to the device of `math`; return its data, their pool and CRC-32C.

    The readers of experts read it. In RAM the pieces are the slots of a pool, which are contiguous
    on huge pages. The checksum of one piece is computed while the next are in flight. Pieces for a
    device go through a few slots, so that RAM never holds them all. Where only some bytes are kept,
    a few pieces are in flight, and the memory of those without such bytes is given back.
    """
    pieces = [
        replace(record, data_offset=at, size_bytes=min(at + _PIECE, record.size_bytes), crc32c=None)
        for at in range(record.data_offset, record.size_bytes, _PIECE)
    ]
    inside = math.place.type != "cpu"
    pool = SlotPool(min(_PIECES_TO_DEVICE, len(pieces)) if inside else len(pieces), _PIECE)
    slots = torch.frombuffer(pool, dtype=torch.uint8).view(-1, _PIECE)
    buffer = slots.flatten()[: record.data_bytes]
    if inside:
        buffer = torch.empty(record.data_bytes, dtype=torch.uint8, device=math.place)
    progress.total_bytes = record.data_bytes
    direct = _past_the_cache(config, reading, [folder / record.path])
    readers = config.readers or reading.readers
    transfer = Transfer(folder, pieces, pool, readers=readers, direct_io=direct)
    ahead = pool.slots if keeps is None else min(_PIECES_TO_DEVICE, pool.slots)
    try:
        checksum, tickets = 0, transfer.demand(range(ahead), range(ahead))
        for number, there in enumerate(torch.split(buffer, _PIECE)):
            slot = number % pool.slots
            transfer.wait(tickets[number], number)
            piece = slots[slot, : len(there)]
            checksum = crc32c(memory_of(piece), checksum)
            progress.read_bytes += len(piece)
            if inside:
                there.copy_(piece)
            elif keeps is not None and not keeps(number * _PIECE, number * _PIECE + len(piece)):
                transfer.release(slot)
            if (following := number + ahead) < len(pieces):
                tickets += transfer.demand([following], [following % pool.slots])
    finally:
        transfer.close()
    return buffer, pool, checksum


def _past_the_cache(config: EngineConfig, reading: Reading, paths: Sequence[Path]) -> bool:
    """Return True to read with O_DIRECT: the drive is faster, and the files are not cached."""
    if config.direct_io is not None:
        return config.direct_io
    return reading.direct and cached_share(paths) < _CACHED_SHARE


def check_small_files(folder: Path, manifest: Manifest) -> None:
    """Raise DamagedModel unless config, tokenizer and other small files are as pulled."""
    for record in manifest.files:
        try:
            if record.data_offset:  # dense weights and shards are checked as they are read
                check_regular(folder / record.path)
                continue
            data = read_regular(folder / record.path)
        except OSError as error:
            raise DamagedModel(f"{manifest.model}: {record.path}: {problem(error)}") from error
        if len(data) != record.size_bytes or crc32c(data) != record.crc32c:
            raise DamagedModel(f"{manifest.model}: {record.path} is not what was pulled")


def load_model(
    folder: Path,
    manifest: Manifest,
    config: EngineConfig,
    reading: Reading,
    math: DenseMath | None = None,
    progress: LoadProgress | None = None,
    opened: ExitStack | None = None,
) -> Model:
    """Build the family's model with its dense weights, on the device of `math`.

    opened: frees the weights. Raises DamagedModel.
    """
    values = read_json(folder / CONFIG)
    family = family_of(values)
    weights = DenseWeights(folder, manifest, config, reading, math, progress)
    if opened is not None:
        opened.callback(weights.close)
    return family.build(family.parse(values), weights)


class FurtherStages(Protocol):
    """Processes that compute a model's further layers; see pipeline/links.py."""

    window: int  # rows of a pass, at most

    @property
    def lost(self) -> bool: ...


class LoadedModel:
    """A model in memory until `close`; afterwards its memory can be given back.

    stages: the processes that compute its further layers; None: all layers are here
    """

    def __init__(self, model: Model) -> None:
        self._model: Model | None = model
        self.stages: FurtherStages | None = None

    @property
    def model(self) -> Model:
        assert self._model is not None, "the engine is closed"
        return self._model

    def close(self) -> None:
        self._model = None


def open_store(
    folder: Path,
    manifest: Manifest,
    placement: Placement,
    config: EngineConfig,
    reading: Reading,
    past: Eamc | None = None,
    gpu: OpenGpu | None = None,
    low: tuple[Path, Manifest] | None = None,
) -> ExpertStore:
    """Open an empty expert cache of the placement's size, with its readers running.

    It has device slots above, where the placement has a GPU. Then it raises DeviceError too.

    `reading`: the best way to read the drive, unless the config sets one. `past`: the EAMC for
    policies that predict from it. `low`: folder and manifest of the copies in fewer bits.
    """
    layouts = manifest.expert_layouts
    pool = _slot_pool(placement, manifest, movable=gpu is None)
    transfer = _transfer(folder, manifest, pool, config, reading)
    cells = manifest.layers * manifest.experts
    shape = RoutingShape(manifest.layers, manifest.experts, manifest.top_k, manifest.encoder_layers)

    def choose(slots: int) -> Choice:
        name = "lru" if slots >= cells else config.policy  # all fit: a policy would only cost time
        policy = POLICIES[name](Setup(shape, slots, past if name in USE_PAST else None))
        return Choice(policy, 2 * manifest.top_k if name in PREFETCH else 0, name in USE_HINTS)

    first = choose(placement.slots)
    math = TorchMath(cast(Activation, manifest.activation))  # the layout has checked it
    host = HostTier(
        layouts, manifest.experts, pool, transfer, first.policy, math, slots=placement.slots
    )
    tiers: tuple[HostTier] | tuple[HostTier, DeviceTier] = (host,)
    runner: TierRunner | None = None
    if gpu is not None:
        above = device_tier(gpu, pool, shape, config.policy, past, math, host)
        tiers, runner = (host, above), TierRunner(host, above, gpu.miss, gpu.share)
    return ExpertStore(
        tiers,
        runner,
        most_prefetches=first.most_prefetches,
        hints=first.hints,
        choose=choose,
        worth_share=_WORTH_SHARE,
        skip_below=config.skip_below,
        low=_low_copies(host, placement, config, reading, math, low),
    )


def _transfer(
    folder: Path, manifest: Manifest, pool: SlotPool, config: EngineConfig, reading: Reading
) -> Transfer:
    shards = manifest.shards()
    sample = [folder / shard.path for shard in shards[:: max(1, len(shards) // _SAMPLED_SHARDS)]]
    return Transfer(
        folder,
        shards,
        pool,
        readers=config.readers or reading.readers,
        direct_io=_past_the_cache(config, reading, sample),
        block_bytes=reading.block_bytes,
        busy=reading.in_flight,
        model=str(manifest.model),
    )


def _low_copies(
    host: HostTier,
    placement: Placement,
    config: EngineConfig,
    reading: Reading,
    math: TorchMath,
    low: tuple[Path, Manifest] | None,
) -> LowCopies | None:
    """Open the copies of experts in fewer bits; None without, and where all experts fit."""
    if low is None or config.q2_on_miss is None or not placement.low_slots:
        return None
    folder, manifest = low
    pool = SlotPool(placement.low_slots, placement.low_slot_bytes)
    return LowCopies(
        host,
        manifest.expert_layouts,
        pool,
        _transfer(folder, manifest, pool, config, reading),
        math,
        config.q2_on_miss,
    )


def _slot_pool(placement: Placement, manifest: Manifest, movable: bool) -> SlotPool:
    """Return the arena of the placement's slots, with room for more if they are `movable`.

    That room is of addresses only, at most the machine's memory. A system that refuses it gives
    the placement's slots alone.
    """
    size = largest_slot_bytes(manifest.expert_layouts)
    most = min(manifest.slots.experts, physical_bytes() // size)
    if movable and most > placement.slots:
        with suppress(MemoryError):
            return SlotPool(most, size)
    return SlotPool(placement.slots, size)
