"""Choose the tag that keeps most of a GGUF file or an NVFP4 checkpoint, and say what it costs."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterable

from moeinf.native import tile_columns
from moeinf.offload.format.layout import ExpertForms
from moeinf.runtime.checkpoints.checkpoint import SourceTensor
from moeinf.runtime.checkpoints.inventory import Forms, Inventory
from moeinf.runtime.checkpoints.quantised.fused_experts import MXFP4
from moeinf.runtime.checkpoints.quantised.ggml import (
    PREFIX,
    bits_of,
    is_ggml,
    keeps,
    keeps_rows,
    kept_form,
)
from moeinf.runtime.checkpoints.quantised.nvfp4 import NVFP4
from moeinf.runtime.sizes import format_bytes

_Q4_BITS = 4.5
# The formats of rows that are not whole blocks of a K type: padding one block to the next wastes
# bits, and GGUF has no type for such rows but those of groups of 32.
WHOLE_BLOCKS = {"Q4K": "Q4", "Q5K": "Q8", "Q6K": "Q8"}


def best_tag(experts: Iterable[SourceTensor]) -> str | None:
    """Return the tag for these tensors of experts, or None for the default of any model.

    It is that of the commonest type, NVFP4 or one of GGML. A type without a format of ours has the
    tag of the next larger one: q4 up to 4.5 bits per weight, q8 above.
    """
    weights: Counter[str] = Counter()
    for tensor in experts:
        if len(tensor.shape) == 2:
            weights[tensor.dtype] += math.prod(tensor.shape)
    types = [dtype for dtype, _ in weights.most_common() if is_ggml(dtype) or dtype == NVFP4]
    if not types:
        return None
    return (_kept(types[0]) or _larger(types[0])).lower()


def kept_forms(inventory: Inventory) -> Forms:
    """Return the formats that keep the types of a file tensor by tensor.

    A type without a format of ours becomes Q4 up to 4.5 bits per weight, and Q8 above. A tensor
    that is computed from others becomes Q8. So do experts of one layer whose types differ.
    """
    layers: dict[int, dict[bool, set[str]]] = defaultdict(lambda: {False: set(), True: set()})
    for key, role, tensor in inventory.expert_matrices():
        layers[key.layer][role == "down"].add(_form_for(tensor))
    experts = tuple(
        ExpertForms(_one_of(layers[n][False]), _one_of(layers[n][True])) for n in sorted(layers)
    )
    dense = {name: _form_for(inventory.dense[name]) for name in inventory.tileable}
    for name in inventory.embeddings:
        if dense[name] == MXFP4:  # no kernel reads single rows of it
            dense[name] = "Q8"
    return Forms(experts, dense)


def whole_blocks(inventory: Inventory, form: str) -> Forms:
    """Return the formats of a model in the K type `form`, where each row is whole blocks.

    Other matrices are in WHOLE_BLOCKS[form].
    """

    def suited(columns: int) -> str:
        return WHOLE_BLOCKS[form] if columns % tile_columns(form.lower()) else form

    pair = ExpertForms(suited(inventory.moe.hidden), suited(inventory.moe.intermediate))
    plain = dataclasses.replace(inventory, forms=Forms())
    linears = [n for n in sorted(inventory.tileable) if plain.form_of(n, form) == form]
    found = {name: suited(inventory.dense[name].shape[-1]) for name in linears}
    dense = {name: other for name, other in found.items() if other != form}
    return Forms(() if pair == (form, form) else (pair,), dense)


def describe_broken_rows(inventory: Inventory, form: str) -> str | None:
    """Return a sentence on the matrices that `whole_blocks` gave another format, or None."""
    other = WHOLE_BLOCKS.get(form)
    if other is None or inventory.forms != whole_blocks(inventory, form):
        return None
    layout = inventory.expert_layouts(form)[0]
    names = ["experts' gate_proj and up_proj"] if layout.dtype != form else []
    names += ["experts' down_proj"] if layout.down != form else []
    names += [f"{len(inventory.forms.dense)} other matrices"] if inventory.forms.dense else []
    if not names:
        return None
    columns = tile_columns(form.lower())
    return f"rows that are not whole blocks of {columns} become {other.lower()}: {', '.join(names)}"


def describe_loss(inventory: Inventory, form: str) -> str | None:
    """Return a sentence on the types of GGML that a model of format `form` does not keep.

    None if it keeps all.
    """
    layouts = inventory.expert_layouts(form)
    targets = [
        (t, layout.down if role == "down" else layout.dtype)
        for key, role, t in inventory.expert_matrices()
        for layout in (layouts[key.layer * inventory.moe.experts + key.expert],)
    ]
    targets += [(t, inventory.form_of(name, form)) for name, t in inventory.dense.items()]
    stored = [(s, f) for t, f in targets for s in (t.recipe.stored if t.recipe else (t,))]
    lost = {s.dtype for s, f in stored if is_ggml(s.dtype) and not keeps(s.dtype, f)}
    if not lost:
        return None
    verb = "widened" if form in ("BF16", "F32") else "converted"
    names = ", ".join(sorted(dtype.removeprefix(PREFIX) for dtype in lost))
    into = ", ".join(sorted({f for s, f in stored if s.dtype in lost and not keeps(s.dtype, f)}))
    before = format_bytes(sum(s.size_bytes for s, _ in stored))
    after = format_bytes(inventory.weight_bytes(form))
    return f"{names}: {verb} to {into.lower()}, {before} become {after}"


def _form_for(tensor: SourceTensor) -> str:
    if tensor.recipe is not None and not keeps_rows(tensor.recipe):
        return "Q8"
    return _kept(tensor.dtype) or _larger(tensor.dtype)


def _larger(dtype: str) -> str:
    return "Q4" if is_ggml(dtype) and bits_of(dtype) <= _Q4_BITS else "Q8"


def _kept(dtype: str) -> str | None:
    return NVFP4 if dtype == NVFP4 else kept_form(dtype)


def _one_of(forms: set[str]) -> str:
    return next(iter(forms)) if len(forms) == 1 else "Q8"
