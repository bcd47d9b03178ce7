"""Tiny configurations of Kimi-K2 and K2.5: DeepSeek-V3's layers, as they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.tiny_families import YARN, Tiny, deepseek_v3

KIMI_FAMILIES = ("kimi_k2", "kimi_k25")
_INNER = "language_model."
_SIZES = {"first_k_dense_replace": 1, "num_key_value_heads": 3, "n_group": 1, "topk_group": 1}
_YARN = {**YARN, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0}


def _kimi(family: str, **settings: Any) -> Tiny:
    sizes = {**_SIZES, "rope_parameters": _YARN, "routed_scaling_factor": 2.827, **settings}
    return Tiny(family, "DeepseekV3Config", deepseek_v3(**sizes).settings)


KIMI: dict[str, Tiny] = {
    "kimi-k2": _kimi("kimi_k2"),
    "kimi-k2-all-experts": _kimi("kimi_k2", num_experts_per_tok=8, n_shared_experts=2),
    "kimi-k2-one-expert": _kimi(
        "kimi_k2", num_experts_per_tok=1, tie_word_embeddings=True, attention_bias=True
    ),
    "kimi-k25": _kimi("kimi_k25"),
    "kimi-k25-one-expert": _kimi(
        "kimi_k25", num_experts_per_tok=1, v_head_dim=22, attention_bias=True
    ),
    "kimi-k25-all-experts": _kimi(
        "kimi_k25", num_experts_per_tok=8, tie_word_embeddings=True, num_hidden_layers=2
    ),
}


def name_as_published(family: str, folder: Path) -> None:
    """Rewrite a checkpoint of DeepSeek-V3: K2 has another model_type, K2.5 also a vision part."""
    path = folder / "config.json"
    path.write_text(json.dumps(config_as_published(family, json.loads(path.read_text()))))
    for file in folder.glob("*.safetensors") if family == "kimi_k25" else ():
        tensors = {_INNER + name: tensor for name, tensor in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})


def config_as_published(family: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the config of such a checkpoint; K2.5 has DeepSeek-V3's inside."""
    text = {**values, "num_nextn_predict_layers": 0}
    if family == "kimi_k2":
        return {**text, "model_type": family}
    tied = values.get("tie_word_embeddings", False)
    both = {"model_type": family, "text_config": text, "tie_word_embeddings": tied}
    return {**both, "vision_config": {}}
