"""Test hostile config.json values: each raises a ModelDataError that names its key."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeinf.models.base import ModelDataError
from moeinf.models.config import Fields
from moeinf.models.families import FAMILIES, family_of
from tests.encoder_decoders import PAIRS
from tests.tiny import TINY, tiny_config

CONFIGS: dict[str, dict[str, Any]] = {name: tiny_config(name).to_dict() for name in TINY}

_LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0],
    "original_max_position_embeddings": 64,
    "short_mscale": 1.0,
    "long_mscale": 1.0,
}
_SIZES = {
    "mixtral": ["num_key_value_heads", "intermediate_size", "num_local_experts"],
    "olmoe": ["num_key_value_heads", "intermediate_size", "num_experts"],
    "qwen3-sparse-step": [
        *("num_key_value_heads", "intermediate_size", "moe_intermediate_size", "head_dim"),
        "decoder_sparse_step",
    ],
    "deepseek-groups": [
        *("moe_intermediate_size", "intermediate_size", "n_routed_experts", "kv_lora_rank"),
        *("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_group"),
        *("topk_group",),
    ],
}
_COMMON = [
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_experts_per_tok", "max_position_embeddings"),
]
SIZES = [(name, key) for name, keys in _SIZES.items() for key in [*_COMMON, *keys]]

scalars = st.one_of(
    st.integers(max_value=0),
    st.integers(min_value=1 << 28),
    st.floats(),
    st.text(max_size=5),
    st.booleans(),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def parse(values: dict[str, Any]) -> Any:
    return family_of(values).parse(values)


@pytest.mark.parametrize(("name", "key"), SIZES)
@given(value=scalars)
def test_absurd_sizes(name: str, key: str, value: object) -> None:
    with pytest.raises(ModelDataError, match=key):
        parse({**CONFIGS[name], key: value})


@pytest.mark.parametrize("name", list(_SIZES))
@given(key=st.data(), value=st.one_of(st.none(), st.integers(-3, 40), scalars))
def test_nothing_but_model_data_error(name: str, key: st.DataObject, value: object) -> None:
    """For any value of one key, parsing succeeds or raises ModelDataError."""
    values = CONFIGS[name]
    chosen = key.draw(st.sampled_from(sorted(set(values) - {"model_type"})))
    try:
        parse({**values, chosen: value})
    except ModelDataError as error:
        text = str(error)
    else:
        text = ""
    assert len(text) < 400


@given(
    values=st.dictionaries(
        st.sampled_from(["rope_theta", "rope_type", "type", "factor", "beta_fast", "mscale"]),
        scalars,
    )
)
def test_absurd_rope(values: dict[str, Any]) -> None:
    for config in (
        {**CONFIGS["olmoe"], "rope_parameters": None, "rope_scaling": values},
        {**CONFIGS["deepseek-lite"], "rope_parameters": values},
    ):
        try:
            rope = parse(config).body.rope
        except ModelDataError:
            continue
        assert math.isfinite(rope.theta)
        assert rope.kind in ("default", "linear", "yarn", "llama3", "longrope")


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("mixtral", {"num_experts_per_tok": 6}, "6 experts per token are more than"),
        ("mixtral", {"num_attention_heads": 5, "head_dim": 8}, "5 heads cannot share 2"),
        ("mixtral", {"hidden_size": 49}, "hidden_size 49 is not a multiple of 4"),
        ("mixtral", {"head_dim": 7}, "head_dim of 7"),
        ("mixtral", {"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ("mixtral", {"num_experts": 9}, "num_experts = 9 disagrees with num_local_experts"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ("mixtral", {"attention_bias": True}, "attention_bias = true is not supported"),
        ("mixtral", {"sliding_window": 0}, "sliding_window = 0"),
        ("mixtral", {"rms_norm_eps": math.nan}, "rms_norm_eps = nan"),
        ("mixtral", {"tie_word_embeddings": 1}, "tie_word_embeddings = 1 must be true or false"),
        ("mixtral", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("mixtral", {"vocab_size": None}, "lacks vocab_size"),
        ("mixtral", {"vocab_size": 10**5000}, "vocab_size = a huge integer"),
        ("mixtral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("mixtral", {"rope_scaling": {"type": "dynamic"}}, "type = 'dynamic' is not supported"),
        ("mixtral", {"rope_scaling": {"type": "linear"}}, "lacks factor"),
        ("mixtral", {"rope_scaling": [1]}, "rope_scaling must be an object"),
        ("olmoe", {"head_dim": 10}, "heads of 10 do not fill hidden_size 32"),
        ("olmoe", {"clip_qkv": -1.0}, "clip_qkv = -1"),
        ("olmoe", {"sliding_window": 9}, "sliding_window = 9 is not supported"),
        ("qwen3", {"mlp_only_layers": [0, 1]}, "no layer has experts"),
        ("qwen3", {"mlp_only_layers": 1}, "mlp_only_layers = 1 must be a list of integers"),
        ("qwen3", {"mlp_only_layers": [True]}, "mlp_only_layers = a list must be a list of int"),
        ("qwen3", {"decoder_sparse_step": 3}, "no layer has experts"),
        ("qwen3", {"mlp_only_layers": [0], "intermediate_size": None}, "lacks intermediate_size"),
        ("qwen3", {"head_dim": 7}, "head_dim of 7"),
        ("qwen3.5", {"layer_types": ["linear_attention"] * 4}, "no layer has full attention"),
        ("qwen3.5", {"linear_num_key_heads": 3}, "4 value heads cannot share 3 key heads"),
        ("qwen3.5", {"attn_output_gate": False}, "attn_output_gate = false is not supported"),
        ("qwen3.5", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim = 1"),
        ("deepseek-v3", {"rope_interleave": False}, "rope_interleave = false is not supported"),
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ("deepseek-v3", {"n_group": 8, "topk_group": 8}, "a group of experts has fewer than two"),
        ("deepseek-v3", {"n_group": 3}, "8 experts do not form 3 groups"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported"),
        ("deepseek-v3", {"first_k_dense_replace": 9}, "no layer has experts"),
        ("deepseek-v3", {"num_mtp_layers": 7}, "disagrees with num_nextn_predict_layers"),
        ("glm4", {"partial_rotary_factor": 1.5, "rope_parameters": None}, "partial_rotary_factor"),
        ("glm4", {"partial_rotary_factor": 0.1, "rope_parameters": None}, "cannot be rotated"),
        ("glm4-lite", {"mlp_layer_types": ["dense"] * 3}, "no layer has experts"),
        ("mixtral", {"rope_scaling": {"type": "longrope"}}, "lacks short_factor"),
        ("phimoe", {"num_experts_per_tok": 3}, "chooses 2 experts, not 3"),
        ("phimoe", {"lm_head_bias": True, "tie_word_embeddings": True}, "lm_head_bias with tie"),
        ("phimoe-longrope", {"rope_parameters": {**_LONG, "long_factor": [0]}}, "long_factor = a"),
        (
            "phimoe-longrope",
            {"rope_parameters": {**_LONG, "long_factor": "x"}},
            "long_factor = 'x'",
        ),
        (
            "phimoe-longrope",
            {
                "rope_parameters": {
                    **_LONG,
                    "long_factor": [1],
                    "factor": 2.0,
                    "original_max_position_embeddings": 1,
                },
                "original_max_position_embeddings": 1,
            },
            "original_max_position_embeddings must be above 1",
        ),
        ("granite", {"logits_scaling": 0}, "logits_scaling = 0"),
        ("gpt-oss", {"swiglu_limit": 6.5}, "swiglu_limit = 6.5"),
        ("gpt-oss", {"layer_types": ["full_attention"]}, "layer_types = a list"),
        ("gpt-oss", {"experts_per_token": 2}, "experts_per_token = 2 disagrees"),
        ("arctic", {"moe_layer_frequency": 2}, "moe_layer_frequency = 2 is not supported"),
        ("arctic", {"parallel_attn_mlp_res": False}, "parallel_attn_mlp_res = false"),
        ("qwen2", {"shared_expert_intermediate_size": None}, "lacks shared_expert_intermediate"),
        ("qwen2-window", {"layer_types": ["full_attention"]}, "must be a list of 4 words"),
        ("qwen2-window", {"layer_types": ["slow"] * 4}, "has an unknown word"),
        ("minimax-m2", {"use_routing_bias": False}, "use_routing_bias = false"),
        ("minimax-m2", {"rotary_dim": 13}, "rotary_dim 13 is above head_dim 12"),
        ("qwen3-next", {"attn_output_gate": False}, "attn_output_gate = false"),
        ("ernie4.5", {"use_bias": True}, "use_bias = true is not supported"),
        ("hunyuan", {"use_cla": True}, "use_cla = true is not supported"),
        ("hunyuan", {"moe_topk": [1, 2]}, "moe_topk = a list"),
        ("hunyuan", {"attention_head_dim": 10}, "attention_head_dim = 10 is not supported"),
        ("hunyuan", {"norm_type": "layer"}, "norm_type = 'layer' is not supported"),
        ("hunyuan", {"position_embedding_xdrope": True}, "xdrope = true is not supported"),
        ("hunyuan", {"group_limited_greedy": True}, "group_limited_greedy = true"),
        ("exaone", {"sliding_window": None}, "sliding_window = null"),
        ("dots1", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("granite-shared", {"shared_intermediate_size": -1}, "shared_intermediate_size"),
        ("solar", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("lfm2", {"layer_types": ["conv"] * 4}, "no layer has attention"),
        ("laguna", {"gating": False}, "gating must be per-head or per-element"),
        ("laguna", {"num_attention_heads_per_layer": [4]}, "needs one value per layer"),
        ("laguna", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "lacks sliding"),
        ("gemma4", {"enable_moe_block": False}, "enable_moe_block is not true"),
        ("gemma4", {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input = 8"),
        ("gemma4", {"num_kv_shared_layers": 1}, "num_kv_shared_layers = 1"),
        ("gemma4", {"hidden_activation": "silu"}, "hidden_activation = 'silu'"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "attention = 'all' is not supported"),
        ("gemma4", {"rope_parameters": {}}, "rope_parameters lacks full_attention"),
        ("gemma4", {"per_layer_config": {"01": {"head_dim": 8}}}, "must have one head_dim"),
        ("gemma4", {"per_layer_config": {"0": {"skip": ["mlp"]}}}, "not supported: 'skip'"),
        ("gemma4", {"per_layer_config": {"x": {}}}, "needs numbers of layers"),
        ("kimi-linear", {"layer_types": ["linear_attention"] * 4}, "no layer has full attention"),
        ("kimi-linear", {"mla_use_nope": False}, "mla_use_nope = false is not supported"),
        ("kimi-linear", {"tie_word_embeddings": True}, "tie_word_embeddings = true"),
        ("kimi-linear", {"n_group": 2}, "num_expert_group disagrees with n_group"),
        (
            "kimi-linear",
            {
                "layer_types": None,
                "linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2]},
            },
            "linear_attn_config needs every layer once",
        ),
        ("mimo", {"hybrid_layer_pattern": [0, 1], "layer_types": None}, "one value per layer"),
        ("mimo", {"moe_layer_freq": [0, 1, 2], "mlp_layer_types": None}, "than 0 and 1"),
        ("mimo", {"swa_num_key_value_heads": 3}, "4 heads cannot share 3"),
        ("mimo", {"swa_head_dim": 8}, "swa_head_dim = 8 is not supported"),
        ("mimo", {"n_shared_experts": 1}, "n_shared_experts = 1"),
        ("mimo", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "lacks sliding"),
        ("granite-hybrid", {"layer_types": ["mamba"] * 4}, "no layer has attention"),
        ("granite-hybrid", {"layer_types": ["conv"] * 4}, "has an unknown word"),
        ("granite-hybrid", {"mamba_d_head": 8}, "4 Mamba heads of 8 do not fill 64"),
        ("granite-hybrid", {"mamba_n_groups": 3}, "4 Mamba heads do not form 3 groups"),
        ("granite-hybrid", {"time_step_limit": [0.0, 0.1]}, "time_step_limit = a list is not"),
        ("granite-hybrid", {"num_local_experts": 0}, "num_local_experts = 0 must be"),
        ("nemotron", {"moe_latent_size": 0}, "moe_latent_size = 0 must be an integer"),
        ("nemotron", {"mlp_hidden_act": "silu"}, "mlp_hidden_act = 'silu' is not supported"),
        ("nemotron", {"tie_word_embeddings": True}, "tie_word_embeddings = true is not supp"),
        ("nemotron", {"num_hidden_layers": 4}, "num_hidden_layers = 4 is not supported"),
        ("nemotron", {"layers_block_type": ["mamba", "moe"]}, "no layer has attention"),
        ("nemotron", {"layers_block_type": ["mamba", "*"]}, "no layer has experts"),
        ("nemotron", {"layers_block_type": None}, "lacks layers_block_type"),
        (
            "nemotron",
            {"layers_block_type": None, "hybrid_override_pattern": "ME*X"},
            "hybrid_override_pattern = 'ME*X' has an unknown word",
        ),
        ("nemotron", {"n_group": 3}, "7 experts do not form 3 groups"),
        ("mistral4", {"rope_interleave": False}, "rope_interleave = false"),
        ("mistral4", {"n_group": 3}, "8 experts do not form 3 groups"),
        ("v32", {"index_head_dim": 7}, "index_head_dim 7 is below qk_rope_head_dim 8"),
        ("deepseek-v4", {"index_head_dim": 7}, "index_head_dim 7 is below qk_rope_head_dim 8"),
        ("deepseek-v4", {"o_groups": 3}, "4 heads do not form 3 groups"),
        ("deepseek-v4", {"swiglu_limit": 7.0}, "swiglu_limit = 7 is not supported"),
        ("deepseek-v4", {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' is not supported"),
        ("deepseek-v4", {"num_key_value_heads": 2}, "num_key_value_heads = 2 is not supported"),
        ("deepseek-v4", {"expert_dtype": "int4"}, "expert_dtype = 'int4' is not supported"),
        ("deepseek-v4", {"hc_mult": 0}, "hc_mult = 0"),
        (
            "deepseek-v4",
            {"layer_types": None, "compress_ratios": [0, 4, 64, 0]},
            "compress_ratios has other values than 0, 4 and 128",
        ),
        (
            "deepseek-v4",
            {"quantization_config": {"quant_method": "fp8", "moe_quant_algo": "IQ3_WIRE"}},
            "moe_quant_algo = 'IQ3_WIRE' is not supported",
        ),
        ("v32", {"index_topk": 0}, "index_topk = 0"),
        ("v32", {"q_lora_rank": None}, "q_lora_rank = null is not supported with an indexer"),
        ("v32", {"layer_types": ["full_attention"] * 3}, "layer_types = a list has an unknown"),
        ("v32", {"indexer_rope_interleave": True}, "indexer_rope_interleave = true"),
        ("glm-dsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave = false"),
        ("glm-dsa", {"indexer_types": ["full"]}, "indexer_types = a list must be a list of 4"),
        (
            "glm-dsa",
            {"indexer_types": None, "index_topk_pattern": "FFSF"},
            "index_topk_pattern = 'FFSF' is not supported",
        ),
        ("glm5-next", {"swiglu_limit": 7.0}, "swiglu_limit = 7 is not supported"),
        ("glm5-next", {"qk_rope_head_dim": 8}, "qk_rope_head_dim = 8 is not supported"),
        ("glm5-next", {"index_kpool": 3}, "index_topk 8 is not a multiple of index_kpool 3"),
        ("glm5-next", {"index_kpool_always_select_tail": False}, "always_select_tail = false"),
        ("glm5-next", {"layer_types": ["linear_attention"] * 4}, "no layer has attention"),
        ("glm5-next", {"indexer_types": ["shared"] * 4}, "before layer 3 has no indexer"),
        ("glm5-next", {"linear_lower_bound": 1.0}, "linear_lower_bound = 1"),
        ("deepseek-lite", {"norm_topk_prob": True}, "norm_topk_prob = true is not supported"),
        ("deepseek-lite", {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        ("deepseek-lite", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
        ("deepseek-lite", {"first_k_dense_replace": 3}, "no layer has experts"),
        ("deepseek-lite", {"num_key_value_heads": 1}, "num_key_value_heads = 1"),
        ("deepseek-lite", {"mlp_bias": True}, "mlp_bias"),
        ("deepseek-lite", {"qk_rope_head_dim": 9}, "qk_rope_head_dim 9 is odd"),
        ("deepseek-groups", {"n_group": 3}, "8 experts do not form 3 groups"),
        ("deepseek-groups", {"topk_group": 5}, "topk_group must be at most 4, got 5"),
        ("deepseek-groups", {"topk_group": 1}, "1 groups hold fewer than 3"),
        ("deepseek-groups", {"n_group": None}, "lacks n_group"),
    ],
)
def test_refused_by_name(name: str, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelDataError) as caught:
        parse({**CONFIGS[name], **changes})
    assert problem in str(caught.value)


@pytest.mark.parametrize("name", list(TINY))
def test_unknown_keys_are_ignored(name: str) -> None:
    values = {**CONFIGS[name], "auto_map": {"AutoModel": "evil.Evil"}, "quack": [1], "": None}
    assert parse(values) == parse(CONFIGS[name])


def test_old_spelling() -> None:
    """Read rope_theta and rope_scaling, as in DeepSeek-V2-Lite's published config."""
    scaling = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "type": "yarn"}
    scaling |= {"mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096}
    old = {**CONFIGS["deepseek-lite"], "rope_theta": 10000, "rope_scaling": scaling}
    old |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_parameters": None}
    config = parse(old)
    assert config.body.rope.original_context == 4096
    assert config.body.rope.softmax_factor == pytest.approx(1.58963, rel=1e-5)
    assert config.attention.scale == pytest.approx(0.11472, rel=1e-4)


def test_defaults_of_what_published_configs_omit() -> None:
    bare = {k: v for k, v in CONFIGS["olmoe"].items() if v is not None}
    for key in ("rms_norm_eps", "rope_parameters", "hidden_act", "tie_word_embeddings"):
        bare.pop(key, None)
    config = parse(bare)
    assert config.body.norm_eps == 1e-5
    assert config.body.rope.theta == 1e4
    assert config.attention.clip is None


def test_what_is_absent_is_as_in_transformers() -> None:
    window = {**CONFIGS["qwen3"], "use_sliding_window": True}
    assert parse({**window, "sliding_window": None}).attention.window is None
    assert parse({**window, "sliding_window": 7}).attention.window == 7
    del window["sliding_window"]
    assert parse(window).attention.window == 4096
    assert parse({**window, "use_sliding_window": False}).attention.window is None
    shared = dict(CONFIGS["deepseek-lite"])
    del shared["n_shared_experts"]
    assert parse(shared).shared_experts == 2
    name = "model.layers.1.mlp.shared_experts.up_proj.weight"
    assert not FAMILIES["deepseek_v2"].ignores(name, parse(shared))
    assert FAMILIES["deepseek_v2"].ignores(name, parse({**shared, "n_shared_experts": 0}))


@pytest.mark.parametrize("values", [[], None, {}, {"model_type": 3}, {"model_type": "llama"}])
def test_unknown_family(values: Any) -> None:
    with pytest.raises(ModelDataError, match=", ".join(sorted(FAMILIES))):
        family_of(values)


def test_table() -> None:
    others = {"kimi_k2": "deepseek_v3", "kimi_k25": "deepseek_v3", "mistral3": "mistral4"}
    others["glm4v_moe"] = "glm4_moe"
    known = {name.removesuffix("_text"): f.model_type for name, f in FAMILIES.items()}
    assert known == {name: others.get(name, name) for name in known}
    tested = {tiny.family for tiny in TINY.values()} | {pair.family for pair in PAIRS.values()}
    assert tested == known.keys() - {"mistral3"}  # the name of mistral4 with vision


def test_fields_bounds() -> None:
    fields = Fields({"n": 5, "x": 2, "flag": False})
    assert fields.integer("n", low=5, high=5) == 5
    assert fields.number("x", low=0, high=2) == 2.0
    assert fields.flag("flag", default=True) is False
    with pytest.raises(ModelDataError, match="n = 5 must be an integer from 1 to 4"):
        fields.integer("n", high=4)
