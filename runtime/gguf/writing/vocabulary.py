"""Describe a tokenizer.json in the keys that llama.cpp reads.

There are two kinds: byte-level BPE ("gpt2"), and BPE with byte fallback, which is SentencePiece's
("llama", and "gemma4" with its merges). llama.cpp knows ways to split a text before BPE by name
only (tokenizer.ggml.pre).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from moeinf.runtime.gguf.word_patterns import WORDS
from moeinf.runtime.gguf.writing.description import CannotExport
from moeinf.runtime.gguf.writing.writer import Value


class TokenType(IntEnum):
    """The types of tokens, by llama.cpp's number."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_CODE = re.compile(r"\\x\{([0-9a-f]{1,5})\}")
_GPT2, _DIGITS = WORDS["gpt-2"].patterns[0], WORDS["refact"].patterns[0]
# Markers that llama.cpp shows in an answer, so that its parser of tool calls sees them.
_SHOWN = ("channel", "tool_call", "tool_response")
_GEMMA4_SHOWN = {'<|"|>', *(f"<|{w}>" for w in _SHOWN), *(f"<{w}|>" for w in _SHOWN)}


def _spelt(expression: str) -> str:
    r"""Return an expression with characters in place of \x{…}, and the ends of lines escaped."""
    found = _CODE.sub(lambda match: chr(int(match[1], 16)), expression)
    return found.replace("\r", r"\r").replace("\n", r"\n")


_NAMED = ("gpt-2", "refact", "qwen2", "qwen35", "gpt-4o", "tekken", "kimi-k2", "laguna")
_PRE = {tuple(map(_spelt, WORDS[name].patterns)): name for name in (*_NAMED, "exaone-moe")}
_LLAMA3 = tuple(map(_spelt, WORDS["llama3"].patterns))
_BEGINNINGS = {  # the first expressions, where the others are long lists of characters
    (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+"): "deepseek-v3",
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+"): "deepseek-coder",
    (r"[\r\n]", r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿ"): "deepseek-llm",
}


def vocabulary(tokenizer: Mapping[str, Any], count: int, architecture: str) -> dict[str, Value]:
    """Return the tokenizer's keys for a model with `count` rows in its embedding.

    tokenizer: the content of tokenizer.json. Raises CannotExport for a kind that llama.cpp does
    not have, and for a vocabulary that does not fit the model.
    """
    model = tokenizer.get("model")
    if not isinstance(model, Mapping) or model.get("type", "BPE") != "BPE":
        raise CannotExport("tokenizer.json: llama.cpp has no such tokenizer (only BPE)")
    tokens, types = _tokens(tokenizer, model, count)
    merges = [_joined(pair) for pair in model.get("merges") or ()]
    keys: dict[str, Value] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, "<i4"),
    }
    if model.get("byte_fallback") and architecture == "gemma4":
        shown = [text in _GEMMA4_SHOWN for text in tokens]
        keys["tokenizer.ggml.model"], keys["tokenizer.ggml.merges"] = "gemma4", merges
        kinds = np.where(shown, int(TokenType.USER_DEFINED), types)
        keys["tokenizer.ggml.token_type"] = kinds.astype("<i4")
        keys["tokenizer.ggml.add_space_prefix"] = False
        return keys
    if model.get("byte_fallback"):
        keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"] = "llama", "default"
        keys["tokenizer.ggml.scores"] = _scores(tokens, merges)
        keys["tokenizer.ggml.add_space_prefix"] = _prepends(tokenizer)
        return keys
    keys["tokenizer.ggml.model"] = "gpt2"
    keys["tokenizer.ggml.pre"] = _pre(tokenizer, bool(merges), architecture)
    keys["tokenizer.ggml.merges"] = merges
    return keys


def _tokens(
    tokenizer: Mapping[str, Any], model: Mapping[str, Any], count: int
) -> tuple[list[str], list[int]]:
    """Return the text and type of every token; rows of the embedding without one are unused."""
    unknown = model.get("unk_token")
    names: dict[int, tuple[str, int]] = {}
    for text, number in model["vocab"].items():
        kind = TokenType.NORMAL
        if text == unknown:
            kind = TokenType.UNKNOWN
        elif model.get("byte_fallback") and _BYTE.fullmatch(text):
            kind = TokenType.BYTE
        names[number] = text, kind
    for added in tokenizer.get("added_tokens") or ():
        kind = TokenType.CONTROL if added.get("special") else TokenType.USER_DEFINED
        if added["content"] != unknown:
            names[added["id"]] = added["content"], kind
    if max(names, default=0) >= count:
        raise CannotExport(
            f"tokenizer.json has a token {max(names)}; the model's embedding has {count} rows"
        )
    found = [names.get(n, (f"[PAD{n}]", TokenType.UNUSED)) for n in range(count)]
    if len({text for text, _ in found}) < count:
        raise CannotExport("tokenizer.json: two tokens have the same text; llama.cpp refuses them")
    return [text for text, _ in found], [int(kind) for _, kind in found]


def _joined(pair: str | Sequence[str]) -> str:
    return pair if isinstance(pair, str) else " ".join(pair)


def _scores(tokens: Sequence[str], merges: Sequence[str]) -> Value:
    """Return a score for each token: SentencePiece joins those first that have the highest.

    Merges are in the order in which tokenizer.json applies them. A token without one is never
    joined from others.
    """
    rank: dict[str, int] = {}
    for place, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", ""), place)
    return np.array([-float(rank.get(text, len(merges))) for text in tokens], "<f4")


def _prepends(tokenizer: Mapping[str, Any]) -> bool:
    """Return True if the tokenizer puts a space in front of a text."""
    for part in _parts(tokenizer.get("normalizer"), "normalizers"):
        if part.get("type") == "Prepend":
            return True
    return any(
        part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never"
        for part in _parts(tokenizer.get("pre_tokenizer"), "pretokenizers")
    )


def _parts(value: Any, key: str) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a normalizer or a pre-tokenizer, in order."""
    if not isinstance(value, Mapping):
        return
    if value.get("type") == "Sequence":
        for part in value.get(key) or ():
            yield from _parts(part, key)
        return
    yield value


def _pre(tokenizer: Mapping[str, Any], has_merges: bool, architecture: str) -> str:
    """Return llama.cpp's name for the way in which the tokenizer splits a text.

    Without merges every byte is a token, however a text is split.
    """
    for part in _parts(tokenizer.get("normalizer"), "normalizers"):
        if part.get("type") != "NFC":  # llama.cpp leaves it out, too
            raise CannotExport(f"tokenizer.json: llama.cpp has no normalizer {part.get('type')}")
    found = tuple(_splits(tokenizer))
    if not has_merges:
        return "gpt-2"
    if found == _LLAMA3:
        if architecture.startswith("glm"):
            return "glm4"
        return "llama-bpe" if tokenizer["model"].get("ignore_merges") else "dbrx"
    if found in _PRE:
        return _PRE[found]
    for first, name in _BEGINNINGS.items():
        if len(found) > len(first) and all(map(str.startswith, found, first)):
            return name
    raise CannotExport(
        "tokenizer.json: llama.cpp has no name for the way in which it splits texts (pre_tokenizer)"
    )


def _splits(tokenizer: Mapping[str, Any]) -> Iterator[str]:
    """Yield the expressions by which texts are split, each in one spelling."""
    for part in _parts(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        kind = part.get("type")
        if kind == "Split":
            yield _spelt(str((part.get("pattern") or {}).get("Regex")))
        elif kind == "Digits":
            yield _DIGITS if part.get("individual_digits") else f"{_DIGITS}+"
        elif kind != "ByteLevel":
            yield str(kind)
        elif part.get("use_regex", True):
            yield _GPT2
