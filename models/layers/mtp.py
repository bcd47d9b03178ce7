"""Layers that predict further tokens (multi-token prediction, DeepSeek-V3, section 2.2).

A module has one block of the model's kind. It reads the final hidden state h_i of the model at a
token and the embedding of the next token, and predicts the token after that:

    u_i = joining([norm(embedding of t_{i+1}), norm(h_i)]);  its block reads u_0 … u_i at 0 … i

h_i is normed as for the head, and so is the block's output, which takes the place of h_{i+1} where
the model has not computed that yet. Embedding and output head are the model's own. A checkpoint's
modules are kept as a small model of their own, with experts and files like any other. Only the
first module drafts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeinf.models.base import ExpertPart, Experts, Family, FusedPart, Linear, MoeShape, Parts
from moeinf.models.layers.decoder import Block, BodyConfig, Layer
from moeinf.models.layers.kv_cache import CacheLayout, KvCache, PassRows, Span
from moeinf.models.layers.moe import one_pass
from moeinf.models.layers.norms import RmsNorm, WideRmsNorm, centred_norm
from moeinf.models.layers.rope import Rope
from moeinf.models.layers.tuning import tuned_blocks

Norm = RmsNorm | WideRmsNorm
_SINGLE_ROWS = 16  # in a pass of more, attention computes many rows at once
_BEHIND = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,8})\.(.*)")
_OWN = {  # names in a layer after the last one -> ours
    "enorm.": "embedding_norm.",
    "hnorm.": "hidden_norm.",
    "eh_proj.": "joining.",
    "shared_head.norm.": "norm.",
}
_MODELS_OWN = ("embed_tokens.", "shared_head.head.")  # copies of the model's tensors
_IN_QWEN = {
    "mtp.pre_fc_norm_embedding.": "mtp.0.embedding_norm.",
    "mtp.pre_fc_norm_hidden.": "mtp.0.hidden_norm.",
    "mtp.fc.": "mtp.0.joining.",
    "mtp.norm.": "mtp.0.norm.",
    "mtp.layers.0.": "model.layers.0.",
}
_IN_MIMO = {
    "enorm.": "mtp.0.embedding_norm.",
    "hnorm.": "mtp.0.hidden_norm.",
    "eh_proj.": "mtp.0.joining.",
    "final_layernorm.": "mtp.0.norm.",
    "pre_mlp_layernorm.": "model.layers.0.post_attention_layernorm.",
    "self_attn.attention_sink_bias": "model.layers.0.self_attn.sinks",
    "": "model.layers.0.",
}


@dataclass(frozen=True)
class MtpModule:
    """One module. norm: the last one, before the model's output head."""

    embedding_norm: Norm
    hidden_norm: Norm
    joining: Linear
    block: Layer
    norm: Norm


class MtpModules:
    """The modules of a checkpoint, with the sizes that a plan and an expert store need."""

    usual_context = None
    state_bytes = 0

    def __init__(
        self,
        body: BodyConfig,
        moe: MoeShape,
        planes: tuple[tuple[int, int], ...],
        rope_dim: int,
        blocks: Sequence[Block],
        parts: Parts,
    ) -> None:
        """Build the modules around their blocks, one each. planes: see kv_cache.py."""
        self.moe, self.max_context = moe, body.max_context
        # Each block is tuned alone: those of a list may become one run of layers.
        tuned = [tuned_blocks([block], parts)[0] for block in blocks]
        self.modules = [_module(body, block, parts, n) for n, block in enumerate(tuned)]
        weight = parts.tensor("mtp.0.norm.weight", body.hidden)
        self._cache = CacheLayout(len(blocks), planes, weight.dtype, weight.device, None, parts.kv)
        self._rope = Rope(body.rope, rope_dim, weight.device)
        self.kv_bytes_per_token = self._cache.bytes_per_token

    def new_state(self, capacity: int) -> KvCache:
        """Return an empty state of the first module, for u_0 … u_{capacity - 1}."""
        return KvCache(self._cache, capacity)

    def extend(self, embedded: Tensor, hidden: Tensor, state: KvCache, experts: Experts) -> Tensor:
        """Append rows to a state of the first module; return its normed output [T, D].

        embedded [T, D]: of the tokens t_{i+1}. hidden [T, D]: h_i, normed. A pass that fails leaves
        the state as it was.
        """
        count, past, module = len(embedded), state.length, self.modules[0]
        spans: tuple[Span, ...] = (Span(state, slice(0, count), past),)
        if count <= _SINGLE_ROWS:
            spans = spans[0].one_by_one()
        positions = torch.arange(past, past + count, device=embedded.device)
        owner = torch.zeros(count, dtype=torch.int64)
        with (
            torch.inference_mode(),
            one_pass(experts, owner, "prefill" if count > _SINGLE_ROWS else "decode"),
        ):
            angles = self._rope(positions, [state.capacity] * count)
            joined = (module.embedding_norm(embedded), module.hidden_norm(hidden))
            x = module.joining(torch.cat(joined, -1))
            x = module.norm(module.block(x, PassRows(spans, positions, *angles), experts))
        state.advance(count)
        return x


def _module(body: BodyConfig, block: Layer, parts: Parts, number: int) -> MtpModule:
    def norm(name: str) -> Norm:
        prefix = f"mtp.{number}.{name}"
        if body.centred_norm:
            return parts.tuned(centred_norm(parts, prefix, body.hidden, body.norm_eps))
        return parts.tuned(RmsNorm(parts.tensor(f"{prefix}.weight", body.hidden), body.norm_eps))

    return MtpModule(
        norm("embedding_norm"),
        norm("hidden_norm"),
        parts.linear(f"mtp.{number}.joining", body.hidden, 2 * body.hidden),
        block,
        norm("norm"),
    )


Renamed = Callable[[str], str | None]  # a checkpoint's name -> the name that build uses


def mtp_family(
    model_type: str,
    config: Any,
    build: Callable[[Any, Parts], Any],
    renamed: Renamed,
    expert: Callable[[str, Any], ExpertPart | None],
    fused: Callable[[str, Any], FusedPart | None] = lambda _name, _config: None,
) -> Family:
    """Return the family of the modules of one checkpoint, with their config.

    renamed: None for the tensors of the model itself. expert, fused: of renamed tensors.
    """

    def parse(_: Mapping[str, Any]) -> Any:
        return config

    return Family(
        model_type,
        parse,
        build,
        lambda name, found: expert(renamed(name) or "", found),
        lambda name, _: renamed(name) is None,
        lambda name, found: fused(renamed(name) or "", found),
        lambda name: renamed(name) or "",
    )


def behind(layers: range) -> Renamed:
    """Return the names of modules that a checkpoint stores as these layers, after the last one."""

    def renamed(name: str) -> str | None:
        match = _BEHIND.fullmatch(name)
        if match is None or int(match[1]) not in layers or match[2].startswith(_MODELS_OWN):
            return None
        number, rest = int(match[1]) - layers.start, match[2]
        for theirs, ours in _OWN.items():
            if rest.startswith(theirs):
                return f"mtp.{number}.{ours}{rest.removeprefix(theirs)}"
        return f"model.layers.{number}.{rest}"

    return renamed


def in_qwen(name: str) -> str | None:
    """Return the name of a tensor of Qwen's one module."""
    for theirs, ours in _IN_QWEN.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return None


def in_mimo(name: str) -> str | None:
    """Return the name of a tensor of the first of MiMo's modules."""
    start = "model.mtp.layers.0."
    if not name.startswith(start):
        return None
    rest = name.removeprefix(start)
    theirs = next(one for one in _IN_MIMO if rest.startswith(one))
    return _IN_MIMO[theirs] + rest.removeprefix(theirs)
