"""Keys and names of each family's file, and the switches that llama.cpp ignores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, MODEL_TENSOR, MODEL_TENSORS, TENSOR_NAMES, GGUFReader

from moeinf.models.config import Fields
from moeinf.models.families import family_of
from moeinf.models.layers.rope import attention_factor, inverse_frequencies, parse_rope
from moeinf.runtime.gguf.checkpoint import open_gguf
from moeinf.runtime.gguf.writing.architectures import written
from moeinf.runtime.gguf.writing.description import CannotExport, Written
from tests.exported import FAMILIES, STREAMS, checkpoint, exported
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
    # llama.cpp reads ROPE_FREQS also where its package does not list it.
    known = {TENSOR_NAMES[tensor] for tensor in (*MODEL_TENSORS[arch], MODEL_TENSOR.ROPE_FREQS)}
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
    (olmoe(rope_parameters=TINY["mixtral-window"].settings["rope_parameters"]), "llama3"),
    (qwen3(norm_topk_prob=False), "norm_topk_prob = false"),
    (qwen3(decoder_sparse_step=2), "layers without experts"),
    (qwen2(norm_topk_prob=True), "norm_topk_prob"),
    (TINY["gpt-oss-all-experts"], "layer_types"),
    (TINY["deepseek-groups"], "group_limited_greedy"),
    (TINY["deepseek-bare"], "attention_bias"),
    (deepseek(q_lora_rank=None, rope_parameters={**YARN, "factor": 4.0}), "mscale_all_dim"),
    (TINY["phimoe"], "attention_bias = false"),
    (FAMILIES["phimoe"].but(router_jitter_noise=0.2), "router_jitter_noise"),
    (TINY["qwen3.5"], "linear_value_head_dim"),
    (TINY["qwen4"], "output_gate_type = silu"),
    (STREAMS["qwen4"].but(norm_topk_prob=False), "norm_topk_prob = false"),
    (STREAMS["qwen4"].but(ple_layer_ids=[1, 2]), "more than one of ple_layer_ids"),
    (STREAMS["qwen4"].but(ple_embed_dim=20), "ple_embed_dim"),
    (TINY["deepseek-v4"], "compress_rates"),
    (STREAMS["deepseek-v4"].but(hc_mult=3), "hc_mult = 3"),
    (STREAMS["deepseek-v4"].but(mlp_layer_types=["moe", "hash_moe", "moe", "moe"]), "hash_moe"),
    (TINY["glm5-next"], "linear_num_heads"),
    (STREAMS["glm5-next"].but(index_kpool=1), "index_kpool = 1"),
    (STREAMS["glm5-next"].but(hc_mult=1), "hc_mult = 1"),
]


@pytest.mark.parametrize(("tiny", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_llama_cpp_computes_otherwise(tiny: Any, words: str) -> None:
    with pytest.raises(CannotExport, match=words):
        described(tiny)


def test_families_without_a_counterpart() -> None:
    with pytest.raises(CannotExport, match="switch_transformers: the family"):
        written("switch_transformers", None)


def test_frequencies_of_llama3(tmp_path: Path) -> None:
    """They are a tensor of divisors, which is pulled again as longrope."""
    model = exported(checkpoint("mixtral-llama3", tmp_path / "checkpoint"), tmp_path, "f32")
    config = open_gguf(model.file).config
    rope = parse_rope(Fields(config), config["max_position_embeddings"], 1e4)
    assert rope.kind == "longrope"
    theirs = family_of(values := tiny_config(FAMILIES["mixtral-llama3"]).to_dict()).parse(values)
    torch.testing.assert_close(
        inverse_frequencies(rope, 64), inverse_frequencies(theirs.body.rope, 64)
    )
    assert attention_factor(rope) == 1
    assert rope.short == rope.long


def test_phimoe(tmp_path: Path) -> None:
    """The one factor of a file is both of ours."""
    model = exported(checkpoint("phimoe", tmp_path / "checkpoint"), tmp_path, "f32")
    rope = open_gguf(model.file).config["rope_parameters"]
    assert rope["short_mscale"] == rope["long_mscale"] == pytest.approx(1.2)
    assert rope["long_factor"] == pytest.approx([1 + 0.4 * pair for pair in range(32)])
    assert rope["original_max_position_embeddings"] == 256
    about = described(FAMILIES["phimoe"])
    assert len(about.notes) == 1
