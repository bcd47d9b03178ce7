"""Test configs and tensor names of encoder-decoders, which come from downloaded files."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moeinf.models.base import ExpertPart, ModelDataError
from moeinf.models.families import FAMILIES
from moeinf.models.seq2seq.switch_transformers import without_overflow

SWITCH = {
    "vocab_size": 50,
    "d_model": 16,
    "d_ff": 24,
    "d_kv": 4,
    "num_heads": 2,
    "num_layers": 12,
    "num_sparse_encoder_layers": 6,
    "num_decoder_layers": 4,
    "num_sparse_decoder_layers": 1,
    "num_experts": 8,
}
NLLB = {
    "vocab_size": 50,
    "d_model": 16,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "encoder_layers": 24,
    "decoder_layers": 8,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "num_experts": 8,
}
CONFIGS = {"switch_transformers": SWITCH, "nllb-moe": NLLB}


def part(family: str, name: str) -> ExpertPart | None:
    return FAMILIES[family].expert(name, FAMILIES[family].parse(CONFIGS[family]))


def test_layers_count_on_from_the_encoder() -> None:
    """Switch: encoder 1, 3, … 11 are 0 … 5, decoder 1 is 6. NLLB: every fourth."""
    name = "{}.block.{}.layer.{}.mlp.experts.expert_7.{}.weight"
    switch = "switch_transformers"
    assert part(switch, name.format("encoder", 11, 1, "wi")) == ExpertPart(5, 7, "up")
    assert part(switch, name.format("decoder", 1, 2, "wo")) == ExpertPart(6, 7, "down")
    name = "{}.layers.{}.ffn.experts.expert_0.{}"
    assert part("nllb-moe", name.format("encoder", 23, "fc1.bias")) == ExpertPart(5, 0, "up_bias")
    assert part("nllb-moe", name.format("model.decoder", 7, "fc2.weight")) == ExpertPart(
        7, 0, "down"
    )
    assert part("nllb-moe", "encoder.layers.0.ffn.fc1.weight") is None


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("switch_transformers", "encoder.block.2.layer.1.mlp.experts.expert_0.wi.weight"),
        ("switch_transformers", "encoder.block.1.layer.2.mlp.experts.expert_0.wi.weight"),
        ("switch_transformers", "decoder.block.1.layer.2.mlp.experts.expert_8.wi.weight"),
        ("nllb-moe", "decoder.layers.11.ffn.experts.expert_0.fc1.weight"),
        ("nllb-moe", "decoder.layers.3.ffn.experts.expert_0.fc3.weight"),
    ],
)
def test_experts_that_cannot_be(family: str, name: str) -> None:
    with pytest.raises(ModelDataError, match="expert"):
        part(family, name)


@pytest.mark.parametrize(
    ("family", "changes", "problem"),
    [
        ("switch_transformers", {"dense_act_fn": "gelu"}, "dense_act_fn"),
        ("switch_transformers", {"router_bias": True}, "router_bias"),
        ("switch_transformers", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("switch_transformers", {"num_sparse_encoder_layers": 0}, "num_sparse_encoder_layers"),
        ("switch_transformers", {"num_sparse_decoder_layers": 5}, "5 sparse decoder layers of 4"),
        ("switch_transformers", {"decoder_start_token_id": 50}, "decoder_start_token_id"),
        ("nllb-moe", {"second_expert_policy": "random"}, "second_expert_policy"),
        ("nllb-moe", {"moe_eval_capacity_token_fraction": 0.5}, "moe_eval_capacity"),
        ("nllb-moe", {"decoder_ffn_dim": 25}, "decoder_ffn_dim"),
        ("nllb-moe", {"encoder_attention_heads": 3}, "3 heads"),
        ("nllb-moe", {"decoder_layers": 3}, "no layer with experts"),
        ("nllb-moe", {"num_experts": 1}, "2 experts"),
        ("nllb-moe", {"d_model": 3}, "d_model = 3 must be an integer from 4"),
    ],
)
def test_refused_by_name(family: str, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelDataError, match=problem):
        FAMILIES[family].parse({**CONFIGS[family], **changes})


def test_an_expert_takes_the_first_tokens() -> None:
    ids = torch.tensor([[1], [0], [1], [1], [0], [1]])
    assert without_overflow(ids, 2).flatten().tolist() == [1, 0, 1, -1, 0, -1]
