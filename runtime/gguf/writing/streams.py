"""Describe models of several residual streams: DeepSeek-V4, GLM-5.3-Flash, Qwen3.8-Flash-Next."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moeinf.models.deepseek_v4 import DeepseekV4Config
from moeinf.models.glm5_next import Glm5NextConfig
from moeinf.models.layers.block_indexer import BlockIndexShape
from moeinf.models.layers.hyper_block import HyperShape
from moeinf.models.layers.ngrams import Ngrams
from moeinf.models.qwen4_exp import Qwen4ExpConfig
from moeinf.runtime.gguf.architectures import ARCHITECTURES
from moeinf.runtime.gguf.families.streams import (
    DEEPSEEK4_TOP,
    QWEN4_NORMS,
    QWEN4_TABLE,
    QWEN4_TOP,
)
from moeinf.runtime.gguf.writing.delta_net import plus_one, qwen35
from moeinf.runtime.gguf.writing.description import (
    Make,
    Place,
    Shape,
    Written,
    ffn_sizes,
    flags,
    refuse,
    rope_keys,
    rounding,
    scattered,
    sizes,
)
from moeinf.runtime.gguf.writing.latent import kimi_tensors, mla_keys, split_kv_b
from moeinf.runtime.gguf.writing.sigmoid import sigmoid_keys
from moeinf.runtime.gguf.writing.writer import Value

_STREAMS = 4  # the only number that llama.cpp's graphs of hyper-connections take
_RATIOS = {  # tokens per entry that llama.cpp has for the kinds of DeepSeek-V4's layers
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}
_SQRT_SOFTPLUS = 4  # of expert_gating_func
_LIMIT = 10.0  # of SwiGLU, in models/layers/ffn.py


def deepseek_v4(config: DeepseekV4Config) -> Written:
    """Describe DeepSeek-V4. Its layers with a compressor have a rope of their own."""
    body, shape, moe, rope = config.body, config.attention, config.moe, config.compress_rope
    ratios = [_RATIOS[kind] for kind in config.kinds]
    others = any(config.rates.get(kind, 0) != _RATIOS[kind] for kind in config.kinds)
    refuse(
        "deepseek_v4",
        {
            **_streams_refused(config.hyper),
            "compress_rates other than 4 and 128": others,
            "hash_moe behind moe": config.hashed != tuple(range(len(config.hashed))),
            "a rope scaling of layers without a compressor": body.rope.kind != "default",
            "an attention factor": rope.kind == "yarn" and rope.attention_factor != 1,
        },
    )
    keys = rope_keys("deepseek_v4", replace(rope, attention_factor=None), shape.rope)
    keys["rope.freq_base"] = float(body.rope.theta)
    return Written(
        "deepseek4",
        sizes(body, moe)
        | keys
        | _stream_keys(config.hyper)
        | _limits(body.layers)
        | {
            "attention.head_count_kv": 1,
            "attention.key_length": shape.head_dim,
            "attention.value_length": shape.head_dim,
            "attention.q_lora_rank": shape.q_lora,
            "attention.sliding_window": shape.window,
            "attention.output_group_count": shape.groups,
            "attention.output_lora_rank": shape.o_lora,
            "attention.compress_ratios": np.array(ratios, "<i4"),
            "attention.compress_rope_freq_base": float(rope.theta),
            "attention.indexer.head_count": config.scorer.heads,
            "attention.indexer.key_length": config.scorer.width,
            "attention.indexer.top_k": config.scorer.top,
            "hash_layer_count": len(config.hashed),
            "embedding_length_out": config.hyper.streams * body.hidden,
            "expert_feed_forward_length": moe.intermediate,
            "expert_shared_count": 1,
            "expert_weights_scale": float(config.scale),
            "expert_weights_norm": True,
            "expert_gating_func": _SQRT_SOFTPLUS,
        },
        range(body.layers),
        copies_embedding=body.tied_embeddings,
        made={
            **{ours: _plain(name) for name, ours in DEEPSEEK4_TOP.items()},
            "attn.compressor.ape": _plain("attn_compressor_ape.weight"),
            "attn.indexer.compressor.ape": _plain("indexer_compressor_ape.weight"),
            "ffn.gate.tid2eid": lambda sides: (
                Place("ffn_gate_tid2eid.weight", sides, integers=True),
            ),
        },
        notes=rounding(rope),
    )


def glm5_next(config: Glm5NextConfig) -> Written:
    """Describe GLM-5.3-Flash. A layer without key heads is Kimi Delta Attention."""
    body, shape, ffn, delta = config.body, config.attention, config.ffn, config.delta
    refuse(
        "glm5_next",
        {
            **_streams_refused(config.hyper),
            "attention_bias": shape.bias,
            "linear_num_heads": delta.key_heads != body.heads,
            "index_kpool = 1": config.indexer.pool == 1,
            "n_shared_experts = 0": not ffn.shared_experts,
            "dense layers behind those with experts": scattered(ffn.plan, body),
        },
    )
    assert shape.q_lora is not None
    keys: dict[str, Value] = {}
    if config.forgetting.bound is not None:
        keys["kda.gate_lower_bound"] = float(config.forgetting.bound)
    pool = "self_attn.indexer.index_kpool_compress"
    return Written(
        "glm5-next",
        sizes(body, ffn.plan.moe)
        | keys
        | mla_keys(shape)
        | ffn_sizes(ffn.plan)
        | sigmoid_keys(ffn)
        | _stream_keys(config.hyper)
        | _limits(body.layers)
        | {
            "attention.head_count_kv": flags(layer in config.full for layer in range(body.layers)),
            "attention.q_lora_rank": shape.q_lora,
            "attention.layer_norm_epsilon": 1e-6,  # of the indexer's keys
            "attention.indexer.head_count": config.indexer.heads,
            "attention.indexer.key_length": config.indexer.width,
            "attention.indexer.top_k": config.indexer.top,
            "attention.indexer.kpool": config.indexer.pool,
            "attention.indexer.kpool_select_tail": True,
            "attention.indexer.types": flags(
                layer in config.indexed or layer not in config.full for layer in range(body.layers)
            ),
            "rope.dimension_count": 0,
            "ssm.conv_kernel": delta.kernel,
            "kda.head_dim": delta.key_dim,
            "expert_shared_count": ffn.shared_experts,
        },
        ffn.plan.sparse_layers,
        copies_embedding=body.tied_embeddings,
        made=split_kv_b(shape)
        | kimi_tensors((delta.key_heads,))
        | {
            f"{pool}_ape": _plain("indexer_compressor_ape.weight"),
            f"{pool}_gate": _plain("indexer_compressor_gate.weight"),
        },
    )


def qwen4(config: Qwen4ExpConfig) -> Written:
    """Describe Qwen3.8-Flash-Next, of which llama.cpp takes one layer with n-grams."""
    body, index, ngrams = config.body, config.index, config.ngrams
    refuse(
        "qwen4_exp",
        {
            f"output_gate_type = {config.output_gate}": config.output_gate != "sigmoid",
            "norm_topk_prob = false": not config.renormalise,
            "more than one of ple_layer_ids": len(config.ngram_layers) > 1,
            "ple_embed_dim": ngrams is not None and ngrams.width != body.hidden,
        },
    )
    about = qwen35(config, "qwen4_exp")
    keys: dict[str, Value] = {
        "hyper_connection.count": config.streams.streams,
        "hyper_connection.low_rank": config.streams.rank,
        "attention.indexer.head_count": index.heads,
        "attention.indexer.key_length": index.width,
        "attention.indexer.top_k": index.top * index.block,
        "attention.compress_ratios": np.array(
            [index.block * (layer in config.full) for layer in range(body.layers)], "<i4"
        ),
    }
    tables: dict[str, str] = {}
    if ngrams is not None:
        (layer,), shape = config.ngram_layers, ngrams.ngrams
        hashes = Ngrams(shape, 0)
        keys |= {
            "ple.layers": np.array([layer], "<i4"),
            "ple.ngram_size": shape.size,
            "ple.heads_per_ngram": shape.heads,
            "ple.conv_kernel": ngrams.kernel,
            "ple.eos_token_id": shape.end,
            "ple.layer_multipliers": np.array(hashes.multipliers, "<u8"),
            "ple.head_offsets": hashes.starts.numpy().astype("<u8"),
            "ple.head_vocab_sizes": hashes.sizes.numpy().astype("<u8"),
            "embedding_length_per_layer_input": ngrams.width // shape.all_heads,
        }
        name = f"{config.name_prefix}layers.{layer}.ple.ple_embedding.ngram_embedding"
        tables[name] = QWEN4_TABLE
    return replace(
        about,
        architecture="qwen4exp",
        keys={**about.keys, **keys},
        made={
            **about.made,
            **{f"{ours}.weight": plus_one(f"{name}.weight") for name, ours in QWEN4_NORMS.items()},
            **{ours: _top(name) for name, ours in QWEN4_TOP.items()},
            "self_attn.indexer.index_qk_proj.weight": _queries_and_key(index.heads * index.width),
            "ple.conv1d.weight": lambda sides: (
                Place("ple_conv1d.weight", (sides[0], sides[-1]), exact=True),
            ),
        },
        tables=tables,
        notes=(*about.notes, *_more_keys(index, body.max_context)),
    )


def _more_keys(index: BlockIndexShape, context: int) -> tuple[str, ...]:
    """Return a note where llama.cpp attends to more tokens: it fills the place of a short tail."""
    if index.block == 1 or context <= index.dense:
        return ()
    return (
        f"llama.cpp attends to up to {index.block - 1} tokens more in texts of over {index.dense} "
        "tokens: logits differ a little there",
    )


def _streams_refused(shape: HyperShape) -> dict[str, bool]:
    return {f"hc_mult = {shape.streams}": shape.streams != _STREAMS}


def _stream_keys(shape: HyperShape) -> dict[str, Value]:
    return {
        "hyper_connection.count": shape.streams,
        "hyper_connection.sinkhorn_iterations": shape.iterations,
        "hyper_connection.epsilon": float(shape.eps),
    }


def _limits(layers: int) -> dict[str, Value]:
    limits = np.full(layers, _LIMIT, "<f4")
    return {"swiglu_clamp_exp": limits, "swiglu_clamp_shexp": limits}


def _plain(to: str) -> Make:
    """Return a tensor's place in float32 under another name."""
    return lambda sides: (Place(to, sides, exact=True),)


def _top(name: str) -> Make:
    """Return the place of a tensor outside the blocks: norms are stored plus 1."""
    if name in ARCHITECTURES["qwen4exp"].centred:
        return plus_one(name)
    return lambda sides: (Place(name, sides),)


def _queries_and_key(rows: int) -> Make:
    """Split the rows of an indexer's queries from those of its key."""

    def make(sides: Shape) -> tuple[Place, ...]:
        rest = sides[0] - rows
        return (
            Place("indexer.q_proj.weight", (rows, sides[1]), change=lambda found: found[:rows]),
            Place("indexer.k_proj.weight", (rest, sides[1]), change=lambda found: found[rows:]),
        )

    return make
