"""Test doubles: dense weights from a dict, experts that check the call order, reads at once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from moeinf.models.base import (
    Embedding,
    Experts,
    Family,
    KvForm,
    Linear,
    MemoryTable,
    Model,
    ModelDataError,
    Pending,
    Phase,
    Piece,
    Role,
    Table,
)
from moeinf.models.families import family_of
from moeinf.models.layers.moe import ResidentExperts
from moeinf.offload.store.prefetch_gate import Calls


class DictParts:
    """`Parts` from tensors in memory; records which tensors were requested."""

    def __init__(self, tensors: Mapping[str, Tensor], kv: KvForm = "full") -> None:
        self._tensors = tensors
        self.used: set[str] = set()
        self.kv: KvForm = kv

    def tensor(self, name: str, *shape: int) -> Tensor:
        self.used.add(name)
        found = self._tensors.get(name)
        if found is None:
            raise ModelDataError(f"no tensor {name}")
        if found.shape != shape:
            raise ModelDataError(f"{name} is {list(found.shape)}, not {list(shape)}")
        return found

    def linear(
        self, prefix: str, out_features: int, in_features: int, bias: bool = False
    ) -> Linear:
        weight = self.tensor(f"{prefix}.weight", out_features, in_features)
        offset = self.tensor(f"{prefix}.bias", out_features) if bias else None
        return lambda x: functional.linear(x, weight, offset)

    def embedding(self, prefix: str, count: int, width: int) -> Embedding:
        return Embedding.of(self.tensor(f"{prefix}.weight", count, width))

    def table(self, prefix: str, count: int, width: int) -> Table:
        """Return the rows of all pieces, in the order of their numbers."""
        start = f"{prefix}.shard_"
        names = [name for name in self._tensors if name.startswith(start)]
        names.sort(key=lambda name: int(name.removeprefix(start).removesuffix(".weight")))
        if not names:
            return MemoryTable(self.tensor(f"{prefix}.weight", count, width))
        self.used |= set(names)
        whole = torch.cat([self._tensors[name] for name in names])
        assert whole.shape == (count, width)
        return MemoryTable(whole)

    def tuned(self, piece: Piece) -> Piece:
        return piece


@dataclass
class Loaded:
    """A model with all its experts in memory."""

    family: Family
    config: Any
    model: Model
    experts: ResidentExperts
    unused: set[str]  # tensors that are neither used nor deliberately ignored


def load_resident(folder: Path, dtype: torch.dtype | None = None, kv: KvForm = "full") -> Loaded:
    """Read a checkpoint with per-expert names through its family."""
    values = json.loads((folder / "config.json").read_text())
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    tensors = {name: t.to(dtype or t.dtype) for name, t in tensors.items()}
    return from_tensors(values, tensors, kv)


def from_tensors(
    values: Mapping[str, Any], tensors: Mapping[str, Tensor], kv: KvForm = "full"
) -> Loaded:
    """Return the same from a config and tensors in memory."""
    family = family_of(values)
    config = family.parse(values)
    matrices: dict[tuple[int, int], dict[Role, Tensor]] = {}
    dense: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        fused = family.fused(name, config)
        if fused is not None:
            for number, stored in enumerate(tensor):
                roles = matrices.setdefault((fused.layer, number), {})
                matrix = stored.mT if fused.transposed and stored.dim() == 2 else stored
                if fused.role in ("down", "down_bias"):
                    roles[fused.role] = matrix
                    continue
                halves = (matrix[::2], matrix[1::2]) if fused.interleaved else matrix.chunk(2)
                suffix = fused.role.removeprefix("gate_up")
                roles[f"gate{suffix}"], roles[f"up{suffix}"] = halves
            continue
        part = family.expert(name, config)
        if part is not None:
            matrices.setdefault((part.layer, part.expert), {})[part.role] = tensor
        elif not family.ignores(name, config):
            dense[family.rename(name)] = tensor
    parts = DictParts(dense, kv)
    model = family.build(config, parts)
    experts = ResidentExperts(
        {key: _joined(roles) for key, roles in matrices.items()}, model.moe.activation
    )
    return Loaded(family, config, model, experts, set(dense) - parts.used)


def _joined(roles: Mapping[Role, Tensor]) -> tuple[Tensor, ...]:
    """Return the weights in the form that models.ffn.expert_ffn takes."""
    found = []
    for suffix in ("", "_bias"):
        inner = [roles[f"{half}{suffix}"] for half in ("gate", "up") if f"{half}{suffix}" in roles]
        if inner:
            found += [torch.cat(inner), roles[f"down{suffix}"]]
    return tuple(found)


@dataclass
class Pass:
    """The calls that an `Experts` received in one pass."""

    rows: list[int]
    phase: Phase
    layers: list[int] = field(default_factory=list)
    hints: dict[int, Tensor] = field(default_factory=dict)  # by the layer they predict
    routed: list[Tensor] = field(default_factory=list)  # ids per layer
    inputs: list[Tensor] = field(default_factory=list)  # x per layer
    accepted: list[bool] | None = None
    ended: bool = False


class WatchedExperts:
    """`Experts` that asserts the order of calls and records passes; fails in `fail_in` if set."""

    def __init__(self, experts: Experts, fail_in: int | None = None) -> None:
        self._experts = experts
        self.fail_in = fail_in
        self.passes: list[Pass] = []
        self.wants_hints = False
        self.first_layer = 0  # of the next passes
        self._outstanding = False

    def begin_pass(self, rows: Tensor, phase: Phase, pieces: Sequence[slice] = ()) -> None:
        assert rows.dtype == torch.int64
        assert not self.passes or self.passes[-1].ended
        self.passes.append(Pass(rows.tolist(), phase))
        self._experts.begin_pass(rows, phase, pieces)

    def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Pending:
        now = self.passes[-1]
        assert not now.ended
        assert not self._outstanding
        assert ids.dtype == torch.int64
        assert weights.dtype == torch.float32
        assert ids.shape == weights.shape
        assert len(ids) == len(x) == len(now.rows)
        assert layer == self.first_layer + len(now.layers)
        now.layers.append(layer)
        now.routed.append(ids)
        now.inputs.append(x)
        if layer == self.fail_in:
            raise RuntimeError("the experts are gone")
        self._outstanding = True
        return _Watched(self, self._experts.submit(layer, x, ids, weights))

    def hint(self, layer: int, ids: Tensor, scores: Tensor) -> None:
        assert self.wants_hints
        assert not self._outstanding  # a hint comes before its layer is submitted
        now = self.passes[-1]
        assert layer == len(now.layers) + 1
        assert ids.shape == scores.shape
        now.hints[layer] = ids
        self._experts.hint(layer, ids, scores)

    def end_pass(self, accepted_rows: Tensor | None = None) -> None:
        now = self.passes[-1]
        assert not now.ended
        now.ended = True
        now.accepted = None if accepted_rows is None else accepted_rows.tolist()
        self._outstanding = False
        self._experts.end_pass(accepted_rows)


class _Watched:
    def __init__(self, owner: WatchedExperts, pending: Pending) -> None:
        self._owner, self._pending = owner, pending

    def result(self) -> Tensor:
        assert self._owner._outstanding
        self._owner._outstanding = False
        return self._pending.result()


class AtOnce:
    """A `Transfer` whose reads have ended when they are asked for."""

    direct_io = False
    telling_seconds = 0.0

    def __init__(self) -> None:
        self._tickets, self._ended = 0, list[tuple[int, Exception | None]]()

    def demand(self, cells: Sequence[int], slots: Sequence[int]) -> list[int]:
        self._tickets += len(cells)
        return list(range(self._tickets - len(cells) + 1, self._tickets + 1))

    def ahead(self, cells: Sequence[int], slots: Sequence[int], priority: float) -> list[int]:
        tickets = self.demand(cells, slots)
        self._ended += [(ticket, None) for ticket in tickets]
        return tickets

    def ended(self) -> list[tuple[int, Exception | None]]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, ticket: int, cell: int) -> None: ...

    def hasten(self, ticket: int) -> None: ...

    def abandon(self, ticket: int) -> None: ...

    def cancel(self, ticket: int, half_read: bool = False) -> bool:
        return False

    def calls(self) -> Calls:
        return Calls()

    def call_bytes_per_s(self) -> None: ...

    def may_write(self, slot: int) -> bool:
        return False

    def bytes_of(self, cell: int) -> int:
        return 1

    def close(self) -> None: ...


class NoMath:
    """Computes nothing."""

    def ffn(self, x: Tensor, *weights: Tensor) -> Tensor:
        return x

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        return rows[:, 0]
