"""Describe models whose layers with a window have other heads: Gemma 4 and MiMo-V2-Flash."""

from __future__ import annotations

import numpy as np

from moeinf.models.gemma4 import Gemma4Config
from moeinf.models.mimo_v2_flash import MimoV2FlashConfig
from moeinf.runtime.gguf.writing.description import (
    Written,
    ffn_sizes,
    refuse,
    sizes,
    sliding,
)
from moeinf.runtime.gguf.writing.sigmoid import sigmoid_keys

_STILL = 1e30  # a divisor of frequencies that leaves a pair as it is


def gemma4(config: Gemma4Config) -> Written:
    """Describe Gemma 4. Divisors of frequencies tell which part of a wide head rotates."""
    body, moe, (wide, narrow) = config.body, config.moe, config.head_dims
    refuse(
        "gemma4",
        {
            "attention_bias": any(shape.bias for shape in config.attention),
            "layer_types without a window": not sliding(config.attention),
            "a rope of global layers that is not proportional": body.rope.kind != "proportional",
            "a factor of the rope": body.rope.factor != 1,
            "a rope scaling of layers with a window": config.sliding_rope.kind != "default",
        },
    )
    turning = int(wide * body.rope.partial / 2)
    keys = sizes(body, moe) | sliding(config.attention)
    if body.logits_cap is not None:
        keys["final_logit_softcapping"] = float(body.logits_cap)
    return Written(
        "gemma4",
        keys
        | {
            "attention.head_count_kv": np.array([one.kv_heads for one in config.attention], "<i4"),
            "attention.key_length": wide,
            "attention.value_length": wide,
            "attention.key_length_swa": narrow,
            "attention.value_length_swa": narrow,
            "attention.shared_kv_layers": 0,
            "embedding_length_per_layer_input": 0,
            "feed_forward_length": config.dense_intermediate,
            "expert_feed_forward_length": moe.intermediate,
            "rope.freq_base": float(body.rope.theta),
            "rope.freq_base_swa": float(config.sliding_rope.theta),
            "rope.dimension_count": wide,
            "rope.dimension_count_swa": config.sliding_rope.turning(narrow),
        },
        range(body.layers),
        factors={"rope_freqs.weight": (1.0,) * turning + (_STILL,) * (wide // 2 - turning)},
    )


def mimo(config: MimoV2FlashConfig) -> Written:
    """Describe MiMo-V2-Flash. llama.cpp has one rope but for theta, and no biases."""
    body, shape, ffn = config.body, config.attention[0], config.ffn
    full, other = body.rope, config.sliding_rope
    turning = full.turning(shape.head_dim)
    refuse(
        "mimo_v2_flash",
        {
            "attention_bias": shape.qkv_bias,
            "layer_types without a window": not sliding(config.attention),
            "norm_topk_prob = false": not ffn.renormalise,
            "partial_rotary_factor of two values": turning != other.turning(shape.head_dim),
            "a rope scaling": (full.kind, other.kind) != ("default", "default"),
        },
    )
    return Written(
        "mimo2",
        sizes(body, ffn.plan.moe)
        | sliding(config.attention)
        | ffn_sizes(ffn.plan)
        | {
            "attention.head_count_kv": np.array([one.kv_heads for one in config.attention], "<i4"),
            "attention.key_length": shape.head_dim,
            "attention.value_length": shape.value_width,
            "attention.value_scale": float(config.value_scale),
            "rope.freq_base": float(full.theta),
            "rope.freq_base_swa": float(other.theta),
            "rope.dimension_count": turning,
        }
        | sigmoid_keys(ffn),
        ffn.plan.sparse_layers,
        copies_embedding=body.tied_embeddings,
    )
