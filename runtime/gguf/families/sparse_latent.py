"""The keys and names of latent attention with an indexer, and of Mistral's scaled queries."""

from __future__ import annotations

from typing import Any

from moeinf.runtime.gguf.families.usual import body, latent_sizes, sigmoid_experts
from moeinf.runtime.gguf.keys import Keys

_BETA = 0.1  # of Mistral Small 4 as published; llama.cpp's converter does not write it
INDEXER_NAMES = {
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
}


def v32_config(keys: Keys) -> dict[str, Any]:
    """Return config.json of DeepSeek-V3.2."""
    return _indexed(keys, "deepseek_v32")


def glm_dsa_config(keys: Keys) -> dict[str, Any]:
    """Return config.json of GLM-5, whose layers may use the indexer of an earlier one."""
    own = [keys.has_tensor("indexer.attn_k.weight", block) for block in range(keys.layers)]
    if isinstance(keys.get("attention.indexer.types"), list):
        own = [number > 0 for number in keys.of_layers("attention.indexer.types")]
    return _indexed(keys, "glm_moe_dsa") | {
        "indexer_types": ["full" if one else "shared" for one in own]
    }


def _indexed(keys: Keys, model_type: str) -> dict[str, Any]:
    return (
        body(keys, model_type)
        | sigmoid_experts(keys)
        | latent_sizes(keys)
        | {
            "rope_parameters": keys.rope() | keys.mscale(),
            "index_n_heads": keys.get("attention.indexer.head_count"),
            "index_head_dim": keys.get("attention.indexer.key_length"),
            "index_topk": keys.get("attention.indexer.top_k"),
        }
    )


def mistral4_config(keys: Keys) -> dict[str, Any]:
    """Return config.json of Mistral Small 4."""
    rope = keys.rope() | keys.mscale()
    beta, length = (keys.get(f"attention.temperature_{name}") for name in ("scale", "length"))
    rope["llama_4_scaling_beta"] = _BETA if beta is None else beta
    if length is not None:
        rope["original_max_position_embeddings"] = length
    return (
        body(keys, "mistral4")
        | sigmoid_experts(keys)
        | latent_sizes(keys)
        | {"rope_parameters": rope}
    )
