"""Matches the tensors of a checkpoint with what its family needs, before anything is written.

Does not know files' contents: names, shapes and dtypes only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moeinf.models import Family
from moeinf.models.base import FusedPart, Linear, MoeShape, Piece
from moeinf.native import SHARD_DATA_OFFSET
from moeinf.offload.layout import (
    ITEM_BYTES,
    ExpertKey,
    ExpertLayout,
    is_tiled,
    plain_form,
    stored_bytes,
)
from moeinf.runtime.checkpoint import TORCH_DTYPE, BadCheckpoint, Checkpoint, SourceTensor
from moeinf.runtime.fp8 import join_scales

_HEAD = "lm_head.weight"
_CHOOSING = ".e_score_correction_bias"


class WantedParts:
    """A `Parts` without data: building a model on it lists the dense tensors that it needs."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.tensors: set[str] = set()  # asked for as they are: they cannot be quantised

    def tensor(self, name: str, *shape: int) -> Tensor:
        self.shapes[name] = shape
        self.tensors.add(name)
        return torch.empty(shape, device="meta")

    def linear(
        self, prefix: str, out_features: int, in_features: int, bias: bool = False
    ) -> Linear:
        self.shapes[f"{prefix}.weight"] = (out_features, in_features)
        if bias:
            self.tensor(f"{prefix}.bias", out_features)
        return lambda x: x.new_empty(*x.shape[:-1], out_features)

    def tuned(self, piece: Piece) -> Piece:
        return piece


@dataclass(frozen=True)
class Inventory:
    """A checkpoint, sorted: exactly the dense tensors and the experts that its family needs."""

    family: Family
    moe: MoeShape
    max_context: int
    kv_items_per_token: int
    dense: Mapping[str, SourceTensor]
    experts: Mapping[ExpertKey, Mapping[str, SourceTensor]]
    linear: frozenset[str] = frozenset()  # the dense tensors that are only multiplied with
    unused: list[str] = field(default_factory=list)

    def form_of(self, name: str, dtype: str) -> str:
        """The format of a dense tensor in a model of format `dtype`.

        The output head keeps 8 bits, as GGUF files keep it in 6 or 8; what is not a linear's weight
        (norms, router gates, embeddings) is never quantised. What only chooses experts keeps all
        of its bits: in bfloat16 the biases of DeepSeek-V3 would choose others.
        """
        if name.endswith(_CHOOSING):
            return "F32"
        if not is_tiled(dtype):
            return dtype
        if name not in self.linear:
            return plain_form(dtype)
        return "Q8" if name == _HEAD else dtype

    def dense_bytes(self, dtype: str) -> int:
        """Bytes of the weights that every token uses, in the format `dtype`."""
        return sum(stored_bytes(self.form_of(n, dtype), t.shape) for n, t in self.dense.items())

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all weights in the format `dtype`."""
        return self.dense_bytes(dtype) + len(self.experts) * self.expert_layout(dtype).data_bytes

    def expert_layout(self, dtype: str) -> ExpertLayout:
        """How an expert lies in a model of format `dtype`."""
        moe = self.moe
        return ExpertLayout(moe.hidden, moe.intermediate, dtype, moe.activation, moe.biased)

    def disk_bytes(self, dtype: str) -> int:
        """What they take on disk: every file has a header and ends in the middle of a block."""
        return self.weight_bytes(dtype) + (len(self.experts) + 1) * 2 * SHARD_DATA_OFFSET

    def kv_bytes_per_token(self, dtype: str) -> int:
        return self.kv_items_per_token * ITEM_BYTES[plain_form(dtype)]

    def downcasts(self, dtype: str) -> bool:
        """Whether storing as `dtype` loses bits that the source has."""
        tensors = [
            *self.dense.values(),
            *(t for parts in self.experts.values() for t in parts.values()),
        ]
        return dtype == "BF16" and any(tensor.dtype != "BF16" for tensor in tensors)


def take_inventory(family: Family, checkpoint: Checkpoint) -> Inventory:
    """Raises ModelDataError for a bad config, BadCheckpoint for missing or misshapen tensors."""
    config = family.parse(checkpoint.config)
    wanted = WantedParts()
    model = family.build(config, wanted)
    dense: dict[str, SourceTensor] = {}
    experts: dict[ExpertKey, dict[str, SourceTensor]] = {}
    unused: list[str] = []
    for name, tensor in join_scales(checkpoint).items():
        fused = family.fused(name, config)
        if fused is not None:
            for key, role, piece in _unfuse(fused, tensor, model.moe):
                experts.setdefault(key, {})[role] = piece
            continue
        part = family.expert(name, config)
        if part is not None:
            _check(tensor, model.moe.parts[part.role])
            experts.setdefault(ExpertKey(part.layer, part.expert), {})[part.role] = tensor
        elif (known := family.rename(name)) in wanted.shapes:
            _check(tensor, wanted.shapes[known])
            dense[known] = tensor
        elif not family.ignores(name, config):
            unused.append(name)
    missing = [name for name in wanted.shapes if name not in dense]
    for layer in range(model.moe.layers):
        for expert in range(model.moe.experts):
            have = experts.get(ExpertKey(layer, expert), {})
            missing += [
                f"{role} of expert {expert} in MoE layer {layer}"
                for role in model.moe.parts
                if role not in have
            ]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BadCheckpoint(f"{checkpoint.folder} lacks {missing[0]}{more}")
    items = model.kv_bytes_per_token // torch.get_default_dtype().itemsize
    linear = frozenset(wanted.shapes.keys() - wanted.tensors)
    return Inventory(family, model.moe, model.max_context, items, dense, experts, linear, unused)


def _unfuse(
    fused: FusedPart, tensor: SourceTensor, moe: MoeShape
) -> Iterator[tuple[ExpertKey, str, SourceTensor]]:
    """The matrices of all experts in a fused tensor, as spans of its bytes: nothing is copied."""
    f, d = moe.intermediate, moe.hidden
    _check(tensor, (moe.experts, 2 * f, d) if fused.role == "gate_up" else (moe.experts, d, f))
    roles = (("gate", (f, d)), ("up", (f, d))) if fused.role == "gate_up" else (("down", (d, f)),)
    size = tensor.size_bytes // (moe.experts * len(roles))
    for number in range(moe.experts * len(roles)):
        role, shape = roles[number % len(roles)]
        piece = replace(tensor, shape=shape, offset=tensor.offset + number * size, size_bytes=size)
        yield ExpertKey(fused.layer, number // len(roles)), role, piece


def _check(tensor: SourceTensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise BadCheckpoint(
            f"{tensor.path}: {tensor.name!r} is {list(tensor.shape)}, the config says {list(shape)}"
        )
    if tensor.dtype not in TORCH_DTYPE and tensor.scales is None:
        raise BadCheckpoint(f"{tensor.path}: {tensor.name!r} is {tensor.dtype}, not a float format")
