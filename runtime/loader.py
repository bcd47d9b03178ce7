"""Loads a pulled model: dense weights into memory, experts behind a store.

Does not know prompts or sampling.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from moeinf.models import family_of
from moeinf.models.base import Linear, Model, ModelDataError
from moeinf.models.moe import TorchMath
from moeinf.native import SlotPool, crc32c
from moeinf.offload.policy import POLICIES, Setup
from moeinf.offload.residency import Residency
from moeinf.offload.store import ExpertStore
from moeinf.offload.trace import RoutingShape
from moeinf.offload.transfer import Transfer
from moeinf.runtime.checkpoint import (
    CONFIG,
    TORCH_DTYPE,
    BadCheckpoint,
    memory_of,
    read_exactly,
    read_header,
    read_json,
)
from moeinf.runtime.config import EngineConfig
from moeinf.runtime.manifest import DENSE, DamagedModel, Manifest
from moeinf.runtime.plan import Placement

_ALIGNMENT = 64


class DenseWeights:
    """The `Parts` of a pulled model: views of one buffer that holds dense.safetensors."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        record = manifest.file(DENSE)
        path = folder / DENSE
        try:
            self._tensors = read_header(path)
            buffer = torch.empty(record.data_bytes + _ALIGNMENT, dtype=torch.uint8)
            start = -buffer.data_ptr() % _ALIGNMENT
            buffer = buffer[start : start + record.data_bytes]
            _read(path, record.data_offset, memory_of(buffer))
        except (BadCheckpoint, OSError) as error:
            raise DamagedModel(f"{manifest.model}: {error}") from error
        if crc32c(memory_of(buffer)) != record.crc32c:
            raise DamagedModel(f"{manifest.model}: {DENSE} is not what was pulled")
        self._buffer, self._data_offset = buffer, record.data_offset

    def tensor(self, name: str, *shape: int) -> Tensor:
        found = self._tensors.get(name)
        if found is None or found.shape != shape:
            raise ModelDataError(f"{DENSE} lacks {name} of shape {list(shape)}")
        start = found.offset - self._data_offset
        data = self._buffer[start : start + found.size_bytes]
        return data.view(TORCH_DTYPE[found.dtype]).view(shape)

    def linear(
        self, prefix: str, out_features: int, in_features: int, bias: bool = False
    ) -> Linear:
        weight = self.tensor(f"{prefix}.weight", out_features, in_features)
        offset = self.tensor(f"{prefix}.bias", out_features) if bias else None
        return lambda x: functional.linear(x, weight, offset)


def _read(path: Path, offset: int, view: memoryview) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, offset, len(view), os.POSIX_FADV_SEQUENTIAL)
        read_exactly(descriptor, view, offset, path)
    finally:
        os.close(descriptor)


def check_small_files(folder: Path, manifest: Manifest) -> None:
    """Raises DamagedModel unless config, tokenizer and the like are what was pulled."""
    for record in manifest.files:
        if record.data_offset:
            continue  # dense weights and shards are checked as they are read
        try:
            data = (folder / record.path).read_bytes()
        except OSError as error:
            raise DamagedModel(f"{manifest.model}: {record.path}: {error.strerror}") from error
        if len(data) != record.size_bytes or crc32c(data) != record.crc32c:
            raise DamagedModel(f"{manifest.model}: {record.path} is not what was pulled")


def load_model(folder: Path, manifest: Manifest) -> Model:
    """The family's model with its dense weights. Raises DamagedModel."""
    config = read_json(folder / CONFIG)
    family = family_of(config)
    return family.build(family.parse(config), DenseWeights(folder, manifest))


def open_store(
    folder: Path, manifest: Manifest, placement: Placement, config: EngineConfig
) -> ExpertStore:
    """An empty expert cache of the placement's size, with its readers running."""
    layout = manifest.expert_layout
    pool = SlotPool(placement.slots, layout.slot_bytes)
    transfer = Transfer(
        folder, manifest.shards(), pool, readers=config.readers, direct_io=config.direct_io
    )
    residency = Residency(placement.slots, manifest.layers * manifest.experts)
    shape = RoutingShape(manifest.layers, manifest.experts, manifest.top_k)
    policy = POLICIES[config.policy](Setup(shape, placement.slots))
    return ExpertStore(layout, manifest.experts, pool, residency, transfer, policy, TorchMath())
