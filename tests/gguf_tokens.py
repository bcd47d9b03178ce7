"""Write a byte-level vocabulary into a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf


def add_tokens(writer: gguf.GGUFWriter, tokenizer: Mapping[str, Any]) -> int:
    """Write the vocabulary; return its size."""
    vocabulary = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    added = {token["id"]: token for token in tokenizer.get("added_tokens", [])}
    words = {number: text for text, number in vocabulary}
    words |= {number: token["content"] for number, token in added.items()}
    count = max(words) + 1
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([words.get(number, f"[PAD{number}]") for number in range(count)])
    writer.add_token_types([3 if number in added else 1 for number in range(count)])
    merges = tokenizer["model"].get("merges", [])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    return count
