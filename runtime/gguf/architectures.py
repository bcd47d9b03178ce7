"""The architectures of GGUF files that we have a family for, as an explicit table.

The names of keys and tensors, and what llama.cpp changes in a tensor, are those of its converter
(convert_hf_to_gguf.py and conversion/).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from moeinf.runtime.gguf.keys import Keys
from moeinf.runtime.gguf.rows import unpaired

Change = Callable[[Keys], Callable[[Tensor], Tensor]]  # of the rows of one tensor

# GGUF's name inside a block -> the name inside a layer. A `.weight` or `.bias` stays.
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
}
_MLP = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_SPARSE = {"ffn_gate_inp": "block_sparse_moe.gate"}
_PAIRED: dict[str, Change] = {  # rows of Q and K in pairs, for llama.cpp's other kind of rope
    "attn_q": lambda keys: unpaired(keys.count("attention.head_count")),
    "attn_k": lambda keys: unpaired(keys.kv_heads),
}


@dataclass(frozen=True)
class Made:
    """How a tensor is made of stored ones, with the names inside a block.

    how takes the metadata and the parts' shapes, and returns the tensor's shape and the function
    that makes its values. Raises BadCheckpoint for parts that do not fit.
    """

    parts: tuple[str, ...]
    how: Callable[..., tuple[tuple[int, ...], Callable[..., Tensor]]]


@dataclass(frozen=True)
class Architecture:
    """What a GGUF architecture is called and how it is stored.

    config  metadata -> config.json of our family, without tie_word_embeddings
    names   name inside a block -> name inside model.layers.N
    moves   name inside a block -> the function that restores the order of its rows
    made    name inside model.layers.N -> how it is made of tensors of the block
    """

    config: Callable[[Keys], dict[str, Any]]
    names: Mapping[str, str]
    moves: Mapping[str, Change] = field(default_factory=dict)
    made: Mapping[str, Made] = field(default_factory=dict)

    @property
    def used(self) -> frozenset[str]:
        """The names inside a block of tensors that others are made of."""
        return frozenset(part for made in self.made.values() for part in made.parts)


def _body(keys: Keys, model_type: str) -> dict[str, Any]:
    """Return the values that all decoders have."""
    return {
        "model_type": model_type,
        "vocab_size": keys.vocab,
        "hidden_size": keys.get("embedding_length"),
        "num_hidden_layers": keys.layers,
        "num_attention_heads": keys.get("attention.head_count"),
        "num_key_value_heads": keys.kv_heads,
        "head_dim": keys.get("attention.key_length"),
        "max_position_embeddings": keys.get("context_length"),
        "rms_norm_eps": keys.get("attention.layer_norm_rms_epsilon"),
        "rope_parameters": keys.rope(),
        "attention_bias": keys.has_tensor("attn_q.bias"),
        "num_experts_per_tok": keys.get("expert_used_count"),
    }


def _olmoe(keys: Keys) -> dict[str, Any]:
    return _body(keys, "olmoe") | {
        "intermediate_size": keys.get("feed_forward_length"),
        "num_experts": keys.get("expert_count"),
        "clip_qkv": keys.get("attention.clamp_kqv"),
        "norm_topk_prob": False,  # llama.cpp knows no other
    }


ARCHITECTURES: Mapping[str, Architecture] = {
    "olmoe": Architecture(_olmoe, _ATTENTION | _MLP),
}
