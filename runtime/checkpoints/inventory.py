"""Match the tensors of a checkpoint with those that its family needs, before any write.

Only names, shapes and dtypes are used, not the bytes of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from moeinf.models.base import (
    Embedding,
    Family,
    FusedPart,
    KvForm,
    Linear,
    MemoryTable,
    ModelDataError,
    MoeShape,
    Piece,
    Role,
    Table,
)
from moeinf.native import SHARD_DATA_OFFSET
from moeinf.offload.format.layout import (
    ITEM_BYTES,
    LAYOUT_VERSIONS,
    ExpertForms,
    ExpertKey,
    ExpertLayout,
    is_tiled,
    plain_form,
    stored_bytes,
)
from moeinf.offload.format.row_table import RowTable
from moeinf.runtime.checkpoints.checkpoint import (
    INTEGER_DTYPE,
    TORCH_DTYPE,
    BadCheckpoint,
    Checkpoint,
    Pick,
    SourceTensor,
)
from moeinf.runtime.checkpoints.quantised.fused_experts import MXFP4
from moeinf.runtime.checkpoints.quantised.ggml import dtype_of, is_ggml
from moeinf.runtime.checkpoints.quantised.joining import joined
from moeinf.runtime.checkpoints.quantised.nvfp4 import NVFP4
from moeinf.runtime.checkpoints.table_pieces import in_order, piece_of

_HEAD = "lm_head.weight"
_MOST_CELLS = 1 << 18  # experts over all layers; Kimi K3 has 83,328
_LINEAR_FORMS = {"Q3": "Q4", "Q2": "Q4"}  # every token uses linears, and they are few
# Tensors that stay float32. The correction bias only chooses experts: in bfloat16 DeepSeek-V3 would
# choose others. Then come decay rates, whose error accumulates with every token, the weights of
# hyper-connections, which mix all streams, and DeepSeek-V4's table of experts.
_HYPER = ("_hc.fn", "_hc.base", "_hc.scale", ".hc_fn", ".hc_base", ".hc_scale")
_EXACT = (".e_score_correction_bias", ".A_log", ".dt_bias", *_HYPER, ".tid2eid")
_FUSED_ROLES: dict[str, tuple[Role, ...]] = {
    "gate_up": ("gate", "up"),
    "gate_up_bias": ("gate_bias", "up_bias"),
    "down": ("down",),
    "down_bias": ("down_bias",),
}


class WantedParts:
    """A `Parts` without data. A model built on it lists the dense tensors that it needs."""

    def __init__(self, kv: KvForm = "full") -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.tensors: set[str] = set()  # requested by `tensor`: never quantised
        self.embeddings: set[str] = set()
        self.tables: dict[str, tuple[int, int]] = {}  # rows and width, by the weight's prefix
        self.kv: KvForm = kv

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

    def embedding(self, prefix: str, count: int, width: int) -> Embedding:
        self.shapes[f"{prefix}.weight"] = (count, width)
        self.embeddings.add(f"{prefix}.weight")
        return Embedding.of(torch.empty(count, width, device="meta"))

    def table(self, prefix: str, count: int, width: int) -> Table:
        self.tables[prefix] = (count, width)
        return MemoryTable(torch.empty(count, width, device="meta"))

    def tuned(self, piece: Piece) -> Piece:
        return piece


@dataclass(frozen=True)
class Forms:
    """The tiled formats of single tensors, where the model's one format does not decide them.

    A reader of a checkpoint with mixed types (such as GGUF's Q4_K_M) sets them in its Inventory:
    `dataclasses.replace(inventory, forms=Forms(experts, dense))`. Sizes, shards, the dense file and
    the manifest follow from them.

    experts: the formats of every MoE layer, (gate and up, down), or of every expert in the order of
    cells, or one pair for all. Empty: all have the model's format. If gate and up have several
    formats in the checkpoint, choose one that holds both.
    dense: formats of linears and embeddings by the name in `Inventory.dense`. The others follow
    `Inventory.form_of`. An embedding cannot be MXFP4.
    """

    experts: tuple[ExpertForms, ...] = ()
    dense: Mapping[str, str] = field(default_factory=dict)

    @property
    def used(self) -> set[str]:
        return {*self.dense.values(), *(form for pair in self.experts for form in pair)}


@dataclass(frozen=True)
class Inventory:
    """The dense tensors and the experts of a checkpoint that its family needs.

    forms: the formats of single tensors, see Forms. tables: the tensors of each table (base.Table),
    in order. Raises BadCheckpoint if they do not suit the tensors.
    """

    family: Family
    moe: MoeShape
    max_context: int
    usual_context: int | None
    kv_items_per_token: int
    kv_q8_bytes_per_token: int  # in an encoder-decoder it has no use
    state_bytes: int
    dense: Mapping[str, SourceTensor]
    experts: Mapping[ExpertKey, Mapping[str, SourceTensor]]
    tileable: frozenset[str] = frozenset()  # dense tensors of linears and embeddings
    embeddings: frozenset[str] = frozenset()  # dense tensors of embeddings
    unused: list[str] = field(default_factory=list)
    forms: Forms = Forms()
    mtp: Inventory | None = None  # the modules of multi-token prediction, as a model of their own
    mtp_dtype: str = ""  # their format; empty: the model's
    tables: Mapping[str, tuple[SourceTensor, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if problem := self._problem_of_forms():
            raise BadCheckpoint(f"the formats of {self.family.model_type} tensors: {problem}")

    def _problem_of_forms(self) -> str | None:
        forms = self.forms
        for form in sorted(forms.used):
            if form not in LAYOUT_VERSIONS or not is_tiled(form):
                return f"{form!r} is not a tiled format"
        cells = self.moe.layers * self.moe.experts
        if len(forms.experts) not in (0, 1, self.moe.layers, cells):
            return f"{len(forms.experts)} layers are given, not {self.moe.layers}"
        for name, form in forms.dense.items():
            if name not in self.tileable:
                return f"{name!r} is not a matrix of the model"
            if form == MXFP4 and name in self.embeddings:
                return f"{name!r} is an embedding, and cannot be {MXFP4}"
        return None

    def form_of(self, name: str, dtype: str) -> str:
        """Return the format of a dense tensor in a model of format `dtype`.

        `forms` decides first. The output head and the embedding keep 8 bits
        (docs/decisions/0025), so that they can be tied. In an MXFP4 model only the experts are
        MXFP4; other matrices get 8 bits. In a Q3 or Q2 model they get 4 bits. Tensors other than
        linears' weights and embeddings (norms, router gates) are never quantised.
        """
        if name in self.forms.dense:
            return self.forms.dense[name]
        if name.endswith(_EXACT):
            return "F32"
        if not is_tiled(dtype):
            return dtype
        if name not in self.tileable:
            return plain_form(dtype)
        eight = name == _HEAD or name in self.embeddings or dtype == MXFP4
        return "Q8" if eight else _LINEAR_FORMS.get(dtype, dtype)

    def dense_bytes(self, dtype: str) -> int:
        """Return the bytes of the dense tensors in the format `dtype`."""
        return sum(stored_bytes(self.form_of(n, dtype), t.shape) for n, t in self.dense.items())

    def weight_bytes(self, dtype: str) -> int:
        """Return the bytes of all weights in the format `dtype`."""
        expert_bytes = sum(layout.data_bytes for layout in self.expert_layouts(dtype))
        return self.dense_bytes(dtype) + expert_bytes + self._tables_bytes(dtype)

    def row_tables(self, dtype: str) -> tuple[RowTable, ...]:
        """Return the tables in a model of format `dtype`: Q8 in a tiled one."""
        form: Any = "Q8" if is_tiled(dtype) else dtype
        return tuple(
            RowTable(name, parts[0].shape[1], form, tuple(part.shape[0] for part in parts))
            for name, parts in self.tables.items()
        )

    def _tables_bytes(self, dtype: str) -> int:
        return sum(table.disk_bytes for table in self.row_tables(dtype))

    def expert_layouts(self, dtype: str) -> list[ExpertLayout]:
        """Return the layout of every expert, by cell, in a model of format `dtype`."""
        moe, forms = self.moe, self.forms.experts or (ExpertForms(dtype, dtype),)
        made = {
            pair: ExpertLayout(
                moe.hidden, moe.intermediate, pair.inner, moe.activation, moe.biased, pair.down
            )
            for pair in dict.fromkeys(forms)
        }
        times = moe.layers * moe.experts // len(forms)
        return [made[pair] for pair in forms for _ in range(times)]

    def disk_bytes(self, dtype: str) -> int:
        """Return the bytes on disk: the weights, and per file a header and a partial block.

        The modules of `mtp` are included.
        """
        more = 0 if self.mtp is None else self.mtp.disk_bytes(self.mtp_dtype or dtype)
        files = len(self.experts) + 1 + sum(map(len, self.tables.values()))
        return more + self.weight_bytes(dtype) + files * 2 * SHARD_DATA_OFFSET

    def kv_bytes_per_token(self, dtype: str) -> int:
        return self.kv_items_per_token * ITEM_BYTES[plain_form(dtype)]

    def downcasts(self, dtype: str) -> bool:
        """Return whether a model of format `dtype` has fewer bits than the source.

        Quantised formats of GGML do not count.
        """
        tensors = [
            *(tensor for name, tensor in self.dense.items() if not name.endswith(_EXACT)),
            *(t for parts in self.experts.values() for t in parts.values()),
            *(t for parts in self.tables.values() for t in parts),
        ]
        return dtype == "BF16" and any(
            tensor.dtype not in ("BF16", MXFP4) and not is_ggml(tensor.dtype) for tensor in tensors
        )

    @property
    def has_nvfp4(self) -> bool:
        """True if an expert has an NVFP4 matrix, which the tags q4 and q8 round."""
        return any(t.dtype == NVFP4 for parts in self.experts.values() for t in parts.values())

    def expert_matrices(self) -> Iterator[tuple[ExpertKey, str, SourceTensor]]:
        """Yield every matrix of an expert as (key, role, tensor)."""
        for key, parts in self.experts.items():
            yield from ((key, r, t) for r, t in parts.items() if len(t.shape) == 2)

    @property
    def has_mxfp4(self) -> bool:
        """True if all matrices of experts are MXFP4 in the checkpoint, so that it can be kept."""
        kept = (MXFP4, dtype_of(MXFP4))
        return all(tensor.dtype in kept for _, _, tensor in self.expert_matrices())


def take_inventory(family: Family, checkpoint: Checkpoint, mtp: bool = True) -> Inventory:
    """Return the tensors of a checkpoint that its family needs.

    mtp: with the modules of multi-token prediction, if the checkpoint has them. Incomplete ones are
    left out. Raises ModelDataError for an invalid config, BadCheckpoint for missing or misshapen
    tensors.
    """
    config = family.parse(checkpoint.config)
    found = _taken(family, config, checkpoint)
    if not mtp or (modules := family.mtp(config)) is None:
        return found
    checkpoint = replace(checkpoint, experts={})  # those without names are the model's own
    own = modules.parse(checkpoint.config)
    names = [name for name in checkpoint.tensors if not modules.ignores(name, own)]
    try:
        return replace(found, mtp=_taken(modules, own, checkpoint)) if names else found
    except (BadCheckpoint, ModelDataError):
        return replace(found, unused=[*found.unused, *names])


def _taken(family: Family, config: Any, checkpoint: Checkpoint) -> Inventory:
    wanted = WantedParts()
    model = family.build(config, wanted)
    cells = model.moe.layers * model.moe.experts
    if cells > _MOST_CELLS:
        raise BadCheckpoint(f"{checkpoint.folder}: its config has {cells} experts, over all layers")
    dense: dict[str, SourceTensor] = {}
    experts: dict[ExpertKey, dict[str, SourceTensor]] = {}
    unused: list[str] = []
    tables: dict[str, dict[int, SourceTensor]] = {prefix: {} for prefix in wanted.tables}
    for name, tensor in joined(checkpoint, lambda name: family.ignores(name, config)).items():
        if (fused := family.fused(name, config)) is not None:
            for key, role, piece in unfuse(fused, tensor, model.moe):
                experts.setdefault(key, {})[role] = piece
            continue
        part = family.expert(name, config)
        if part is not None:
            _check(tensor, model.moe.parts[part.role])
            experts.setdefault(ExpertKey(part.layer, part.expert), {})[part.role] = tensor
        elif (mine := piece_of(name, tables)) is not None:
            _check(tensor, (*tensor.shape[:1], wanted.tables[mine.table][1]))
            tables[mine.table][mine.number] = tensor
        elif (known := family.rename(name)) in wanted.shapes:
            _check(tensor, wanted.shapes[known], known)
            dense[known] = tensor
        elif not family.ignores(name, config):
            unused.append(name)
    for (layer, number, role), tensor in checkpoint.experts.items():
        if layer < model.moe.layers and number < model.moe.experts:
            wanted_shape = model.moe.parts.get(cast("Role", role))
            _check(tensor, () if wanted_shape is None else wanted_shape)
            experts.setdefault(ExpertKey(layer, number), {})[role] = tensor
        else:
            raise BadCheckpoint(
                f"{tensor.path}: {tensor.name!r} has expert {number} of MoE layer {layer}, "
                "which the config has not"
            )
    missing = [name for name in wanted.shapes if name not in dense]
    for cell in range(cells):
        layer, expert = divmod(cell, model.moe.experts)
        have = experts.get(ExpertKey(layer, expert), {})
        missing += [
            f"{role} of expert {expert} in MoE layer {layer}"
            for role in model.moe.parts
            if role not in have
        ]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BadCheckpoint(f"{checkpoint.folder} lacks {missing[0]}{more}")
    in_q8 = family.build(config, WantedParts("q8"))
    items = model.kv_bytes_per_token // torch.get_default_dtype().itemsize
    tileable = frozenset(wanted.shapes.keys() - wanted.tensors)
    return Inventory(
        family,
        model.moe,
        model.max_context,
        model.usual_context,
        items,
        in_q8.kv_bytes_per_token,
        model.state_bytes,
        dense,
        experts,
        tileable,
        frozenset(wanted.embeddings),
        unused,
        tables={name: in_order(name, wanted.tables[name][0], p) for name, p in tables.items()},
    )


def unfuse(
    fused: FusedPart, tensor: SourceTensor, moe: MoeShape
) -> Iterator[tuple[ExpertKey, str, SourceTensor]]:
    """Yield each expert's tensors of a fused one, as (key, role, tensor), without a copy.

    Raises BadCheckpoint for another shape.
    """
    roles = _FUSED_ROLES[fused.role]
    shape = moe.parts[roles[0]]
    rows = shape[0]
    whole = (len(roles) * rows, *shape[1:])
    transposed = fused.transposed and len(shape) == 2 and tensor.dtype != MXFP4
    lies = whole[::-1] if transposed else whole
    _check(tensor, (moe.experts, *lies))
    alone = not (transposed or fused.interleaved or tensor.dtype == MXFP4)
    for expert in range(moe.experts):
        mine = _share(tensor, expert, moe.experts)
        for number, role in enumerate(roles):
            if alone:
                piece = replace(_share(mine, number, len(roles)), shape=shape)
            else:
                first, step = (number, 2) if fused.interleaved else (number * rows, 1)
                picked = Pick(lies, transposed, first, step if len(roles) > 1 else 1)
                piece = replace(mine, shape=shape, pick=picked)
            yield ExpertKey(fused.layer, expert), role, piece


def _share(tensor: SourceTensor, number: int, count: int) -> SourceTensor:
    """Return share `number` of `count` equal shares of a tensor and its scales."""
    size = tensor.size_bytes // count
    scales = None if tensor.scales is None else _share(tensor.scales, number, count)
    at = tensor.offset + number * size
    return replace(tensor, offset=at, size_bytes=size, scales=scales)


def _check(tensor: SourceTensor, shape: tuple[int, ...], known: str = "") -> None:
    """Raise BadCheckpoint for another shape or dtype; known: the tensor's name in the family."""
    if tensor.shape != shape:
        raise BadCheckpoint(
            f"{tensor.path}: {tensor.name!r} is {list(tensor.shape)}, the config says {list(shape)}"
        )
    readable = tensor.dtype in TORCH_DTYPE or tensor.scales is not None or is_ggml(tensor.dtype)
    table = tensor.dtype in INTEGER_DTYPE and known.endswith(_EXACT)
    if not (readable or table):
        raise BadCheckpoint(f"{tensor.path}: {tensor.name!r} is {tensor.dtype}, not a float format")
