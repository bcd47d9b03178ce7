"""Nemotron-3: layers of Mamba2, of attention without rope, or of experts without a gate.

Math as in transformers 5.23, modeling_nemotron_h.py, without its least step of time. NVIDIA's own
code has none, and transformers applies it to prompts only. Multi-token prediction is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moeinf.models.base import ExpertPart, Family, Linear, Model, ModelDataError, MoeShape, Parts
from moeinf.models.config import MAX_EXPERTS, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Fields, require
from moeinf.models.expert_names import ExpertNames
from moeinf.models.layers.attention import (
    GqaAttention,
    GqaShape,
    NoRopeCore,
    gqa_projections,
    parse_gqa,
)
from moeinf.models.layers.decoder import (
    Block,
    BodyConfig,
    Decoder,
    Layer,
    ignores_buffers,
    parse_body,
)
from moeinf.models.layers.feed_forward import FeedForward
from moeinf.models.layers.ffn import DenseRelu, relu2
from moeinf.models.layers.half_blocks import FfnBlock, MixerBlock
from moeinf.models.layers.mamba2 import MAX_KERNEL, Mamba2, MambaShape, refuse_limits
from moeinf.models.layers.moe import SparseFfn, parse_moe
from moeinf.models.layers.norms import WideRmsNorm
from moeinf.models.layers.routing import SigmoidRouter, require_groups

_KINDS = {  # the words of layers_block_type, and the letters of hybrid_override_pattern
    **dict.fromkeys(("mamba", "linear_attention", "M"), "mamba"),
    **dict.fromkeys(("attention", "full_attention", "*"), "attention"),
    **dict.fromkeys(("moe", "E"), "moe"),
    **dict.fromkeys(("mlp", "-"), "mlp"),
}
_EXPERTS = ExpertNames(
    "model.layers.{layer}.mixer.experts.{expert}.{role}.weight",
    {"up_proj": "up", "down_proj": "down"},
)
_RENAMED = {"embeddings.": "embed_tokens.", "norm_f.": "norm."}  # -> the usual names


@dataclass(frozen=True)
class NemotronHConfig:
    """The checked values of config.json."""

    body: BodyConfig
    kinds: tuple[str, ...]  # of the layers: mamba, attention, moe or mlp
    attention: GqaShape
    mamba: MambaShape
    moe: MoeShape
    groups: tuple[int, int] | None  # n_group, topk_group
    renormalise: bool  # norm_topk_prob
    scale: float  # routed_scaling_factor
    shared_intermediate: int  # moe_shared_expert_intermediate_size
    dense_intermediate: int  # of layers of the kind mlp; 0 without them
    mlp_bias: bool  # of shared experts, dense layers, and the way to and from latent experts

    def __post_init__(self) -> None:
        require("attention" in self.kinds, "no layer has attention")
        if self.groups is not None:
            require_groups(*self.groups, self.moe.experts, self.moe.top_k)
            require(
                self.moe.experts // self.groups[0] >= 2, "a group of experts has fewer than two"
            )

    def layers(self, *kinds: str) -> tuple[int, ...]:
        """Return the layers of these kinds, ascending."""
        return tuple(layer for layer, kind in enumerate(self.kinds) if kind in kinds)


def parse(values: Mapping[str, Any]) -> NemotronHConfig:
    """See base.Family. num_hidden_layers may be absent, but may not disagree with the layers."""
    fields = Fields(values)
    kinds = _parse_kinds(fields)
    fields.refuse("num_hidden_layers", len(kinds))
    refuse_limits(fields)
    fields.refuse_null("head_dim", "n_group", "topk_group", "mlp_hidden_act", "mamba_hidden_act")
    for name in ("attention_bias", "residual_in_fp32", "tie_word_embeddings"):
        fields.refuse(name, False)
    fields.refuse("n_shared_experts", 1)
    fields.refuse("sliding_window")
    fields.choice("mlp_hidden_act", default="relu2", known=("relu2",))
    fields.choice("mamba_hidden_act", default="silu", known=("silu",))
    eps = fields.number("layer_norm_epsilon", low=0.0, high=1.0, default=1e-5)
    counted = Fields({**values, "num_hidden_layers": len(kinds)})
    body = parse_body(counted, default_theta=1e4, default_eps=eps)
    groups = (
        fields.integer("n_group", high=MAX_EXPERTS, default=1),
        fields.integer("topk_group", high=MAX_EXPERTS, default=1),
    )
    latent = fields.optional_integer("moe_latent_size", high=MAX_WIDTH)
    width = latent or body.hidden
    moe = parse_moe(fields, kinds.count("moe"), width, "moe_intermediate_size")
    return NemotronHConfig(
        body=replace(body, norm_eps=eps, wide_norm=True),
        kinds=kinds,
        attention=parse_gqa(fields, body.hidden, body.heads, default_head_dim=128),
        mamba=_parse_mamba(fields),
        moe=replace(moe, activation="relu2", width=body.hidden if latent else 0),
        groups=None if groups == (1, 1) else groups,
        renormalise=fields.flag("norm_topk_prob", default=True),
        scale=fields.number("routed_scaling_factor", low=1e-3, high=1e3, default=1.0),
        shared_intermediate=fields.integer("moe_shared_expert_intermediate_size", high=MAX_WIDTH),
        dense_intermediate=(
            fields.integer("intermediate_size", high=MAX_WIDTH) if "mlp" in kinds else 0
        ),
        mlp_bias=fields.flag("mlp_bias"),
    )


def _parse_kinds(fields: Fields) -> tuple[str, ...]:
    """Read the kinds of the layers, in any spelling."""
    known = tuple(_KINDS)
    for name in ("layers_block_type", "layer_types", "hybrid_override_pattern"):
        words = fields.any_words(name, known=known, high=MAX_LAYERS)
        if words is not None:
            return tuple(_KINDS[word] for word in words)
    raise ModelDataError("config.json lacks layers_block_type or hybrid_override_pattern")


def _parse_mamba(fields: Fields) -> MambaShape:
    return MambaShape(
        heads=fields.integer("mamba_num_heads", high=MAX_HEADS, default=128),
        head_dim=fields.integer("mamba_head_dim", high=MAX_WIDTH, default=64),
        groups=fields.integer("n_groups", "mamba_n_groups", high=MAX_HEADS, default=8),
        state=fields.integer("ssm_state_size", high=MAX_WIDTH, default=128),
        kernel=fields.integer("conv_kernel", "mamba_d_conv", low=2, high=MAX_KERNEL, default=4),
        conv_bias=fields.flag("use_conv_bias", default=True),
        bias=fields.flag("use_bias"),
    )


def build(config: NemotronHConfig, parts: Parts) -> Model:
    """See base.Family. A mixer and the feed-forward layer behind it make one Block."""
    body, kinds, blocks = config.body, config.kinds, list[Layer]()
    layer = 0
    while layer < len(kinds):
        mixes = kinds[layer] in ("mamba", "attention")
        if not mixes:
            blocks.append(FfnBlock(_norm(config, parts, layer), _ffn(config, parts, layer)))
        elif layer + 1 < len(kinds) and kinds[layer + 1] in ("moe", "mlp"):
            mixer = _norm(config, parts, layer), _mixer(config, parts, layer)
            layer += 1
            blocks.append(Block(*mixer, _norm(config, parts, layer), _ffn(config, parts, layer)))
        else:
            blocks.append(MixerBlock(_norm(config, parts, layer), _mixer(config, parts, layer)))
        layer += 1
    # The decoder counts the layers that remember something.
    body = replace(body, layers=len(config.layers("mamba", "attention")))
    memory = config.mamba.memory(len(config.layers("mamba")))
    shape = config.attention
    return Decoder(body, config.moe, shape.planes, shape.head_dim, blocks, parts, memory)


def _mixer(config: NemotronHConfig, parts: Parts, layer: int) -> GqaAttention | Mamba2:
    """Return the layer's attention or its Mamba2; each kind counts its own layers."""
    hidden, name = config.body.hidden, f"model.layers.{layer}.mixer"
    place = config.layers(config.kinds[layer]).index(layer)
    if config.kinds[layer] == "mamba":
        return Mamba2(place, config.mamba, hidden, config.body.norm_eps, parts, name)
    projections = gqa_projections(parts, name, hidden, config.attention)
    return GqaAttention(place, config.attention, projections, core=NoRopeCore)


def _ffn(config: NemotronHConfig, parts: Parts, layer: int) -> FeedForward:
    moe, prefix = config.moe, f"model.layers.{layer}.mixer"

    def mlp(name: str, width: int) -> DenseRelu:
        hidden, bias = config.body.hidden, config.mlp_bias
        up = parts.linear(f"{name}.up_proj", width, hidden, bias)
        return DenseRelu(up, parts.linear(f"{name}.down_proj", hidden, width, bias), relu2)

    if config.kinds[layer] == "mlp":
        dense = mlp(prefix, config.dense_intermediate)
        return lambda x, experts: dense(x)
    gate = parts.tensor(f"{prefix}.gate.weight", moe.experts, config.body.hidden)
    bias = parts.tensor(f"{prefix}.gate.e_score_correction_bias", moe.experts)
    router = SigmoidRouter(gate, bias, moe.top_k, config.renormalise, config.scale, config.groups)
    shared = mlp(f"{prefix}.shared_experts", config.shared_intermediate)
    before: Linear | None = None
    after: Linear | None = None
    if moe.width:  # Super and Ultra: the routed experts see a projection of x
        wide, offset = config.body.hidden, config.mlp_bias
        before = parts.linear(f"{prefix}.fc1_latent_proj", moe.hidden, wide, offset)
        after = parts.linear(f"{prefix}.fc2_latent_proj", wide, moe.hidden, offset)
    at = config.layers("moe").index(layer)
    return SparseFfn(at, router, shared, before=before, after=after)


def _norm(config: NemotronHConfig, parts: Parts, layer: int) -> WideRmsNorm:
    weight = parts.tensor(f"model.layers.{layer}.norm.weight", config.body.hidden)
    return WideRmsNorm(weight, config.body.norm_eps)


def expert(name: str, config: NemotronHConfig) -> ExpertPart | None:
    """See base.Family."""
    if name.startswith("mtp."):
        return None
    return _EXPERTS.part(rename(name), config.layers("moe"), config.moe.experts)


def ignores(name: str, config: NemotronHConfig) -> bool:
    """See base.Family."""
    return name.startswith("mtp.") or ignores_buffers(name, config)


def rename(name: str) -> str:
    """Return a dense tensor's name with the usual words."""
    if name.startswith("backbone."):
        name = "model." + name.removeprefix("backbone.")
    start, _, rest = name.partition(".")
    for theirs, ours in _RENAMED.items():
        if start == "model" and rest.startswith(theirs):
            return f"model.{ours}{rest.removeprefix(theirs)}"
    return name


FAMILY = Family("nemotron_h", parse, build, expert, ignores, rename=rename)
