"""Models with random weights that llama.cpp can run, pulled and exported as GGUF.

Their rows are whole groups of 256, so llama.cpp can quantise them to any of its types.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.hub.resolve import find_source
from moeinf.runtime.jobs.export_gguf import Exported, export_gguf
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.library.repacking.repack import repack
from moeinf.runtime.sizes import parse_memory
from tests import tiny_families
from tests.conftest import ignore, pull
from tests.steady import steady
from tests.tiny import save_tiny
from tests.tiny_deepseek_v4 import deepseek_v4
from tests.tiny_families import Tiny
from tests.tiny_glm5 import glm5_next
from tests.tiny_mxfp4 import save_mxfp4

CONTEXT = 512
_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "vocab_size": 272,  # the demo's tokenizer
}
_DEEPSEEK = {
    **{key: _SIZES[key] for key in _SIZES if key != "num_key_value_heads"},
    "moe_intermediate_size": 256,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "num_hidden_layers": 3,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GPT_OSS = {
    **_SIZES,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "sliding_window": 17,
}
FAMILIES: dict[str, Tiny] = {
    "olmoe": tiny_families.olmoe(**_SIZES),
    "olmoe-yarn": tiny_families.olmoe(
        **_SIZES, rope_parameters={**tiny_families.YARN, "factor": 5.0}, tie_word_embeddings=True
    ),
    "qwen3": tiny_families.qwen3(**_SIZES, moe_intermediate_size=256, head_dim=32),
    "qwen3-grouped": tiny_families.qwen3(
        **{**_SIZES, "num_key_value_heads": 2},
        moe_intermediate_size=256,
        head_dim=128,
        tie_word_embeddings=True,
        rope_parameters={**tiny_families.YARN, "factor": 4.0, "attention_factor": 0.8},
    ),
    "mixtral": tiny_families.mixtral(**{**_SIZES, "num_key_value_heads": 2}),
    "mixtral-linear": tiny_families.mixtral(
        **{**_SIZES, "num_attention_heads": 2, "num_key_value_heads": 1},
        head_dim=128,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    ),
    "gpt-oss": tiny_families.gpt_oss(
        **{**_GPT_OSS, "max_position_embeddings": 131072},
        rope_parameters={  # as published
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    ),
    "gpt-oss-rounded": tiny_families.gpt_oss(
        **_GPT_OSS, rope_parameters={**tiny_families.YARN, "factor": 8.0}
    ),
    "qwen2": tiny_families.qwen2(
        **{**_SIZES, "num_key_value_heads": 2},
        moe_intermediate_size=256,
        shared_expert_intermediate_size=512,
    ),
    "deepseek-lite": tiny_families.deepseek(
        **_DEEPSEEK,
        q_lora_rank=None,
        first_k_dense_replace=1,
        n_shared_experts=2,
        rope_parameters={
            **tiny_families.YARN,
            "factor": 40.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
    ),
    "deepseek": tiny_families.deepseek(
        **_DEEPSEEK,
        q_lora_rank=256,
        first_k_dense_replace=0,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
        tie_word_embeddings=True,
    ),
    "deepseek-v3": tiny_families.deepseek_v3(
        **{**_DEEPSEEK, "num_key_value_heads": 4, "q_lora_rank": 256},
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        rope_parameters={
            **tiny_families.YARN,
            "factor": 40.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    ),
    "granite": tiny_families.granite(
        **{**_SIZES, "num_key_value_heads": 2},
        embedding_multiplier=1.5,
        logits_scaling=0.7,
        residual_multiplier=0.6,
    ),
    "glm4": tiny_families.glm4(
        **{**_SIZES, "num_key_value_heads": 2, "num_hidden_layers": 3},
        moe_intermediate_size=256,
        n_routed_experts=8,
        head_dim=64,
        attention_bias=True,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
    ),
    "glm4-head-norms": tiny_families.glm4(
        **{**_SIZES, "num_key_value_heads": 2, "num_hidden_layers": 3},
        moe_intermediate_size=256,
        head_dim=64,
        partial_rotary_factor=0.75,
        use_qk_norm=True,
        first_k_dense_replace=2,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        n_shared_experts=2,
        tie_word_embeddings=True,
    ),
    "granite-shared": tiny_families.granite_shared(
        **{**_SIZES, "num_key_value_heads": 2},
        shared_intermediate_size=512,
        embedding_multiplier=1.5,
        logits_scaling=0.7,
        residual_multiplier=0.6,
        rope_parameters=_LLAMA3,
    ),
    "mixtral-llama3": tiny_families.mixtral(
        **{**_SIZES, "num_key_value_heads": 2}, rope_parameters=_LLAMA3
    ),
    "arctic": tiny_families.arctic(**{**_SIZES, "num_key_value_heads": 2}),
    "phimoe": tiny_families.phimoe(
        **{**_SIZES, "num_key_value_heads": 2},
        attention_bias=True,
        lm_head_bias=True,
        router_jitter_noise=0.01,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "original_max_position_embeddings": 256,
            "short_factor": [1 + 0.02 * pair for pair in range(32)],
            "long_factor": [1 + 0.4 * pair for pair in range(32)],
            "short_mscale": 1.2,
            "long_mscale": 1.2,
        },
    ),
    "qwen3.5": tiny_families.qwen35(
        **{**_SIZES, "num_key_value_heads": 2, "num_hidden_layers": 4},
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        moe_intermediate_size=256,
        shared_expert_intermediate_size=256,
    ),
    "qwen3.5-narrow": tiny_families.qwen35(
        **{**_SIZES, "num_key_value_heads": 1, "num_hidden_layers": 3},
        head_dim=128,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        linear_num_key_heads=4,
        linear_num_value_heads=16,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        moe_intermediate_size=256,
        shared_expert_intermediate_size=256,
        tie_word_embeddings=True,
    ),
    "glm4-lite": tiny_families.glm4_lite(
        **{**_DEEPSEEK, "num_key_value_heads": 4, "q_lora_rank": 256},
        n_group=4,
        topk_group=2,
    ),
}
STREAMS: dict[str, Tiny] = {  # of several residual streams, as llama.cpp can run them
    "glm5-next": glm5_next(vocab_size=272, linear_num_heads=3),
    "deepseek-v4": deepseek_v4(
        heavy=128,
        vocab_size=272,
        index_head_dim=64,  # llama.cpp rotates 64 channels at least
        rope_parameters={**tiny_families.YARN, "factor": 4.0},
        tie_word_embeddings=True,
    ),
    "qwen4": tiny_families.qwen4(  # blocks of one token: llama.cpp fills larger ones up
        vocab_size=272,
        ple_embed_dim=36,
        output_gate_type="sigmoid",
        linear_value_head_dim=6,
        indexer_n_heads=24,  # so that no scores are equal: all heads at 0
        indexer_budget=12,
        indexer_compress_ratio=1,
    ),
    "qwen4-alone": tiny_families.qwen4(
        vocab_size=272,
        ple_layer_ids=None,
        output_gate_type="sigmoid",
        linear_value_head_dim=6,
        indexer_budget=200,
        hc_count=3,
        tie_word_embeddings=True,
    ),
}


@dataclass(frozen=True)
class Model:
    """An installed model and its file. made: as `exported` wrote it."""

    settings: Settings
    manifest: Manifest
    file: Path
    made: Exported

    def engine(self, context: int = CONTEXT) -> Engine:
        """Open the model with all experts in memory and room for `context` tokens."""
        folder = Library(self.settings).folder(self.manifest.model)
        config = EngineConfig(memory=parse_memory("100%"), context=context)
        return Engine.open(self.manifest, folder, config, self.settings)

    def pulled(self, file: Path, tag: str | None = None) -> Model:
        """Pull a GGUF file into the same library, as `tag` or as the types in it say."""
        wanted = file.stem.lower() + (f":{tag}" if tag else "")
        name, source = find_source(str(file), wanted, self.settings, ignore)
        manifest = repack(source, Library(self.settings), name, ignore, ignore)
        return Model(self.settings, manifest, file, self.made)


def checkpoint(name: str, folder: Path, mxfp4: bool = False) -> Path:
    """Write a checkpoint of FAMILIES[name] with the demo's tokenizer.

    mxfp4: its experts are blocks, as in gpt-oss.
    """
    if mxfp4:
        save_mxfp4(folder, FAMILIES[name])
    else:
        tiny = FAMILIES[name]
        save_tiny(tiny, folder, seed=3, change=lambda model: steady(model, tiny.family))
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO_CHECKPOINT / file, folder)
    return folder


def exported(checkpoint: Path, folder: Path, tag: str) -> Model:
    """Pull a checkpoint as `tag` and export it."""
    settings, file = Settings(folder / "home"), folder / f"{tag}.gguf"
    manifest = pull(checkpoint, settings, f"tiny:{tag}")
    where = Library(settings).folder(manifest.model)
    made = export_gguf(where, manifest, file, ignore, ignore, force=False)
    return Model(settings, manifest, file, made)
