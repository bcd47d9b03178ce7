"""The keys of a tokenizer: tokens, types, merges, scores and the name of the splitting."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from moeinf.runtime.gguf.vocabulary import tokenizer_files
from moeinf.runtime.gguf.word_patterns import WORDS
from moeinf.runtime.gguf.writing.description import CannotExport
from moeinf.runtime.gguf.writing.vocabulary import TokenType, vocabulary
from tests.tokenizer_files import document, split, token, unigram

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"\p{N}| ", r"\p{N}{1,3}| ")
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
HAN_KANA = r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+"
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
PLAIN = {**BYTE_LEVEL, "use_regex": False}
DIGITS = {"type": "Digits", "individual_digits": True}


def bpe(merges: list[Any], **about: Any) -> dict[str, Any]:
    model = {**document()["model"], "merges": merges}
    model["vocab"] = {**model["vocab"], "ab": 258, "abc": 259}
    return document(model=model, **about)


def sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


def test_tokens_and_types() -> None:
    keys = vocabulary(
        document(added_tokens=[token(256, "<s>"), token(257, "mine", special=False)]), 260, "olmoe"
    )
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, np.ndarray)
    assert tokens[0] == "!"
    assert tokens[256:] == ["<s>", "mine", "[PAD258]", "[PAD259]"]
    assert set(types[:256].tolist()) == {TokenType.NORMAL}
    wanted = [TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNUSED, TokenType.UNUSED]
    assert types[256:].tolist() == wanted
    assert keys["tokenizer.ggml.merges"] == []
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")


def test_merges_of_both_spellings() -> None:
    regular = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    for merges in (["a b", "ab c"], [["a", "b"], ["ab", "c"]]):
        keys = vocabulary(bpe(merges, pre_tokenizer=regular), 260, "olmoe")
        assert keys["tokenizer.ggml.merges"] == ["a b", "ab c"]


@pytest.mark.parametrize(
    ("splitting", "name"),
    [
        ({**BYTE_LEVEL, "use_regex": True}, "gpt-2"),
        (sequence(split(QWEN2), PLAIN), "qwen2"),
        (sequence(split(LLAMA3), PLAIN), "dbrx"),
        (sequence(split(GPT4O), PLAIN), "gpt-4o"),
        (sequence(DIGITS, BYTE_LEVEL), "refact"),
        (sequence(split(GPT2), PLAIN), "gpt-2"),
        (sequence(split(r"\p{N}"), split(GPT2), PLAIN), "refact"),
        (
            sequence(split(r"\p{N}{1,3}"), split(HAN_KANA), split("long"), PLAIN),
            "deepseek-v3",
        ),
        (
            sequence(split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split("long"), PLAIN),
            "deepseek-v3",
        ),
        (
            sequence(
                split("[\r\n]"), split(r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿ…]+"), split(r"\s+$"), DIGITS, PLAIN
            ),
            "deepseek-llm",
        ),
        *(
            (sequence(*map(split, WORDS[name].patterns), PLAIN), name)
            for name in ("kimi-k2", "laguna", "exaone-moe", "qwen35", "tekken")
        ),
    ],
)
def test_the_name_of_the_splitting(splitting: dict[str, Any], name: str) -> None:
    keys = vocabulary(bpe(["a b"], pre_tokenizer=splitting), 260, "olmoe")
    assert keys["tokenizer.ggml.pre"] == name


def test_the_same_splitting_has_other_names() -> None:
    tokenizer = bpe(["a b"], pre_tokenizer=sequence(split(LLAMA3), PLAIN))
    assert vocabulary(tokenizer, 260, "glm4moe")["tokenizer.ggml.pre"] == "glm4"
    tokenizer["model"]["ignore_merges"] = True
    assert vocabulary(tokenizer, 260, "olmoe")["tokenizer.ggml.pre"] == "llama-bpe"


def test_sentencepiece() -> None:
    """Scores order the joins as the merges do; bytes and the unknown token have their types."""
    vocab = {"<unk>": 0, "<s>": 1, "<0x0A>": 2, "\u2581": 3, "a": 4, "b": 5, "ab": 6, "\u2581ab": 7}
    model = {**document()["model"], "vocab": vocab, "unk_token": "<unk>", "byte_fallback": True}
    model["merges"] = ["a b", "\u2581 ab", "\u2581a b"]
    prepend = {"type": "Prepend", "prepend": "\u2581"}
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    tokenizer = document(
        added_tokens=[token(0, "<unk>"), token(1, "<s>")],
        normalizer={"type": "Sequence", "normalizers": [prepend, space]},
        pre_tokenizer=None,
        model=model,
    )
    keys = vocabulary(tokenizer, 8, "llama")
    assert keys["tokenizer.ggml.model"] == "llama"
    types, scores = keys["tokenizer.ggml.token_type"], keys["tokenizer.ggml.scores"]
    assert isinstance(types, np.ndarray)
    assert isinstance(scores, np.ndarray)
    assert types.tolist() == [2, 3, 6, 1, 1, 1, 1, 1]
    assert scores.tolist() == [-3, -3, -3, -3, -3, -3, 0, -1]
    assert keys["tokenizer.ggml.add_space_prefix"] is True


def test_gemma4() -> None:
    """It has merges, and the markers of tool calls are no control tokens."""
    vocab = {
        "<pad>": 0,
        "<bos>": 1,
        "<|tool_call>": 2,
        "<0x0A>": 3,
        "\u2581": 4,
        "a": 5,
        "\u2581a": 6,
    }
    model = {**document()["model"], "vocab": vocab, "byte_fallback": True, "merges": ["\u2581 a"]}
    tokenizer = document(
        added_tokens=[token(0, "<pad>"), token(1, "<bos>"), token(2, "<|tool_call>")],
        normalizer={"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        pre_tokenizer=None,
        model=model,
    )
    keys = vocabulary(tokenizer, 8, "gemma4")
    assert keys["tokenizer.ggml.model"] == "gemma4"
    assert keys["tokenizer.ggml.merges"] == ["\u2581 a"]
    types = keys["tokenizer.ggml.token_type"]
    assert isinstance(types, np.ndarray)
    assert types.tolist() == [3, 3, 4, 6, 1, 1, 1, 5]
    stored = {**keys, "tokenizer.ggml.token_type": types.tolist(), "tokenizer.ggml.bos_token_id": 1}
    again = json.loads(tokenizer_files(stored)["tokenizer.json"])
    assert again["model"]["merges"] == [["\u2581", "a"]]
    assert again["normalizer"] == tokenizer["normalizer"]


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        (unigram(), "no such tokenizer"),
        (bpe(["a b"], pre_tokenizer=sequence(split("other"), PLAIN)), "no name"),
        (document(normalizer={"type": "Lowercase"}), "no normalizer Lowercase"),
        (document(added_tokens=[token(300, "<s>")]), "a token 300"),
        (document(added_tokens=[token(256, "a")]), "the same text"),
    ],
)
def test_what_llama_cpp_lacks(tokenizer: dict[str, Any], words: str) -> None:
    with pytest.raises(CannotExport, match=words):
        vocabulary(tokenizer, 260, "olmoe")
