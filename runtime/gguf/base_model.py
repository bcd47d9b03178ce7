"""Read which repository a GGUF file was made from, and whether its vocabulary is the file's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moeinf.runtime.gguf.tokens import UNUSED

# A source is what the file was converted from. A base model may be an ancestor with other weights.
_SOURCES = (
    "general.source.huggingface.repository",
    "general.source.repo_url",
    "general.source.url",
)
_ANCESTOR = "general.base_model.0.repo_url"
_NAME = re.compile(
    r"(?:https?://(?:huggingface\.co|hf\.co)/)?([\w-][\w.-]{0,95}/[\w-][\w.-]{0,95})/?", re.ASCII
)


def base_names(metadata: Mapping[str, Any], card: str | None) -> list[str]:
    """Return the repositories ORG/NAME that a file may have been made from, the likeliest first.

    card: what the model card of the file's own repository names, or None.
    """
    said = [*(metadata.get(key) for key in _SOURCES), card, metadata.get(_ANCESTOR)]
    matches = (_NAME.fullmatch(name) for name in said if isinstance(name, str))
    return list(dict.fromkeys(match[1] for match in matches if match is not None))


def misfit(tokenizer: Mapping[str, Any], metadata: Mapping[str, Any]) -> str | None:
    """Return in which token a tokenizer.json differs from a file's vocabulary, or None.

    Both need the same text for each id. A file may have unused tokens at ids that the tokenizer
    lacks. llama.cpp writes a plain space in added tokens.
    """
    tokens, kinds = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens") or []
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict) or not isinstance(added, list):
        return "it has no vocabulary of texts and ids"
    texts: dict[object, object] = {number: text for text, number in vocabulary.items()}
    spaced: dict[object, object] = {
        item.get("id"): item.get("content") for item in added if isinstance(item, dict)
    }
    for number, text in {**texts, **spaced}.items():
        if type(number) is not int or not 0 <= number < len(tokens) or not isinstance(text, str):
            return f"its token {str(number)[:20]} is not in the file"
        same = tokens[number] in (text, texts.get(number))
        if not same and not (number in spaced and tokens[number] == text.replace("\u2581", " ")):
            return f"its token {number} is {text[:40]!r}, the file's is {tokens[number][:40]!r}"
    for number, kind in enumerate(kinds):
        if kind != UNUSED and number not in texts and number not in spaced:
            return f"it lacks token {number}, {tokens[number][:40]!r}"
    return None
