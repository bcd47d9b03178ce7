"""DeepSeek-V4: hyper-connections, compressed attention, and experts chosen by token id at first.

Math as in transformers 5.23, modeling_deepseek_v4.py. The activation's limit is fixed in ffn.py and
in the kernels; a config with another limit is refused. Multi-token prediction is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moeinf.models.base import ExpertPart, Family, Model, MoeShape, Parts
from moeinf.models.config import MAX_CONTEXT, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Fields, require
from moeinf.models.expert_names import ExpertNames
from moeinf.models.layers.compressed_attention import (
    EntryIndexer,
    ScorerShape,
    SharedKvAttention,
    SharedShape,
)
from moeinf.models.layers.compressor import Compressor, PoolShape
from moeinf.models.layers.decoder import BodyConfig, Decoder, ignores_buffers, parse_body
from moeinf.models.layers.ffn import LimitedMlp, gated_mlp
from moeinf.models.layers.hyper_block import (
    HyperBlock,
    HyperShape,
    hyper_connection,
    hyper_head,
    parse_hyper,
)
from moeinf.models.layers.moe import SparseFfn, parse_moe
from moeinf.models.layers.norms import WideRmsNorm
from moeinf.models.layers.recurrent import RecurrentLayout
from moeinf.models.layers.rope import Rope, RopeConfig, parse_rope, without_rope
from moeinf.models.layers.routing import HashRouter, SqrtSoftplusRouter

_SLIDING, _SPARSE, _HEAVY = (
    "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
)  # fmt: skip
_RATIOS = {0: _SLIDING, 4: _SPARSE, 128: _HEAVY}  # of compress_ratios
_PARTIAL = 64 / 512  # of a head, which rotates
_EXPERTS = ExpertNames(
    "model.layers.{layer}.ffn.experts.{expert}.{role}.weight",
    {"w1": "gate", "w3": "up", "w2": "down"},
)
_RENAMED = tuple(
    (re.compile(pattern), ours)
    for pattern, ours in (
        (r"^embed\.", "model.embed_tokens."),
        (r"^head\.", "lm_head."),
        (r"^(?=norm\.|layers\.|hc_head_)", "model."),
        (r"^model\.hc_head_", "model.hc_head.hc_"),
        (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
        (r"\.attn\.norm\.", ".attn.kv_norm."),
        (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
        (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
        (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
        (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
    )
)


@dataclass(frozen=True)
class DeepseekV4Config:
    """The checked values of config.json."""

    body: BodyConfig
    compress_rope: RopeConfig
    attention: SharedShape
    kinds: tuple[str, ...]  # of every layer's attention
    rates: Mapping[str, int]  # tokens per entry, by kind
    scorer: ScorerShape
    hyper: HyperShape
    moe: MoeShape
    hashed: tuple[int, ...]  # the layers whose experts a token's id chooses
    scale: float  # routed_scaling_factor

    def pools(self, layer: int) -> tuple[PoolShape, ...]:
        """Return the compressors of a layer: of its keys, then of its indexer."""
        kind, shape = self.kinds[layer], self.attention
        if kind == _SLIDING:
            return ()
        overlap = kind == _SPARSE
        main = PoolShape(shape.head_dim, self.rates[kind], overlap, shape.rope, shape.eps)
        return (main, replace(main, width=self.scorer.width)) if overlap else (main,)

    @property
    def compressing(self) -> tuple[int, ...]:
        """The layers with a compressor, ascending."""
        return tuple(layer for layer, kind in enumerate(self.kinds) if kind != _SLIDING)


def parse(values: Mapping[str, Any]) -> DeepseekV4Config:
    """See base.Family. transformers reads neither norm_topk_prob nor n_shared_experts."""
    fields = Fields(values)
    body = parse_body(Fields(without_rope(values)), default_theta=1e4, default_eps=1e-6)
    for name, only in (("attention_bias", False), ("mlp_bias", False), ("norm_topk_prob", True)):
        fields.refuse(name, only)
    fields.refuse("num_key_value_heads", 1)
    fields.refuse("n_shared_experts", 1)
    fields.refuse("swiglu_limit", 10.0, 10)
    fields.choice("expert_dtype", default="fp8", known=("fp8", "fp4"))
    fields.choice("scoring_func", default="sqrtsoftplus", known=("sqrtsoftplus",))
    fields.choice("topk_method", default="noaux_tc", known=("noaux_tc",))
    shape = _attention(fields, body)
    main, compress = _ropes(values, body.max_context, shape)
    moe = parse_moe(fields, body.layers, body.hidden, "moe_intermediate_size")
    scorer = ScorerShape(
        heads=fields.integer("index_n_heads", high=MAX_HEADS, default=64),
        width=fields.integer("index_head_dim", high=MAX_WIDTH, default=128),
        top=fields.integer("index_topk", high=MAX_CONTEXT, default=512),
    )
    kinds = _kinds(fields, body.layers)
    require(
        _SPARSE not in kinds or scorer.width >= shape.rope,
        f"index_head_dim {scorer.width} is below qk_rope_head_dim {shape.rope}",
    )
    return DeepseekV4Config(
        body=replace(body, rope=main, wide_norm=True),
        compress_rope=compress,
        attention=shape,
        kinds=kinds,
        rates=_rates(fields),
        scorer=scorer,
        hyper=parse_hyper(fields, body.norm_eps),
        moe=replace(moe, activation="swiglu10"),
        hashed=_hashed(fields, body.layers),
        scale=fields.number("routed_scaling_factor", low=1e-3, high=1e3, default=1.5),
    )


def _attention(fields: Fields, body: BodyConfig) -> SharedShape:
    head_dim = fields.integer("head_dim", high=MAX_WIDTH, default=512)
    rope = fields.optional_integer("qk_rope_head_dim", high=MAX_WIDTH)
    partial = fields.number(
        "partial_rotary_factor",
        low=0.0,
        high=1.0,
        default=_PARTIAL if rope is None else rope / head_dim,
    )
    turning = int(head_dim * partial)
    fields.refuse("qk_rope_head_dim", turning)
    fields.refuse_null("sliding_window")
    return SharedShape(
        heads=body.heads,
        head_dim=head_dim,
        rope=turning,
        q_lora=fields.integer("q_lora_rank", high=MAX_WIDTH, default=1024),
        window=fields.integer("sliding_window", high=MAX_CONTEXT, default=128),
        groups=fields.integer("o_groups", high=MAX_HEADS, default=8),
        o_lora=fields.integer("o_lora_rank", high=MAX_WIDTH, default=1024),
        eps=body.norm_eps,
    )


def _ropes(
    values: Mapping[str, Any], max_context: int, shape: SharedShape
) -> tuple[RopeConfig, RopeConfig]:
    """Return the ropes of sliding layers and of the others, which have that of compressors.

    One section describes the latter alone, or rope_parameters has a section for each. DeepSeek's
    code has no attention factor for yarn.
    """
    fields = Fields(values)
    known = values.get("rope_scaling") or values.get("rope_parameters") or {}
    outer = Fields(known, "config.json: rope_parameters")
    thetas = [
        fields.number(name, low=2.0, high=1e12, default=default)
        for name, default in (("rope_theta", 1e4), ("compress_rope_theta", 1.6e5))
    ]
    if outer.section("main") is not None and outer.section("compress") is not None:
        sections = [known["main"], known["compress"]]
        for name in ("main", "compress"):
            section = outer.section(name)
            assert section is not None
            section.refuse("partial_rotary_factor", shape.rope / shape.head_dim)
    else:
        sections = [{}, {key: one for key, one in known.items() if key != "rope_theta"}]
    main, compress = (
        parse_rope(Fields({"rope_parameters": section}), max_context, theta, 1.0)
        for section, theta in zip(sections, thetas, strict=True)
    )
    if compress.kind == "yarn" and compress.attention_factor is None:
        compress = replace(compress, attention_factor=1.0)
    return replace(main, partial=1.0), replace(compress, partial=1.0)  # of the rotated values


def _kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    """Return the kind of every layer. compress_ratios also has one for each extra layer."""
    kinds = fields.words("layer_types", known=(_SLIDING, _SPARSE, _HEAVY), count=layers)
    if kinds is not None:
        return kinds
    ratios = fields.integers("compress_ratios", high=MAX_LAYERS)
    if ratios:
        require(set(ratios) <= set(_RATIOS), "compress_ratios has other values than 0, 4 and 128")
        require(len(ratios) >= layers, f"compress_ratios has fewer than {layers} values")
        return tuple(_RATIOS[ratio] for ratio in ratios[:layers])
    after = (_SPARSE if layer % 2 else _HEAVY for layer in range(max(layers - 2, 0)))
    return ((_HEAVY,) * min(layers, 2)) + tuple(after)


def _rates(fields: Fields) -> dict[str, int]:
    """Return the tokens per entry of both compressing kinds."""
    section = fields.section("compress_rates") or Fields({})
    rates = {}
    for kind, older, default in (
        (_SPARSE, "compress_rate_csa", 4),
        (_HEAVY, "compress_rate_hca", 128),
    ):
        rate = section.integer(kind, high=MAX_CONTEXT, default=default)
        rates[kind] = fields.integer(older, high=MAX_CONTEXT, default=rate)
    return rates


def _hashed(fields: Fields, layers: int) -> tuple[int, ...]:
    kinds = fields.words("mlp_layer_types", known=("hash_moe", "moe"), count=layers)
    if kinds is None:
        first = fields.integer("num_hash_layers", low=0, high=MAX_LAYERS, default=3)
        return tuple(range(min(first, layers)))
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "hash_moe")


def build(config: DeepseekV4Config, parts: Parts) -> Model:
    """See base.Family."""
    body, shape, compressing = config.body, config.attention, config.compressing
    coarse = [pool for layer in compressing for pool in config.pools(layer)]
    device = parts.tensor("model.norm.weight", body.hidden).device
    rope = Rope(config.compress_rope, shape.rope, device)
    blocks, plane = [], body.layers
    for layer in range(body.layers):
        blocks.append(_block(config, parts, layer, plane, rope))
        plane += len(config.pools(layer))
    memory = None
    if compressing:
        each = tuple(tuple(p.memory for p in config.pools(layer)) for layer in compressing)
        memory = RecurrentLayout(len(compressing), (), each=each)
    return Decoder(
        # The decoder counts a layer with two kinds of memory twice.
        replace(body, layers=body.layers + len(compressing)),
        config.moe,
        ((1, shape.head_dim),),
        shape.rope,
        blocks,
        parts,
        memory,
        more_ropes=((config.compress_rope, shape.rope),),
        coarse=tuple((pool.width, pool.rate) for pool in coarse),
        streams=config.hyper.streams,
        head=hyper_head(parts, "model.hc_head", config.hyper, body.hidden),
    )


def _block(
    config: DeepseekV4Config, parts: Parts, layer: int, plane: int, rope: Rope
) -> HyperBlock:
    """Return a layer. plane: of its compressor's entries; rope: of compressors."""
    body, hidden, prefix = config.body, config.body.hidden, f"model.layers.{layer}"

    def norm(name: str) -> WideRmsNorm:
        return WideRmsNorm(parts.tensor(f"{prefix}.{name}.weight", hidden), body.norm_eps)

    return HyperBlock(
        attention_mix=hyper_connection(parts, f"{prefix}.attn_hc", config.hyper, hidden),
        attention_norm=norm("attn_norm"),
        attention=_mixer(config, parts, layer, plane, rope),
        ffn_mix=hyper_connection(parts, f"{prefix}.ffn_hc", config.hyper, hidden),
        ffn_norm=norm("ffn_norm"),
        ffn=_ffn(config, parts, layer),
    )


def _mixer(
    config: DeepseekV4Config, parts: Parts, layer: int, plane: int, rope: Rope
) -> SharedKvAttention:
    hidden, shape, name = config.body.hidden, config.attention, f"model.layers.{layer}.attn"
    names = f"{name}.compressor", f"{name}.indexer.compressor"
    pools = [
        Compressor(plane + at, pool, rope, hidden, parts, prefix)
        for at, (pool, prefix) in enumerate(zip(config.pools(layer), names, strict=False))
    ]
    if not pools:
        return SharedKvAttention(layer, shape, hidden, parts, name)
    indexer = None
    if len(pools) == 2:
        indexer = EntryIndexer(
            config.scorer, pools[1], hidden, shape.q_lora, parts, f"{name}.indexer"
        )
    memory = config.compressing.index(layer)
    return SharedKvAttention(layer, shape, hidden, parts, name, pools[0], indexer, memory, rope=1)


def _ffn(config: DeepseekV4Config, parts: Parts, layer: int) -> SparseFfn:
    moe, prefix = config.moe, f"model.layers.{layer}.ffn"
    gate = parts.tensor(f"{prefix}.gate.weight", moe.experts, moe.hidden)
    shared = gated_mlp(parts, f"{prefix}.shared_experts", moe.hidden, moe.intermediate, LimitedMlp)
    if layer not in config.hashed:
        bias = parts.tensor(f"{prefix}.gate.e_score_correction_bias", moe.experts)
        return SparseFfn(
            layer, SqrtSoftplusRouter(gate, bias, moe.top_k, True, config.scale), shared
        )
    inner = SqrtSoftplusRouter(gate, gate.new_zeros(moe.experts), moe.top_k, True, config.scale)
    table = parts.tensor(f"{prefix}.gate.tid2eid", config.body.vocab, moe.top_k)
    if table.device.type != "meta":
        known = int(table.min()) >= 0 and int(table.max()) < moe.experts
        require(known, f"{prefix}.gate.tid2eid names experts that layer {layer} does not have")
    return SparseFfn(layer, HashRouter(inner, table), shared)


def expert(name: str, config: DeepseekV4Config) -> ExpertPart | None:
    """See base.Family. Experts of multi-token prediction are not loaded."""
    if name.startswith("mtp."):
        return None
    return _EXPERTS.part(rename(name), range(config.body.layers), config.moe.experts)


def ignores(name: str, config: DeepseekV4Config) -> bool:
    """See base.Family."""
    return name.startswith("mtp.") or ignores_buffers(rename(name), config)


def rename(name: str) -> str:
    """Return a tensor's name with the words of `build`."""
    for pattern, ours in _RENAMED:
        name = pattern.sub(ours, name)
    return name


FAMILY = Family("deepseek_v4", parse, build, expert, ignores, rename=rename)
