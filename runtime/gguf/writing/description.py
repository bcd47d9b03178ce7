"""The parts of a model's description in the keys of llama.cpp that all families share.

Source: the conversion and src/models of github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moeinf.errors import UnusableInput
from moeinf.models.base import MoeShape
from moeinf.models.layers.attention import GqaShape
from moeinf.models.layers.decoder import BodyConfig
from moeinf.models.layers.feed_forward import FfnPlan
from moeinf.models.layers.rope import RopeConfig, attention_factor, inverse_frequencies
from moeinf.runtime.gguf.writing.writer import Value

Bytes = NDArray[np.uint8]
Change = Callable[[Bytes], Bytes]  # of all rows of a matrix [rows, bytes of a row]
Shape = tuple[int, ...]
SOFTMAX, SIGMOID = 1, 2  # of expert_gating_func


class CannotExport(UnusableInput, ValueError):
    """llama.cpp cannot run the model, or would compute different results."""

    code = "cannot_export"
    hint = "`moeinf export --help`, which names the families"


@dataclass(frozen=True)
class Place:
    """Where a stored tensor is written: name, shape with the columns last, and how it changes.

    exact  in F32
    integers  in I32; stored in F32
    whole  columns that stay together, which no block of a quantised type may cross
    """

    name: str
    shape: Shape
    exact: bool = False
    change: Change | None = None
    whole: int | None = None
    integers: bool = False


Make = Callable[[Shape], tuple[Place, ...]]  # the stored shape -> places, named inside a block


@dataclass(frozen=True)
class Written:
    """The description of a model for llama.cpp.

    keys           metadata, without the name of the architecture in front
    moe_layers     the decoder layer of each MoE layer
    copies_embedding  llama.cpp wants an output head, and the checkpoint ties it to the embedding
    paired         heads of the tensors whose rows are in another order (names.py)
    made           tensors that are not written as they are stored, by their names
    prefix         what the names of the decoder's tensors begin with
    factors        divisors of rope's frequencies, by the name of their tensor
    tables         table of rows -> its tensor
    """

    architecture: str
    keys: Mapping[str, Value]
    moe_layers: Sequence[int]
    copies_embedding: bool = False
    paired: Mapping[str, int] = field(default_factory=dict)
    made: Mapping[str, Make] = field(default_factory=dict)
    prefix: str = "model."
    factors: Mapping[str, Sequence[float]] = field(default_factory=dict)
    tables: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def refuse(model_type: str, switches: Mapping[str, bool]) -> None:
    """Raise CannotExport for the first switch that is on."""
    for words, on in switches.items():
        if on:
            raise CannotExport(f"{model_type}: llama.cpp ignores {words}, so answers would differ")


def sizes(body: BodyConfig, moe: MoeShape) -> dict[str, Value]:
    return {
        "block_count": body.layers,
        "context_length": body.max_context,
        "embedding_length": body.hidden,
        "vocab_size": body.vocab,
        "attention.head_count": body.heads,
        "attention.layer_norm_rms_epsilon": float(body.norm_eps),
        "expert_count": moe.experts,
        "expert_used_count": moe.top_k,
    }


def ffn_sizes(plan: FfnPlan) -> dict[str, Value]:
    """Return the widths of a model whose first layers may be dense."""
    keys: dict[str, Value] = {
        "leading_dense_block_count": plan.sparse_layers[0],
        "expert_feed_forward_length": plan.moe.intermediate,
    }
    if plan.dense_intermediate is not None:
        keys["feed_forward_length"] = plan.dense_intermediate
    return keys


def scattered(plan: FfnPlan, body: BodyConfig) -> bool:
    """Return True if a dense layer comes after one with experts."""
    return list(plan.sparse_layers) != list(range(plan.sparse_layers[0], body.layers))


def sliding(shapes: Sequence[GqaShape]) -> dict[str, Value]:
    """Return the keys of windows; llama.cpp reads one size for all layers that have one."""
    windows = {shape.window for shape in shapes if shape.window is not None}
    assert len(windows) <= 1, windows
    if not windows:
        return {}
    return {
        "attention.sliding_window": windows.pop(),
        "attention.sliding_window_pattern": flags(s.window is not None for s in shapes),
    }


def flags(values: Iterable[bool]) -> NDArray[np.int32]:
    """Return one number for each layer, which llama.cpp reads like a list of booleans."""
    return np.array(list(values), "<i4")


def heads(shape: GqaShape) -> dict[str, Value]:
    return {
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
    }


def rope_keys(
    model_type: str, rope: RopeConfig, dimensions: int, reads_factors: bool = False
) -> dict[str, Value]:
    """Return the keys of the rotary embedding. llama.cpp has yarn's usual factor built in.

    reads_factors: llama.cpp reads the tensor of `stretched` in this architecture. Raises
    CannotExport for a kind that it does not know.
    """
    keys: dict[str, Value] = {
        "rope.freq_base": float(rope.theta),
        "rope.dimension_count": dimensions,
    }
    if rope.kind == "default" or (reads_factors and (rope.kind == "llama3" or _divided(rope))):
        return keys
    if rope.kind not in ("linear", "yarn"):
        raise CannotExport(f"{model_type}: rope type {rope.kind!r} cannot be exported as GGUF")
    keys |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": float(rope.factor)}
    if rope.kind == "linear":
        return keys
    keys |= {
        "rope.scaling.original_context_length": rope.original_context,
        "rope.scaling.yarn_beta_fast": float(rope.beta_fast),
        "rope.scaling.yarn_beta_slow": float(rope.beta_slow),
    }
    if rope.attention_factor is not None:  # as llama.cpp's conversion writes it; not used there
        keys["rope.scaling.yarn_attn_factor"] = float(rope.attention_factor)
    left = attention_factor(rope) / (0.1 * math.log(rope.factor) + 1)
    if not math.isclose(left, 1):
        keys["rope.scaling.attn_factor"] = left
    return keys


def rounding(rope: RopeConfig) -> tuple[str, ...]:
    if rope.kind != "yarn" or rope.truncate:
        return ()
    return (
        "llama.cpp rounds the ends of yarn's ramp, this model does not: logits differ a little",
    )


def windowed(shape: GqaShape, body: BodyConfig) -> bool:
    return shape.window is not None and shape.window < body.max_context


def _divided(rope: RopeConfig) -> bool:
    """Return True for divisors of the frequencies that were read from a file's rope_freqs."""
    return rope.kind == "longrope" and rope.short == rope.long and attention_factor(rope) == 1


def stretched(rope: RopeConfig, dimensions: int) -> dict[str, tuple[float, ...]]:
    """Return the tensor that expresses llama3's frequencies, which llama.cpp has no keys for."""
    if _divided(rope):
        return {"rope_freqs.weight": rope.short}
    if rope.kind != "llama3":
        return {}
    plain = RopeConfig(rope.theta)
    factors = inverse_frequencies(plain, dimensions) / inverse_frequencies(rope, dimensions)
    return {"rope_freqs.weight": tuple(factors.tolist())}
