"""Keys and names of each family's file, and the switches that llama.cpp ignores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES, GGUFReader

from moeinf.models import family_of
from moeinf.runtime.gguf.writing.architectures import CannotExport, Written, written
from tests.exported import FAMILIES, checkpoint, exported
from tests.tiny import tiny_config
from tests.tiny_configs import TINY
from tests.tiny_families import YARN, Tiny, deepseek, gpt_oss, mixtral, olmoe, qwen2, qwen3


def described(tiny: Tiny) -> Written:
    values = tiny_config(tiny).to_dict()
    family = family_of(values)
    return written(family.model_type, family.parse(values))


@pytest.mark.parametrize("name", FAMILIES)
def test_names_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    """Every tensor has a name that llama.cpp's own package gives to the architecture."""
    model = exported(checkpoint(name, tmp_path / "checkpoint"), tmp_path, "bf16")
    reader = GGUFReader(model.file)
    field = reader.get_field("general.architecture")
    assert field is not None
    arch = next(a for a in MODEL_ARCH if MODEL_ARCH_NAMES[a] == field.contents())
    known = {TENSOR_NAMES[tensor] for tensor in MODEL_TENSORS[arch]}
    for tensor in reader.tensors:
        stem = tensor.name.removesuffix(".weight").removesuffix(".bias")
        head, _, rest = stem.partition(".")
        plain = f"blk.{{bid}}.{rest.partition('.')[2]}" if head == "blk" else stem
        assert plain in known, tensor.name
    counted = sum(model.made.tensors.values())
    assert counted == len(reader.tensors)
    assert model.made.size_bytes == model.file.stat().st_size


def test_keys_of_a_model() -> None:
    about = described(TINY["qwen3"])
    assert about.architecture == "qwen3moe"
    assert about.keys["attention.key_length"] == 12
    assert about.keys["expert_feed_forward_length"] == 18
    assert about.keys["attention.head_count_kv"] == 2
    assert about.keys["rope.dimension_count"] == 12
    assert not about.copies_embedding


def test_yarn() -> None:
    """llama.cpp multiplies by 0.1 · ln(factor) + 1 itself; the key has what is left."""
    about = described(olmoe(rope_parameters={**YARN, "factor": 5.0, "attention_factor": 2.0}))
    assert about.keys["rope.scaling.type"] == "yarn"
    assert about.keys["rope.scaling.original_context_length"] == 24
    assert about.keys["rope.scaling.attn_factor"] == pytest.approx(2.0 / 1.1609437912434)
    assert about.notes == ()
    about = described(olmoe(rope_parameters={**YARN, "factor": 5.0, "truncate": False}))
    assert len(about.notes) == 1


def test_windows_of_gpt_oss() -> None:
    about = described(gpt_oss(sliding_window=9))
    assert about.keys["attention.sliding_window"] == 9


REFUSED: list[tuple[Tiny, str]] = [
    (olmoe(clip_qkv=0.9), "clip_qkv"),
    (olmoe(norm_topk_prob=True), "norm_topk_prob"),
    (olmoe(attention_bias=True), "attention_bias"),
    (olmoe(num_key_value_heads=2), "num_key_value_heads"),
    (mixtral(sliding_window=7), "sliding_window"),
    (TINY["mixtral-window"], "sliding_window"),
    (
        mixtral(
            rope_parameters={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 1e4,
            }
        ),
        "llama3",
    ),
    (qwen3(norm_topk_prob=False), "norm_topk_prob = false"),
    (qwen3(decoder_sparse_step=2), "layers without experts"),
    (qwen2(norm_topk_prob=True), "norm_topk_prob"),
    (TINY["gpt-oss-all-experts"], "layer_types"),
    (TINY["deepseek-groups"], "group_limited_greedy"),
    (TINY["deepseek-bare"], "attention_bias"),
    (deepseek(q_lora_rank=None, rope_parameters={**YARN, "factor": 4.0}), "mscale_all_dim"),
    (TINY["phimoe"], "phimoe: the family"),
]


@pytest.mark.parametrize(("tiny", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_llama_cpp_computes_otherwise(tiny: Any, words: str) -> None:
    with pytest.raises(CannotExport, match=words):
        described(tiny)
