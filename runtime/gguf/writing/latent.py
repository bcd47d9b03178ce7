"""Describe DeepSeek's latent attention, and split its kv_b projection as llama.cpp stores it."""

from __future__ import annotations

from typing import Literal

from moeinf.models.layers.decoder import BodyConfig
from moeinf.models.layers.feed_forward import FfnPlan
from moeinf.models.layers.mla import MlaShape
from moeinf.runtime.gguf.writing.description import (
    Bytes,
    Change,
    Make,
    Place,
    Shape,
    ffn_sizes,
    refuse,
    rope_keys,
    scattered,
    sizes,
)
from moeinf.runtime.gguf.writing.writer import Value

_LITE_LAYERS = (26, 27)  # llama.cpp takes these for DeepSeek-V2-Lite, without q_lora_rank


def latent_keys(
    model_type: str, body: BodyConfig, shape: MlaShape, plan: FfnPlan, shared: int, scale: float
) -> dict[str, Value]:
    """Return the keys of latent attention and DeepSeek's experts. Raises CannotExport."""
    rope = body.rope
    yarn = rope.kind == "yarn"
    refuse(
        model_type,
        {
            "attention_bias": shape.bias,
            "moe_layer_freq": scattered(plan, body),
            "attention_factor": rope.attention_factor is not None,
            "an mscale other than mscale_all_dim": yarn and rope.mscale != rope.mscale_all_dim,
            "yarn without mscale_all_dim": yarn and not rope.mscale_all_dim,
            "n_shared_experts = 0": not shared,
        },
    )
    keys = sizes(body, plan.moe) | rope_keys(model_type, rope, shape.rope)
    if yarn:
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * (rope.mscale_all_dim or 0.0)
        keys.pop("rope.scaling.attn_factor", None)  # llama.cpp divides by it here
    if body.layers not in _LITE_LAYERS or shape.q_lora is not None:
        keys["attention.q_lora_rank"] = shape.q_lora or 0
    return keys | {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": shape.kv_lora,
        "attention.key_length": shape.kv_lora + shape.rope,
        "attention.value_length": shape.kv_lora,
        "attention.key_length_mla": shape.nope + shape.rope,
        "attention.value_length_mla": shape.value,
        **ffn_sizes(plan),
        "expert_shared_count": shared,
        "expert_weights_scale": float(scale),
    }


def split_kv_b(latent: MlaShape) -> dict[str, Make]:
    """Divide kv_b_proj [heads · (nope + value), width] into keys, transposed, and values."""
    heads, nope, value = latent.heads, latent.nope, latent.value

    def make(shape: Shape) -> tuple[Place, ...]:
        width = shape[1]

        def part(which: Literal["k", "v"]) -> Change:
            def change(rows: Bytes) -> Bytes:
                both = rows.reshape(heads, nope + value, width, -1)
                if which == "v":
                    return both[:, nope:].reshape(heads * value, -1)
                return both[:, :nope].swapaxes(1, 2).reshape(heads * width, -1)

            return change

        return (
            Place("attn_k_b.weight", (heads, width, nope), change=part("k")),
            Place("attn_v_b.weight", (heads, value, width), change=part("v")),
        )

    return {"self_attn.kv_b_proj.weight": make}
