"""The architectures of GGUF files that we have a family for, as an explicit table.

The names of keys and tensors, and what llama.cpp changes in a tensor, are those of its converter
(convert_hf_to_gguf.py and conversion/).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moeinf.runtime.gguf.families.delta_net import (
    DELTA_MADE,
    DELTA_MOVES,
    DELTA_NAMES,
    IN_QWEN,
    NEXT_MADE,
    NEXT_NAMES,
    qwen35_config,
)
from moeinf.runtime.gguf.families.gemma4 import GEMMA4_NAMES, gemma4_config
from moeinf.runtime.gguf.families.hybrid import (
    GRANITE_HYBRID_NAMES,
    GRANITE_MAMBA,
    LFM2_MADE,
    LFM2_NAMES,
    NEMOTRON_MAMBA,
    NEMOTRON_NAMES,
    granite_hybrid_config,
    lfm2_config,
    nemotron_config,
)
from moeinf.runtime.gguf.families.kimi_delta import KIMI_MADE, KIMI_NAMES
from moeinf.runtime.gguf.families.latent import KV_B
from moeinf.runtime.gguf.families.recombined import (
    ERNIE_MADE,
    ERNIE_NAMES,
    HUNYUAN_NAMES,
    LAGUNA_NAMES,
    MINIMAX_NAMES,
    dots1_config,
    ernie_config,
    exaone_config,
    hunyuan_config,
    laguna_config,
    minimax_config,
)
from moeinf.runtime.gguf.families.sparse_latent import (
    INDEXER_NAMES,
    glm_dsa_config,
    mistral4_config,
    v32_config,
)
from moeinf.runtime.gguf.families.streams import (
    DEEPSEEK4_NAMES,
    DEEPSEEK4_TOP,
    GLM5_NEXT_MADE,
    GLM5_NEXT_NAMES,
    QWEN4_MADE,
    QWEN4_NAMES,
    deepseek4_config,
    glm5_next_config,
    qwen4_config,
    qwen4_top,
)
from moeinf.runtime.gguf.families.usual import (
    AFTER,
    ATTENTION,
    BEHIND,
    LATENT,
    MLP,
    SHARED,
    SIGMOID,
    body,
    latent_sizes,
    qwen_experts,
    sigmoid_experts,
)
from moeinf.runtime.gguf.keys import Keys
from moeinf.runtime.gguf.made import Change, Made, Modules
from moeinf.runtime.gguf.rows import unpaired

_Sides = tuple[int, ...]
_GATING_SIGMOID = 2

_ARCTIC = {
    "ffn_norm": "residual_layernorm",
    "ffn_gate": "residual_mlp.w1",
    "ffn_down": "residual_mlp.w2",
    "ffn_up": "residual_mlp.w3",
    "ffn_norm_exps": "post_attention_layernorm",
    "ffn_gate_inp": "block_sparse_moe.gate",
}
_PAIRED: dict[str, Change] = {  # rows of Q and K in pairs, for llama.cpp's other kind of rope
    "attn_q": lambda keys: unpaired(keys.count("attention.head_count")),
    "attn_k": lambda keys: unpaired(keys.kv_heads),
}


def _stacked(keys: Keys, gate: _Sides, up: _Sides) -> tuple[_Sides, Callable[..., Tensor]]:
    """Join the rows of gate and up."""
    if len(gate) != 2 or gate != up:
        raise keys.bad("has ffn_gate_shexp and ffn_up_shexp of shapes that do not fit")
    return (2 * gate[0], gate[1]), lambda *rows: torch.cat(rows)


_FUSED_SHARED = Made(("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), _stacked, moves_rows=True)


@dataclass(frozen=True)
class Architecture:
    """One GGUF architecture: its config, its names, and the tensors that differ.

    config  metadata -> config.json of our family, without tie_word_embeddings
    names   name inside a block -> name inside model.layers.N; a `.scale` here is no factor
    moves   name inside a block -> the function that restores the order of its rows
    made    name inside model.layers.N -> how it is made of tensors of the block
    top     names outside the blocks that no other architecture has
    centred  norms outside the blocks that are stored plus 1
    modules  of multi-token prediction, if we draft with them
    """

    config: Callable[[Keys], dict[str, Any]]
    names: Mapping[str, str]
    moves: Mapping[str, Change] = field(default_factory=dict)
    made: Mapping[str, Made] = field(default_factory=dict)
    top: Callable[[Keys], Mapping[str, str]] = lambda _: {}
    centred: tuple[str, ...] = ()
    modules: Modules | None = None

    @property
    def used(self) -> frozenset[str]:
        """The names inside a block of tensors that others are made of."""
        return frozenset(part for made in self.made.values() for part in made.parts)


def _olmoe(keys: Keys) -> dict[str, Any]:
    return body(keys, "olmoe") | {
        "intermediate_size": keys.get("feed_forward_length"),
        "num_experts": keys.get("expert_count"),
        "clip_qkv": keys.get("attention.clamp_kqv"),
        "norm_topk_prob": False,  # llama.cpp knows no other
    }


def _mixtral(keys: Keys) -> dict[str, Any]:
    return body(keys, "mixtral") | {
        "intermediate_size": keys.get("feed_forward_length"),
        "num_local_experts": keys.get("expert_count"),
    }


def _granite(keys: Keys) -> dict[str, Any]:
    shared = keys.get("expert_shared_feed_forward_length") or None
    return body(keys, "granitemoeshared" if shared else "granitemoe") | {
        "shared_intermediate_size": shared,
        "intermediate_size": keys.get("feed_forward_length"),
        "num_local_experts": keys.get("expert_count"),
        "attention_multiplier": keys.get("attention.scale"),
        "embedding_multiplier": keys.get("embedding_scale"),
        "residual_multiplier": keys.get("residual_scale"),
        "logits_scaling": keys.get("logit_scale"),
    }


def _arctic(keys: Keys) -> dict[str, Any]:
    found = body(keys, "arctic")
    return found | {
        "intermediate_size": keys.get("feed_forward_length"),
        "num_local_experts": keys.get("expert_count"),
        "rope_theta": found["rope_parameters"]["rope_theta"],
        "moe_layer_frequency": 1,
        "parallel_attn_mlp_res": True,
    }


def _phimoe(keys: Keys) -> dict[str, Any]:
    return body(keys, "phimoe") | {
        "intermediate_size": keys.get("feed_forward_length"),
        "num_local_experts": keys.get("expert_count"),
        "rope_parameters": keys.long_rope(),
        "sliding_window": keys.get("attention.sliding_window") or None,
        "lm_head_bias": "output.bias" in keys.file.tensors,
    }


def _gpt_oss(keys: Keys) -> dict[str, Any]:
    found = body(keys, "gpt_oss")
    return found | {
        "intermediate_size": keys.get("expert_feed_forward_length"),
        "num_local_experts": keys.get("expert_count"),
        "sliding_window": keys.get("attention.sliding_window"),
        "rope_parameters": {**found["rope_parameters"], "truncate": False},  # as trained
    }


def _qwen2(keys: Keys) -> dict[str, Any]:
    return (
        body(keys, "qwen2_moe")
        | qwen_experts(keys)
        | {
            "qkv_bias": keys.has_tensor("attn_q.bias"),
            "norm_topk_prob": keys.get("expert_weights_norm") or False,
        }
    )


def _qwen3(keys: Keys) -> dict[str, Any]:
    # llama.cpp always renormalises.
    return body(keys, "qwen3_moe") | qwen_experts(keys) | {"norm_topk_prob": True}


def _glm4(keys: Keys) -> dict[str, Any]:
    return (
        body(keys, "glm4_moe")
        | sigmoid_experts(keys)
        | {
            "rope_parameters": keys.partial_rope(),
            "use_qk_norm": keys.has_tensor("attn_q_norm.weight"),
        }
    )


def _kimi_linear(keys: Keys) -> dict[str, Any]:
    kinds = {True: "full_attention", False: "linear_attention"}
    heads = keys.of_layers("attention.head_count_kv")  # 0: a delta layer
    return (
        body(keys, "kimi_linear")
        | sigmoid_experts(keys)
        | latent_sizes(keys)
        | {
            "rope_parameters": None,
            "norm_topk_prob": True,  # llama.cpp knows no other
            "layer_types": [kinds[count > 0] for count in heads],
            "linear_num_heads": keys.get("attention.head_count"),
            "linear_head_dim": keys.get("kda.head_dim"),
            "linear_conv_kernel_dim": keys.get("ssm.conv_kernel"),
        }
    )


def _mimo(keys: Keys) -> dict[str, Any]:
    slides = [number > 0 for number in keys.of_layers("attention.sliding_window_pattern")]
    sinks, heads = {False: False, True: False}, dict[bool, int]()
    both = zip(slides, keys.of_layers("attention.head_count_kv"), strict=True)
    for block, (slide, count) in enumerate(both):
        heads[slide] = count
        sinks[slide] |= keys.has_tensor("attn_sinks.weight", block)
    rope, theta = keys.partial_rope(), keys.get("rope.freq_base_swa")
    sliding = rope if theta is None else rope | {"rope_theta": theta}
    sparse = [keys.has_tensor("ffn_gate_inp.weight", block) for block in range(keys.layers)]
    return (
        body(keys, "mimo_v2_flash")
        | sigmoid_experts(keys)
        | {
            "n_shared_experts": 0,
            "norm_topk_prob": True,  # llama.cpp knows no other
            "num_key_value_heads": heads.get(False, keys.kv_heads),
            "swa_num_key_value_heads": heads.get(True),
            "v_head_dim": keys.get("attention.value_length"),
            "sliding_window": keys.get("attention.sliding_window"),
            "attention_value_scale": keys.get("attention.value_scale") or 1.0,
            "add_full_attention_sink_bias": sinks[False],
            "add_swa_attention_sink_bias": sinks[True],
            "rope_parameters": {"full_attention": rope, "sliding_attention": sliding},
            "layer_types": ["sliding_attention" if s else "full_attention" for s in slides],
            "mlp_layer_types": ["sparse" if one else "dense" for one in sparse],
        }
    )


def _deepseek(keys: Keys) -> dict[str, Any]:
    """Return the config of DeepSeek-V2 or -V3, or of GLM-4.7-Flash, which is stored like V3."""
    gating = keys.get("expert_gating_func")
    biased = any(keys.has_tensor("exp_probs_b.bias", block) for block in range(keys.layers))
    scored = gating == _GATING_SIGMOID or (gating is None and biased)
    glm = keys.file.metadata.get("tokenizer.ggml.pre") == "glm4"
    found = body(keys, ("glm4_moe_lite" if glm else "deepseek_v3") if scored else "deepseek_v2")
    found |= sigmoid_experts(keys)
    found |= latent_sizes(keys)
    found["rope_parameters"] = keys.rope() | keys.mscale()
    if not scored:
        limited = found["n_group"] != 1
        found["topk_method"] = "group_limited_greedy" if limited else "greedy"
    return found


def _qwen3next(keys: Keys) -> dict[str, Any]:
    return qwen35_config(keys, "qwen3_next")


_LATENT_NAMES = ATTENTION | MLP | SIGMOID | LATENT
_KV_B = {"self_attn.kv_b_proj.weight": KV_B}
ARCHITECTURES: Mapping[str, Architecture] = {
    "arctic": Architecture(_arctic, ATTENTION | _ARCTIC, _PAIRED),
    "deepseek2": Architecture(_deepseek, _LATENT_NAMES, made=_KV_B, modules=BEHIND),
    "deepseek4": Architecture(deepseek4_config, DEEPSEEK4_NAMES, top=lambda _: DEEPSEEK4_TOP),
    "deepseek32": Architecture(v32_config, _LATENT_NAMES | INDEXER_NAMES, made=_KV_B),
    "dots1": Architecture(dots1_config, ATTENTION | MLP | SIGMOID),
    "ernie4_5-moe": Architecture(ernie_config, ERNIE_NAMES, made=ERNIE_MADE),
    "exaone-moe": Architecture(exaone_config, ATTENTION | MLP | SIGMOID),
    "gemma4": Architecture(gemma4_config, GEMMA4_NAMES),
    "glm-dsa": Architecture(glm_dsa_config, _LATENT_NAMES | INDEXER_NAMES, made=_KV_B),
    "glm4moe": Architecture(_glm4, ATTENTION | MLP | SIGMOID | AFTER, modules=BEHIND),
    "glm5-next": Architecture(glm5_next_config, GLM5_NEXT_NAMES, made=GLM5_NEXT_MADE),
    "gpt-oss": Architecture(
        _gpt_oss,
        {
            **ATTENTION,
            **AFTER,
            "ffn_gate_inp": "mlp.router",
            "attn_sinks.weight": "self_attn.sinks",
        },
    ),
    "granitemoe": Architecture(
        _granite,
        {
            **ATTENTION,
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            "ffn_down_shexp": "shared_mlp.output_linear",
        },
        _PAIRED,
        {"shared_mlp.input_linear.weight": _FUSED_SHARED},
    ),
    "granitehybrid": Architecture(
        granite_hybrid_config,
        GRANITE_HYBRID_NAMES,
        _PAIRED,
        {"shared_mlp.input_linear.weight": _FUSED_SHARED, **GRANITE_MAMBA},
    ),
    "hunyuan-moe": Architecture(hunyuan_config, HUNYUAN_NAMES),
    "kimi-linear": Architecture(_kimi_linear, _LATENT_NAMES | KIMI_NAMES, made=KIMI_MADE),
    "laguna": Architecture(laguna_config, LAGUNA_NAMES),
    "lfm2moe": Architecture(lfm2_config, LFM2_NAMES, made=LFM2_MADE),
    "llama": Architecture(
        _mixtral, {**ATTENTION, "ffn_gate_inp": "block_sparse_moe.gate"}, _PAIRED
    ),
    "mimo2": Architecture(
        _mimo, {**ATTENTION, **MLP, **SIGMOID, "attn_sinks.weight": "self_attn.sinks"}
    ),
    "minimax-m2": Architecture(minimax_config, MINIMAX_NAMES),
    "mistral4": Architecture(mistral4_config, _LATENT_NAMES, made=_KV_B),
    "nemotron_h_moe": Architecture(nemotron_config, NEMOTRON_NAMES, made=NEMOTRON_MAMBA),
    "olmoe": Architecture(_olmoe, ATTENTION | MLP),
    "phimoe": Architecture(_phimoe, {**ATTENTION, "ffn_gate_inp": "block_sparse_moe.gate"}),
    "qwen2moe": Architecture(_qwen2, ATTENTION | MLP | SHARED),
    "qwen35moe": Architecture(
        qwen35_config,
        ATTENTION | MLP | SHARED | AFTER | DELTA_NAMES,
        DELTA_MOVES,
        DELTA_MADE,
        centred=("output_norm.weight",),
        modules=IN_QWEN,
    ),
    "qwen3next": Architecture(
        _qwen3next,
        ATTENTION | MLP | SHARED | AFTER | NEXT_NAMES,
        made=NEXT_MADE,
        centred=("output_norm.weight",),
        modules=IN_QWEN,
    ),
    "qwen3moe": Architecture(_qwen3, ATTENTION | MLP),
    "qwen4exp": Architecture(
        qwen4_config,
        QWEN4_NAMES,
        DELTA_MOVES,
        QWEN4_MADE,
        qwen4_top,
        centred=("output_norm.weight", "output_hc_norm.weight"),
    ),
}
