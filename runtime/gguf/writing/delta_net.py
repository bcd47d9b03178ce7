"""Write Qwen3.5's Gated DeltaNet as llama.cpp stores it; families/delta_net.py restores it.

Value heads that share a key head are apart: first one of each key head, then the second ones. Norms
are stored plus 1, decay rates as -exp(A_log).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.models.layers.delta_net import DeltaShape
from moeinf.runtime.gguf.writing.description import Bytes, Change, Make, Place, Shape
from moeinf.runtime.gguf.writing.writer import Value

_Numbers = Callable[[NDArray[np.float32]], NDArray[Any]]


def delta_keys(
    shape: DeltaShape, full: Sequence[int], layers: int, turning: int
) -> dict[str, Value]:
    """Return the keys of DeltaNet, of the layers with attention, and of its rope's three axes.

    turning: the dimensions of a head that rotate. For text all axes have one position.
    """
    pairs = turning // 2
    recurrent = [layer not in full for layer in range(layers)]
    axes = [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0]
    return {
        "ssm.conv_kernel": shape.kernel,
        "ssm.state_size": shape.key_dim,
        "ssm.group_count": shape.key_heads,
        "ssm.time_step_rank": shape.value_heads,
        "ssm.inner_size": shape.values,
        "attention.recurrent_layers": np.array(recurrent, "<i4"),
        "rope.dimension_sections": np.array(axes, "<i4"),
    }


def delta_tensors(shape: DeltaShape) -> dict[str, Make]:
    """Return the tensors of a model that are not written as they are stored."""
    values = _tiled(shape, shape.value_dim)
    heads = _tiled(shape, 1)
    later = np.concatenate((np.arange(2 * shape.keys), 2 * shape.keys + values))  # Q and K stay

    def moved(to: str, order: NDArray[np.intp], exact: bool = False) -> Make:
        return lambda sides: (Place(to, _flat(sides), exact, lambda rows: rows[order]),)

    def numbers(to: str, change: _Numbers) -> Make:
        return lambda sides: (Place(to, sides, True, _float32(change)),)

    def output(sides: Shape) -> tuple[Place, ...]:
        return (Place("ssm_out.weight", sides, change=columns, whole=shape.value_dim),)

    def columns(rows: Bytes) -> Bytes:
        by_head = rows.reshape(len(rows), shape.key_heads, shape.value_heads // shape.key_heads, -1)
        return by_head.swapaxes(1, 2).reshape(rows.shape)

    norms = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "model.norm": "output_norm",
    }
    return {
        "linear_attn.in_proj_qkv.weight": moved("attn_qkv.weight", later),
        "linear_attn.in_proj_z.weight": moved("attn_gate.weight", values),
        "linear_attn.in_proj_a.weight": moved("ssm_alpha.weight", heads),
        "linear_attn.in_proj_b.weight": moved("ssm_beta.weight", heads),
        "linear_attn.conv1d.weight": moved("ssm_conv1d.weight", later, exact=True),
        "linear_attn.out_proj.weight": output,
        "linear_attn.A_log": numbers("ssm_a", lambda stored: -np.exp(stored[:, heads])),
        "linear_attn.dt_bias": numbers("ssm_dt.bias", lambda stored: stored[:, heads]),
        **{
            f"{name}.weight": numbers(f"{to}.weight", lambda stored: stored + 1)
            for name, to in norms.items()
        },
    }


def _tiled(shape: DeltaShape, width: int) -> NDArray[np.intp]:
    """Return the order of rows, `width` of each value head, in which llama.cpp has them."""
    rows = np.arange(shape.value_heads * width)
    return rows.reshape(shape.key_heads, -1, width).swapaxes(0, 1).reshape(-1)


def _flat(sides: Shape) -> Shape:
    """Return the shape of a matrix, or of a kernel [channels, 1, kernel] as one."""
    return (sides[0], sides[-1])


def _float32(change: _Numbers) -> Change:
    return lambda rows: change(rows.view("<f4")).astype("<f4").view(np.uint8)
