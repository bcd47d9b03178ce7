"""Shapes that a test can make and run within seconds."""

from __future__ import annotations

from typing import Any

from benchmarks.shapes import shape


def tiny_olmoe(layers: int) -> dict[str, Any]:
    """Return OLMoE's shape with 64 narrow experts in each of so many layers."""
    return {
        **shape("olmoe", layers=layers),
        "hidden_size": 128,
        "intermediate_size": 32,
        "vocab_size": 512,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
