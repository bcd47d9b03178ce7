"""Build tiny encoder-decoders with random weights and save them with transformers.

transformers 5.23 runs only two experts of nllb_moe. Its MoE layers are therefore computed here from
the paper's description (arXiv 2207.04672, section 6.2). The rest of the model is theirs.

The result looks like a checkpoint from the hub.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeSparseMLP

_ROUTER_GAIN = 2.5  # so that neither chance nor a single logit chooses the experts


@dataclass(frozen=True)
class TinyPair:
    """A transformers config class with its arguments, and the model class."""

    config_class: str
    model_class: str
    settings: dict[str, Any]

    @property
    def family(self) -> str:
        """The model_type in its config.json."""
        model_type: str = getattr(transformers, self.config_class).model_type
        return model_type


def _switch(**settings: Any) -> TinyPair:
    sizes = {
        "vocab_size": 97,
        "d_model": 32,
        "d_ff": 40,
        "d_kv": 10,  # not d_model / heads
        "num_heads": 3,
        "num_layers": 4,
        "num_sparse_encoder_layers": 2,
        "num_decoder_layers": 4,
        "num_sparse_decoder_layers": 2,
        "num_experts": 5,
        "decoder_start_token_id": 0,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 20,
    }
    return TinyPair(
        "SwitchTransformersConfig",
        "SwitchTransformersForConditionalGeneration",
        {**sizes, **settings},
    )


def _nllb(**settings: Any) -> TinyPair:
    sizes = {
        "vocab_size": 97,
        "d_model": 32,
        "encoder_ffn_dim": 40,
        "decoder_ffn_dim": 40,
        "encoder_layers": 4,
        "decoder_layers": 4,
        "encoder_sparse_step": 2,
        "decoder_sparse_step": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "num_experts": 5,
        "max_position_embeddings": 64,
    }
    return TinyPair("NllbMoeConfig", "NllbMoeForConditionalGeneration", {**sizes, **settings})


PAIRS: dict[str, TinyPair] = {
    "switch": _switch(),
    "switch-full": _switch(expert_capacity=3, num_experts=3),  # experts that drop tokens
    "switch-uneven": _switch(
        num_layers=6,
        num_sparse_encoder_layers=2,  # layers 1 and 4
        num_decoder_layers=3,
        num_sparse_decoder_layers=3,  # all
        num_heads=4,
        d_kv=7,
        num_experts=8,
        relative_attention_num_buckets=32,
        relative_attention_max_distance=128,
        layer_norm_epsilon=0.03,
        decoder_start_token_id=5,
    ),
    "nllb": _nllb(),
    "nllb-uneven": _nllb(
        d_model=36,
        encoder_layers=3,
        encoder_sparse_step=3,
        decoder_sparse_step=1,
        decoder_layers=2,
        encoder_attention_heads=3,
        decoder_attention_heads=6,
        num_experts=2,
        moe_token_dropout=0.0,
        scale_embedding=False,
        decoder_start_token_id=7,
    ),
}


def pair_reference(name: str, seed: int = 0, **settings: Any) -> Any:
    """Return the transformers model with random float32 weights, eager, in eval mode.

    The weights keep hidden states near 1, so routing and attention affect the result.
    """
    torch.manual_seed(seed)
    tiny = PAIRS[name]
    config = getattr(transformers, tiny.config_class)(**{**tiny.settings, **settings})
    config._attn_implementation = "eager"
    model = getattr(transformers, tiny.model_class)(config)
    draw = torch.Generator().manual_seed(seed)
    seen: set[int] = set()
    for parameter_name, parameter in model.named_parameters():
        if parameter.data_ptr() not in seen:  # the embedding has several names
            seen.add(parameter.data_ptr())
            noise = torch.randn(parameter.shape, generator=draw)
            parameter.data.copy_(_scaled(parameter_name, noise))
    for module in model.modules():
        if isinstance(module, NllbMoeSparseMLP):
            module.forward = partial(_nllb_experts, module)
    return model.eval()


def _nllb_experts(layer: Any, hidden: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """Return the sum of each token's best two experts, weighted by normalised probabilities."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    out = torch.zeros_like(rows)
    for token, row in enumerate(rows):
        scores = (layer.router.classifier.weight.float() @ row.float()).softmax(-1)
        first, second = scores.argsort(descending=True)[:2].tolist()
        total = scores[first] + scores[second]
        for number in (first, second):
            expert = layer.experts[f"expert_{number}"]
            made = expert.fc2(expert.fc1(row).relu())
            out[token] += scores[number] / total * made * (1 - layer.experts.moe_token_dropout)
    return out.view_as(hidden)


def save_pair(name: str, folder: Path, seed: int = 0, **settings: Any) -> Any:
    """Write config.json and safetensors with hub-style names to `folder`; return the model."""
    model = pair_reference(name, seed, **settings)
    model.save_pretrained(folder)
    return model


def _scaled(name: str, noise: Tensor) -> Tensor:
    if noise.dim() == 1:
        return 0.3 * noise if name.endswith("bias") else 1 + 0.2 * noise
    if "shared" in name or "embed_tokens" in name or "relative_attention_bias" in name:
        return noise
    gain = _ROUTER_GAIN if "classifier" in name else 1.0
    if name.endswith((".q.weight", ".k.weight")):  # T5 does not scale its scores
        gain = 0.8
    return gain * noise / noise.shape[-1] ** 0.5
