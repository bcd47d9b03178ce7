"""Write Gated DeltaNet as llama.cpp stores it; families/delta_net.py restores it.

In Qwen3.5 value heads that share a key head are apart: first one of each key head, then the second
ones. In Qwen3-Next the one input matrix is two. Norms are stored plus 1, decay rates as
-exp(A_log).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.models.layers.delta_net import DeltaShape
from moeinf.models.qwen3_5_moe import Qwen35MoeConfig
from moeinf.runtime.gguf.writing.description import (
    Bytes,
    Change,
    Make,
    Place,
    Shape,
    Written,
    flags,
    heads,
    refuse,
    rope_keys,
    rounding,
    sizes,
)
from moeinf.runtime.gguf.writing.writer import Value

_Numbers = Callable[[NDArray[np.float32]], NDArray[Any]]


def qwen35(config: Qwen35MoeConfig, model_type: str = "qwen3_5_moe") -> Written:
    """Describe Qwen3.5."""
    body, shape, moe = config.body, config.attention, config.moe
    delta = config.delta
    refuse(
        model_type,
        {
            "attention_bias": shape.bias,
            "linear_value_head_dim": delta.value_dim != delta.key_dim,
        },
    )
    dimensions = body.rope.turning(shape.head_dim)
    keys = sizes(body, moe) | heads(shape) | rope_keys(model_type, body.rope, dimensions)
    return Written(
        "qwen35moe",
        keys
        | _delta_keys(delta, config.full, body.layers, dimensions)
        | {
            "expert_feed_forward_length": moe.intermediate,
            "expert_shared_feed_forward_length": config.shared_intermediate,
        },
        range(body.layers),
        made=_delta_tensors(delta),
        prefix=config.name_prefix,
        notes=rounding(body.rope),
    )


def qwen3_next(config: Qwen35MoeConfig) -> Written:
    """Describe Qwen3-Next, in which llama.cpp loads experts for every layer."""
    refuse(
        "qwen3_next",
        {
            "layers without experts": config.moe.layers < config.body.layers,
            "norm_topk_prob = false": not config.renormalise,
        },
    )
    about = qwen35(replace(config, inner=False), "qwen3_next")
    keys = {key: value for key, value in about.keys.items() if key != "rope.dimension_sections"}
    return replace(about, architecture="qwen3next", keys=keys, made=_next_tensors(config.delta))


def _delta_keys(
    shape: DeltaShape, full: Sequence[int], layers: int, turning: int
) -> dict[str, Value]:
    """Return the keys of DeltaNet, of the layers with attention, and of its rope's three axes.

    turning: the dimensions of a head that rotate. For text all axes have one position.
    """
    pairs = turning // 2
    axes = [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0]
    return {
        "ssm.conv_kernel": shape.kernel,
        "ssm.state_size": shape.key_dim,
        "ssm.group_count": shape.key_heads,
        "ssm.time_step_rank": shape.value_heads,
        "ssm.inner_size": shape.values,
        "attention.recurrent_layers": flags(layer not in full for layer in range(layers)),
        "rope.dimension_sections": np.array(axes, "<i4"),
    }


def _delta_tensors(shape: DeltaShape) -> dict[str, Make]:
    """Return the tensors of a model that are not written as they are stored."""
    values = _tiled(shape, shape.value_dim)
    heads = _tiled(shape, 1)
    later = np.concatenate((np.arange(2 * shape.keys), 2 * shape.keys + values))  # Q and K stay

    def moved(to: str, order: NDArray[np.intp], exact: bool = False) -> Make:
        return lambda sides: (Place(to, _flat(sides), exact, lambda rows: rows[order]),)

    def output(sides: Shape) -> tuple[Place, ...]:
        return (Place("ssm_out.weight", sides, change=columns, whole=shape.value_dim),)

    def columns(rows: Bytes) -> Bytes:
        by_head = rows.reshape(len(rows), shape.key_heads, shape.value_heads // shape.key_heads, -1)
        return by_head.swapaxes(1, 2).reshape(rows.shape)

    return {
        "linear_attn.in_proj_qkv.weight": moved("attn_qkv.weight", later),
        "linear_attn.in_proj_z.weight": moved("attn_gate.weight", values),
        "linear_attn.in_proj_a.weight": moved("ssm_alpha.weight", heads),
        "linear_attn.in_proj_b.weight": moved("ssm_beta.weight", heads),
        "linear_attn.conv1d.weight": moved("ssm_conv1d.weight", later, exact=True),
        "linear_attn.out_proj.weight": output,
        "linear_attn.A_log": numbers("ssm_a", lambda stored: -np.exp(stored[:, heads])),
        "linear_attn.dt_bias": numbers("ssm_dt.bias", lambda stored: stored[:, heads]),
        **_norms(),
    }


def _next_tensors(shape: DeltaShape) -> dict[str, Make]:
    """Return those of Qwen3-Next, whose value heads keep their order."""
    of_group = shape.values // shape.key_heads
    at = np.cumsum([shape.key_dim, shape.key_dim, of_group])
    rows = np.arange(shape.channels + shape.values).reshape(shape.key_heads, -1)
    q, k, v, z = (part.reshape(-1) for part in np.split(rows, at, 1))
    mixed = np.concatenate((q, k, v))

    def inputs(sides: Shape) -> tuple[Place, ...]:
        return (
            Place("attn_qkv.weight", (len(mixed), sides[1]), change=lambda rows: rows[mixed]),
            Place("attn_gate.weight", (len(z), sides[1]), change=lambda rows: rows[z]),
        )

    def kernel(sides: Shape) -> tuple[Place, ...]:
        return (Place("ssm_conv1d.weight", _flat(sides), exact=True),)

    return {
        "linear_attn.in_proj_qkvz.weight": inputs,
        "linear_attn.conv1d.weight": lambda sides: (
            Place("ssm_conv1d.weight", _flat(sides), True),
        ),
        "linear_attn.A_log": numbers("ssm_a", lambda stored: -np.exp(stored)),
        **_norms(),
    }


def _norms() -> dict[str, Make]:
    """Return the norms that are stored plus 1."""
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "model.norm": "output_norm",
    }
    return {f"{name}.weight": plus_one(f"{to}.weight") for name, to in names.items()}


def plus_one(to: str) -> Make:
    """Return the change of a norm that is stored plus 1."""
    return numbers(to, lambda stored: stored + 1)


def numbers(to: str, change: _Numbers, sides: Shape | None = None) -> Make:
    """Return a change of values in float32; sides: the shape in the file, if it is another."""
    return lambda stored: (Place(to, sides or stored, True, _float32(change)),)


def _tiled(shape: DeltaShape, width: int) -> NDArray[np.intp]:
    """Return the order of rows, `width` of each value head, in which llama.cpp has them."""
    rows = np.arange(shape.value_heads * width)
    return rows.reshape(shape.key_heads, -1, width).swapaxes(0, 1).reshape(-1)


def _flat(sides: Shape) -> Shape:
    """Return the shape of a matrix, or of a kernel [channels, 1, kernel] as one."""
    return (sides[0], sides[-1])


def _float32(change: _Numbers) -> Change:
    return lambda rows: change(rows.view("<f4")).astype("<f4").view(np.uint8)
