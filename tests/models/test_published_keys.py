"""Configs with the keys of published files say the same as transformers reads in them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from moeinf.models.base import ExpertPart, ModelDataError
from moeinf.models.families import FAMILIES, family_of
from tests.models.test_names import config_of
from tests.tiny import tiny_config

_DATA = Path(__file__).parents[1] / "data"
_CONFIGS: dict[str, dict[str, Any]] = json.loads((_DATA / "configs.json").read_text("utf-8"))
MIMO, DEEPSEEK_V4, KIMI, GLM, QWEN, PHI, HUNYUAN = (
    _CONFIGS[repo]
    for repo in (
        "XiaomiMiMo/MiMo-V2-Flash",
        "deepseek-ai/DeepSeek-V4-Flash",
        "moonshotai/Kimi-Linear-48B-A3B-Instruct",
        "zai-org/GLM-5.3-Flash",
        "Qwen/Qwen3.8-Flash-Next",
        "microsoft/Phi-3.5-MoE-instruct",
        "tencent/Hunyuan-A13B-Instruct",
    )
)


def as_transformers(published: dict[str, Any], config_class: str) -> dict[str, Any]:
    kind = getattr(transformers, config_class)
    return dict(kind.from_dict(copy.deepcopy(published)).to_dict())


@pytest.mark.parametrize(
    ("published", "config_class"),
    [(MIMO, "MiMoV2FlashConfig"), (KIMI, "KimiLinearConfig")],
    ids=["mimo", "kimi"],
)
def test_published_keys(published: dict[str, Any], config_class: str) -> None:
    theirs = as_transformers(published, config_class)
    family = family_of(published)
    assert family.parse(published) == family.parse(theirs)
    lists = ("layer_types", "mlp_layer_types", "rope_parameters")
    bare = {key: value for key, value in theirs.items() if key not in lists}
    assert family.parse(bare) == family.parse(published)


@pytest.mark.parametrize(
    ("published", "config_class"),
    [(GLM, "Glm5NextTextConfig"), (QWEN, "Qwen4ExpTextConfig")],
    ids=["glm", "qwen"],
)
def test_published_text_parts(published: dict[str, Any], config_class: str) -> None:
    """Words that transformers renames at reading, such as deepseek_sparse_attention, are known."""
    family, text = family_of(published), published["text_config"]
    theirs = as_transformers(text, config_class)
    assert {"indexed_attention", "linear_attention"} == set(theirs["layer_types"])
    assert family.parse({**text, "tie_word_embeddings": False}) == family.parse(theirs)


@pytest.mark.parametrize(
    ("published", "config_class"),
    [(PHI, "PhimoeConfig"), (HUNYUAN, "HunYuanMoEV1Config")],
    ids=["phimoe", "hunyuan"],
)
def test_whole_files(published: dict[str, Any], config_class: str) -> None:
    family = family_of(published)
    assert family.parse(published) == family.parse(as_transformers(published, config_class))


def test_phi_3_5_moe() -> None:
    rope = family_of(PHI).parse(PHI).body.rope
    assert (len(rope.short), len(rope.long), rope.original_context) == (64, 64, 4096)
    assert (rope.short[-1], rope.long[-1]) == (2.7899999618530273, 64.95999908447266)
    assert rope.short_mscale == rope.long_mscale == 1.243163121016122


def test_hunyuan_a13bs_first_model_type() -> None:
    """Hunyuan-Large has the same model_type and another architecture."""
    assert HUNYUAN["model_type"] == "hunyuan"
    assert family_of(HUNYUAN) is FAMILIES["hunyuan_v1_moe"]
    for classes in (["HunYuanForCausalLM"], "HunYuanMoEV1ForCausalLM", [["x"]], None):
        with pytest.raises(ModelDataError, match="model_type 'hunyuan' is not supported"):
            family_of({**HUNYUAN, "architectures": classes})
    config = family_of(HUNYUAN).parse(HUNYUAN)
    assert (config.moe.experts, config.moe.top_k, config.moe.layers) == (64, 8, 32)
    assert (config.body.rope.kind, config.body.rope.alpha) == ("default", 1000.0)


def test_glm_5_3_flash() -> None:
    config = family_of(GLM).parse(GLM)
    assert config.full == tuple(range(3, 45, 4)) == config.indexed
    assert (config.indexer.pool, config.indexer.top, config.indexer.heads) == (4, 2048, 32)
    assert (config.moe.experts, config.moe.top_k, config.moe.layers) == (288, 8, 42)
    assert (config.forgetting.bound, config.hyper.streams) == (-5.0, 4)


def test_qwen_3_8_flash_next() -> None:
    config = family_of(QWEN).parse(QWEN)
    assert (config.full, config.ngram_layers) == (tuple(range(3, 48, 4)), (1,))
    assert (config.moe.experts, config.moe.top_k, config.output_gate) == (512, 10, "sigmoid")
    assert config.ngrams is not None
    assert (config.ngrams.ngrams.size, config.ngrams.ngrams.all_heads) == (3, 16)
    assert (config.index.top * config.index.block, config.streams.rank) == (2048, 320)


def test_deepseek_v4_flash() -> None:
    """Facts of the published file: 43 layers, of which the first two have no compressor."""
    config = family_of(DEEPSEEK_V4).parse(DEEPSEEK_V4)
    theirs = as_transformers(DEEPSEEK_V4, "DeepseekV4Config")
    assert family_of(DEEPSEEK_V4).parse(theirs) == config
    assert [len(config.pools(layer)) for layer in range(6)] == [0, 0, 2, 1, 2, 1]
    assert [pool.rate for layer in (2, 3) for pool in config.pools(layer)] == [4, 4, 128]
    assert (len(config.kinds), config.hashed) == (43, (0, 1, 2))
    assert (config.moe.experts, config.moe.top_k, config.scale) == (256, 6, 1.5)
    shape, compress = config.attention, config.compress_rope
    assert (shape.head_dim, shape.rope, shape.window) == (512, 64, 128)
    assert (config.body.rope.theta, config.body.rope.kind) == (1e4, "default")
    assert (compress.theta, compress.kind, compress.factor) == (1.6e5, "yarn", 16)
    assert compress.attention_factor == 1.0


def test_deepseek_v4s_names() -> None:
    """Published names; transformers writes some of them with another beginning."""
    family, config = config_of("deepseek-v4")
    for start in ("", "model."):
        part = family.expert(f"{start}layers.1.ffn.experts.6.w3.weight", config)
        assert part == ExpertPart(1, 6, "up")
        assert family.rename(f"{start}layers.0.hc_attn_fn") == "model.layers.0.attn_hc.fn"
        assert family.rename(f"{start}norm.weight") == "model.norm.weight"
    assert family.rename("hc_head_scale") == "model.hc_head.hc_scale"
    assert family.rename("head.weight") == "lm_head.weight"
    assert family.rename("layers.1.attn.kv_norm.weight") == "model.layers.1.attn.kv_norm.weight"
    assert family.ignores("mtp.0.ffn.experts.0.w1.weight", config)
    assert family.expert("mtp.0.ffn.experts.0.w1.weight", config) is None


def test_mimo_has_keys_of_its_own() -> None:
    config = family_of(MIMO).parse(MIMO)
    shapes = [(one.kv_heads, one.head_dim, one.value_width) for one in config.attention]
    assert shapes[:2] == [(4, 192, 128), (8, 192, 128)]
    windows = [layer for layer, one in enumerate(config.attention) if one.window is not None]
    assert windows == [layer for layer in range(48) if MIMO["hybrid_layer_pattern"][layer]]
    assert config.attention[1].window == 129  # the token itself, and 128 before it
    own = family_of(MIMO).parse({
        **MIMO,
        "hybrid_layer_pattern": [1] + [0] * 47,
        "moe_layer_freq": [1, 0] * 24,
        "swa_num_key_value_heads": 16,
        "swa_rope_theta": 77,
        "rope_theta": 99,
        "partial_rotary_factor": 0.5,
        "layernorm_epsilon": 0.25,
        "add_full_attention_sink_bias": True,
    })  # fmt: skip
    assert [one.kv_heads for one in own.attention] == [16] + [4] * 47
    assert own.ffn.plan.sparse_layers == tuple(range(0, 48, 2))
    assert (own.sliding_rope.theta, own.body.rope.theta) == (77, 99)
    assert own.body.rope.turning(192) == 96
    assert own.body.norm_eps == 0.25
    assert own.sinks == (True, True)


def test_mimos_names() -> None:
    family, config = config_of("mimo")
    part = family.expert("model.layers.1.mlp.experts.6.up_proj.weight", config)
    assert part == ExpertPart(0, 6, "up")
    stored = "model.layers.1.self_attn.attention_sink_bias"
    assert family.rename(stored) == "model.layers.1.self_attn.sinks"
    aside = "model.mtp.layers.0.mlp.experts.0.up_proj.weight"
    assert family.ignores(aside, config)
    assert family.expert(aside, config) is None


def test_kimis_names() -> None:
    """The dense layer is called as in published files, and as transformers writes it."""
    family, config = config_of("kimi-linear")
    experts = "model.layers.{}.block_sparse_moe.experts.7.w3.weight"
    assert family.expert(experts.format(3), config) == ExpertPart(2, 7, "up")
    for word in ("mlp", "block_sparse_moe"):
        name = f"model.layers.0.{word}.gate_proj.weight"
        assert family.rename(name) == "model.layers.0.mlp.gate_proj.weight"


def test_kimis_layers_by_number() -> None:
    values = dict(tiny_config("kimi-linear").to_dict())
    inner = {
        "full_attn_layers": [2],
        "kda_layers": [1, 3, 4],
        "num_heads": 5,
        "head_dim": 14,
        "short_conv_kernel_size": 3,
    }
    config = family_of(values).parse({**values, "layer_types": None, "linear_attn_config": inner})
    assert config.full == (1,)
    assert (config.delta.value_heads, config.delta.key_dim, config.delta.kernel) == (5, 14, 3)


@pytest.mark.parametrize(
    ("outer", "inner", "bound"),
    [
        ({}, {"gate_lower_bound": -3.0}, -3.0),
        ({"linear_lower_bound": -2.0}, {"num_heads": 4}, -2.0),
        ({"linear_lower_bound": None}, {"num_heads": 4}, -5.0),  # safe_gate
        ({"linear_lower_bound": None}, {"safe_gate": False}, None),
        ({"linear_lower_bound": None}, None, None),
    ],
)
def test_glms_bound_of_decays(outer: Any, inner: Any, bound: float | None) -> None:
    """The values that transformers reads; also inside the config of a model that sees."""
    text = {**tiny_config("glm5-next").to_dict(), **outer}
    if inner is not None:
        text["linear_attn_config"] = inner
    family = FAMILIES["glm5_next"]
    assert family.parse(text).forgetting.bound == bound
    whole = {"model_type": "glm5_next", "text_config": text, "tie_word_embeddings": True}
    assert family.parse(whole).forgetting.bound == bound
    assert family.parse(whole).body.tied_embeddings
    theirs = transformers.Glm5NextTextConfig(**{**text, "model_type": "glm5_next_text"})
    assert theirs.linear_lower_bound == bound


def test_glms_names() -> None:
    """With the vision part and without it; unused tensors of the last layer and of indexers."""
    family, config = config_of("glm5-next")
    for inside in ("language_model.", ""):
        prefix = f"model.{inside}layers"
        part = family.expert(f"{prefix}.2.mlp.experts.7.up_proj.weight", config)
        assert part == ExpertPart(1, 7, "up")
        assert family.rename(f"{prefix}.2.hc_ffn_base") == "model.layers.2.ffn_hc.base"
        for aside in ("self_attn.q_proj.weight", "mlp.experts.0.up_proj.weight", "eh_proj.weight"):
            assert family.ignores(f"{prefix}.4.{aside}", config)
            assert family.expert(f"{prefix}.4.{aside}", config) is None
    assert family.ignores("model.visual.blocks.0.attn.proj.weight", config)
    family, config = config_of("glm5-next-shared")
    name = "model.language_model.layers.{}.self_attn.indexer.wk.weight"
    assert [family.ignores(name.format(layer), config) for layer in range(3)] == [
        False,
        True,
        False,
    ]
