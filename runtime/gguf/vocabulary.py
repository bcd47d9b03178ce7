"""Write tokenizer.json and its companions from the metadata of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of a byte-level BPE tokenizer: name -> content."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    kinds = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(tokens, list) or not isinstance(kinds, list) or len(tokens) != len(kinds):
        raise BadCheckpoint("tokenizer.ggml.tokens and token_type do not fit")
    if not all(isinstance(text, str) for text in tokens):
        raise BadCheckpoint("tokenizer.ggml.tokens is not a list of texts")
    special = [
        {"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": kind == 3}
        for number, (text, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind in (3, 4)
    ]  # fmt: skip
    flags = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    document = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {"type": "ByteLevel", **flags},
        "decoder": {"type": "ByteLevel", **flags},
        "model": {
            "type": "BPE",
            "vocab": {text: number for number, text in enumerate(tokens)},
            "merges": metadata.get("tokenizer.ggml.merges", []),
        },
    }  # fmt: skip
    config = {
        key: metadata[name]
        for key, name in {"chat_template": "tokenizer.chat_template"}.items()
        if name in metadata
    }
    ends = {"eos_token_id": metadata.get("tokenizer.ggml.eos_token_id")}
    return {
        "tokenizer.json": json.dumps(document).encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "generation_config.json": json.dumps(ends).encode(),
    }
