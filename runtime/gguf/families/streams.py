"""Models of several residual streams: DeepSeek-V4, GLM-5.3-Flash, Qwen3.8-Flash-Next.

A file of DeepSeek-V4 has a table of experts by token in integers. A file of Qwen3.8-Flash-Next has
the hash functions of its n-grams, where a config has the numbers that they are derived from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moeinf.models.layers.ngrams import Ngrams, NgramShape
from moeinf.runtime.gguf.families.delta_net import (
    DELTA_MADE,
    DELTA_NAMES,
    minus_one,
    plain_kernel,
    qwen35_config,
)
from moeinf.runtime.gguf.families.kimi_delta import KIMI_MADE, KIMI_NAMES, flat_rates
from moeinf.runtime.gguf.families.sparse_latent import INDEXER_NAMES
from moeinf.runtime.gguf.families.usual import (
    ATTENTION,
    LATENT,
    MLP,
    SHARED,
    SIGMOID,
    body,
    latent_sizes,
    sigmoid_experts,
)
from moeinf.runtime.gguf.keys import Keys
from moeinf.runtime.gguf.made import Made

_Sides = tuple[int, ...]
_HYPER_PARTS = ("fn", "base", "scale")
_HYPER = {
    f"hc_{half}_{part}.weight": f"{half}_hc.{part}"
    for half in ("attn", "ffn")
    for part in _HYPER_PARTS
}
DEEPSEEK4_NAMES = {
    "attn_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "attn_q_a": "attn.wq_a",
    "attn_q_a_norm": "attn.q_norm",
    "attn_q_b": "attn.wq_b",
    "attn_kv": "attn.wkv",
    "attn_kv_a_norm": "attn.kv_norm",
    "attn_output_a": "attn.wo_a",
    "attn_output_b": "attn.wo_b",
    "attn_sinks.weight": "attn.attn_sink",
    "attn_compressor_kv": "attn.compressor.wkv",
    "attn_compressor_gate": "attn.compressor.wgate",
    "attn_compressor_norm": "attn.compressor.norm",
    "attn_compressor_ape.weight": "attn.compressor.ape",
    "indexer.attn_q_b": "attn.indexer.wq_b",
    "indexer.proj": "attn.indexer.weights_proj",
    "indexer_compressor_kv": "attn.indexer.compressor.wkv",
    "indexer_compressor_gate": "attn.indexer.compressor.wgate",
    "indexer_compressor_norm": "attn.indexer.compressor.norm",
    "indexer_compressor_ape.weight": "attn.indexer.compressor.ape",
    "ffn_gate_inp": "ffn.gate",
    "ffn_gate_tid2eid.weight": "ffn.gate.tid2eid",
    "exp_probs_b.bias": "ffn.gate.e_score_correction_bias",
    "ffn_gate_shexp": "ffn.shared_experts.gate_proj",
    "ffn_up_shexp": "ffn.shared_experts.up_proj",
    "ffn_down_shexp": "ffn.shared_experts.down_proj",
    **_HYPER,
}
DEEPSEEK4_TOP = {f"output_hc_{part}.weight": f"model.hc_head.hc_{part}" for part in _HYPER_PARTS}
_POOL = "self_attn.indexer.index_kpool_compress"
GLM5_NEXT_NAMES = {
    **(ATTENTION | MLP | SIGMOID | LATENT | INDEXER_NAMES | KIMI_NAMES),
    **_HYPER,
    "indexer_compressor_ape.weight": f"{_POOL}_ape",
    "indexer_compressor_gate.weight": f"{_POOL}_gate",
}
GLM5_NEXT_MADE = KIMI_MADE | {"self_attn.A_log": Made(("ssm_a",), flat_rates)}
_MIXES = {"hc_attn": "attn_hyper_connection", "hc_ffn": "mlp_hyper_connection"}
_MIX_PARTS = {
    "down": "input_mix_weight_down",
    "up": "input_mix_weight_up",
    "inject": "block_inject_weight",
}
QWEN4_NAMES = {
    **(ATTENTION | MLP | SHARED | DELTA_NAMES),
    **{
        f"{mix}_{part}": f"{ours}.{word}"
        for mix, ours in _MIXES.items()
        for part, word in _MIX_PARTS.items()
    },
    "ple_key": "ple.key_proj",
    "ple_value": "ple.value_proj",
}
QWEN4_NORMS = {  # stored plus 1
    **{f"{mix}_norm": f"{ours}.hc_norm" for mix, ours in _MIXES.items()},
    **{f"ple_norm_{which}": f"ple.norm_{which}" for which in ("key", "query", "conv")},
    "indexer.q_norm": "self_attn.indexer.q_layernorm",
    "indexer.k_norm": "self_attn.indexer.k_layernorm",
}
_MIXER = "model.hyper_connection_mixer"
QWEN4_TOP = {
    "output_hc_norm.weight": f"{_MIXER}.hc_norm.weight",
    "output_hc_down.weight": f"{_MIXER}.input_mix_weight_down.weight",
    "output_hc_up.weight": f"{_MIXER}.input_mix_weight_up.weight",
}
QWEN4_TABLE = "per_layer_token_embd.weight"
_SEED, _MULTIPLE = 1234, 128  # of the published n-grams; a file has what follows from them
_MAX_ROWS, _MAX_HEADS, _MAX_NGRAM = 1 << 30, 1024, 16


def _joined(keys: Keys, queries: _Sides, key: _Sides) -> tuple[_Sides, Callable[..., Tensor]]:
    if len(queries) != 2 or len(key) != 2 or queries[1] != key[1]:
        raise keys.bad("has indexer.q_proj and indexer.k_proj of shapes that do not fit")
    return (queries[0] + key[0], key[1]), lambda *rows: torch.cat(rows)


QWEN4_MADE = {
    **DELTA_MADE,
    **{
        f"{ours}.weight": Made((f"{name}.weight",), minus_one) for name, ours in QWEN4_NORMS.items()
    },
    "self_attn.indexer.index_qk_proj.weight": Made(
        ("indexer.q_proj.weight", "indexer.k_proj.weight"), _joined, moves_rows=True
    ),
    "ple.conv1d.weight": Made(("ple_conv1d.weight",), plain_kernel),
}


def _hyper(keys: Keys) -> dict[str, Any]:
    """Return the sizes of hyper-connections, and the limit of SwiGLU that all layers have."""
    limits = keys.get("swiglu_clamp_exp"), keys.get("swiglu_clamp_shexp")
    found = {value for limit in limits if isinstance(limit, list) for value in limit}
    if len(found) > 1:
        raise keys.bad(f"has several limits in {keys.name}.swiglu_clamp_exp and _shexp")
    return {
        "hc_mult": keys.get("hyper_connection.count"),
        "hc_sinkhorn_iters": keys.get("hyper_connection.sinkhorn_iterations"),
        "hc_eps": keys.get("hyper_connection.epsilon"),
        "swiglu_limit": found.pop() if found else None,
    }


def _indexer(keys: Keys) -> dict[str, Any]:
    return {
        "index_n_heads": keys.get("attention.indexer.head_count"),
        "index_head_dim": keys.get("attention.indexer.key_length"),
        "index_topk": keys.get("attention.indexer.top_k"),
    }


def deepseek4_config(keys: Keys) -> dict[str, Any]:
    """Return config.json of DeepSeek-V4. The scaling of rope is that of layers that compress."""
    rope = keys.rope()
    return (
        body(keys, "deepseek_v4")
        | _hyper(keys)
        | _indexer(keys)
        | {
            "rope_parameters": None,
            "rope_scaling": {key: value for key, value in rope.items() if key != "rope_theta"},
            "rope_theta": rope["rope_theta"],
            "compress_rope_theta": keys.get("attention.compress_rope_freq_base"),
            "qk_rope_head_dim": keys.get("rope.dimension_count"),
            "q_lora_rank": keys.get("attention.q_lora_rank"),
            "o_groups": keys.get("attention.output_group_count"),
            "o_lora_rank": keys.get("attention.output_lora_rank"),
            "sliding_window": keys.get("attention.sliding_window"),
            "compress_ratios": keys.of_layers("attention.compress_ratios"),
            "num_hash_layers": keys.get("hash_layer_count") or 0,
            "n_routed_experts": keys.get("expert_count"),
            "n_shared_experts": keys.get("expert_shared_count"),
            "moe_intermediate_size": keys.get("expert_feed_forward_length"),
            "norm_topk_prob": keys.get("expert_weights_norm"),
            "routed_scaling_factor": keys.get("expert_weights_scale"),
        }
    )


def glm5_next_config(keys: Keys) -> dict[str, Any]:
    """Return config.json of GLM-5.3-Flash. A layer without key heads is Kimi Delta Attention."""
    full = [count > 0 for count in keys.of_layers("attention.head_count_kv")]
    own = [True] * keys.layers
    if isinstance(keys.get("attention.indexer.types"), list):
        own = [number > 0 for number in keys.of_layers("attention.indexer.types")]
    sparse = [keys.has_tensor("ffn_gate_inp.weight", block) for block in range(keys.layers)]
    return (
        body(keys, "glm5_next_text")
        | sigmoid_experts(keys)
        | latent_sizes(keys, rotates=False)
        | _hyper(keys)
        | _indexer(keys)
        | {
            "rope_parameters": None,
            "attention_bias": keys.side("attn_kv_a_mqa.bias", 0) is not None,
            "layer_types": ["full_attention" if one else "linear_attention" for one in full],
            "indexer_types": ["full" if one else "shared" for one in own],
            "mlp_layer_types": ["sparse" if one else "dense" for one in sparse],
            "index_kpool": keys.get("attention.indexer.kpool"),
            "index_kpool_always_select_tail": keys.get("attention.indexer.kpool_select_tail"),
            "linear_num_heads": keys.get("attention.head_count"),
            "linear_head_dim": keys.get("kda.head_dim"),
            "linear_conv_kernel_dim": keys.get("ssm.conv_kernel"),
            "linear_lower_bound": keys.get("kda.gate_lower_bound"),  # null has a meaning
        }
    )


def qwen4_config(keys: Keys) -> dict[str, Any]:
    """Return config.json of Qwen3.8-Flash-Next. llama.cpp knows one gate and one router."""
    return (
        qwen35_config(keys, "qwen4_exp_text")
        | {
            "norm_topk_prob": True,
            "output_gate_type": "sigmoid",
            "hc_count": keys.get("hyper_connection.count"),
            "hc_lowrank": keys.get("hyper_connection.low_rank"),
            "indexer_kv_heads": 1,
            "indexer_n_heads": keys.get("attention.indexer.head_count"),
            "indexer_head_dim": keys.get("attention.indexer.key_length"),
            "indexer_budget": keys.get("attention.indexer.top_k"),
            "indexer_compress_ratio": max(keys.of_layers("attention.compress_ratios")),
        }
        | _ngrams(keys)
    )


def _ngrams(keys: Keys) -> dict[str, Any]:
    """Return the numbers of the one layer with n-grams, from which its hash functions follow."""
    if keys.get("ple.layers") is None:
        return {"ple_layer_ids": []}
    shape = _ngram_shape(keys)
    hashes, end = Ngrams(shape, 0), keys.get("ple.eos_token_id")
    stored = keys.numbers("ple.layer_multipliers"), keys.numbers("ple.head_offsets")
    if (
        keys.numbers("ple.head_vocab_sizes") != hashes.sizes.tolist()
        or stored != (hashes.multipliers, hashes.starts.tolist())
        or hashes.rows != _table_rows(keys)
    ):
        raise keys.bad("has other hash functions of n-grams than Qwen3.8-Flash-Next")
    return {
        "ple_layer_ids": [number + 1 for number in keys.numbers("ple.layers")],
        "ple_embed_dim": shape.all_heads * keys.count("embedding_length_per_layer_input"),
        "ple_conv_kernel_size": keys.get("ple.conv_kernel"),
        "ngram_size": shape.size,
        "heads_per_ngram": shape.heads,
        "ngram_vocab_size_base": shape.least_rows,
        "make_ngram_vocab_size_divisible_by": shape.multiple,
        "seed": shape.seed,
        "eos_token_id": end,
    }


def _ngram_shape(keys: Keys) -> NgramShape:
    """Return the sizes of n-grams. Raises BadCheckpoint for those that no family has."""
    if len(keys.numbers("ple.layers")) != 1:
        raise keys.bad(f"has several layers in {keys.name}.ple.layers, where one is supported")
    size, heads = keys.count("ple.ngram_size"), keys.count("ple.heads_per_ngram")
    sizes, rows, end = (
        keys.numbers("ple.head_vocab_sizes"),
        _table_rows(keys),
        keys.get("ple.eos_token_id"),
    )
    if not 2 <= size <= _MAX_NGRAM or heads * (size - 1) > _MAX_HEADS or type(end) is not int:
        raise keys.bad(f"has invalid n-grams of {size} tokens and {heads} heads")
    count = heads * (size - 1)
    fits = len(sizes) == count and 0 < sizes[0] * count <= sum(sizes) <= rows <= _MAX_ROWS
    if not fits:  # so that few primes are looked for
        raise keys.bad(f"has {rows} rows of n-grams that do not fit {keys.name}.ple")
    padded = -(-sum(sizes) // _MULTIPLE) * _MULTIPLE
    multiple = _MULTIPLE if padded == rows else rows
    return NgramShape(size, heads, sizes[0], multiple, _SEED, keys.vocab, end)


def _table_rows(keys: Keys) -> int:
    table = keys.file.tensors.get(QWEN4_TABLE)
    if table is None or len(table.shape) != 2:
        raise keys.bad(f"lacks {QWEN4_TABLE}")
    return table.shape[0]


def qwen4_top(keys: Keys) -> dict[str, str]:
    """Return the names of tensors outside the blocks; the table belongs to a layer."""
    if keys.get("ple.layers") is None:
        return QWEN4_TOP
    (layer,) = keys.numbers("ple.layers")
    table = f"model.layers.{layer}.ple.ple_embedding.ngram_embedding.weight"
    return QWEN4_TOP | {QWEN4_TABLE: table}
