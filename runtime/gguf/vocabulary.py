"""Write the tokenizer files of a GGUF file, from its metadata alone.

The keys are those of docs/gguf.md in the repository ggml. Where a key is missing, its default is
llama.cpp's, but an unknown `tokenizer.ggml.pre` is an error.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint
from moeinf.runtime.gguf.word_patterns import WORDS, Words
from moeinf.runtime.text.tokenizer_trial import Trial

_KEY = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)  # tokenizer.ggml.token_type
_MAX_TOKENS, _MAX_MERGES = 1 << 20, 1 << 21
_MAX_CHARACTERS = 1 << 24  # of all tokens; the largest vocabularies have some 2 million
_MAX_TEMPLATE = 1 << 22  # characters
_SPACE = "\u2581"  # a space in a token
# Texts that end an answer or a turn in every model that has them as one token. Some files mark
# them as text, which would let a user's text end a turn.
_ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn>"
    " <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance>"
    " <eos> <turn|> <|tool_response> <\uff5cend\u2581of\u2581sentence\uff5c> [e~[".split()
)
_KEEP_SPACE = {"<unk>", "<s>", "<|endoftext|>"}  # of Phi-3's special tokens


@dataclass(frozen=True)
class _Vocabulary:
    """The checked metadata. Ids are places in `texts`, or None."""

    texts: list[str]
    kinds: list[int]
    bos: int | None
    eos: int | None
    unknown: int | None
    padding: int | None
    ends: list[int]  # every id that ends an answer
    adds_bos: bool
    adds_eos: bool
    strips: bool  # spaces after special tokens belong to them: Phi-3


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Return tokenizer.json, tokenizer_config.json and generation_config.json by name.

    tokenizer.json is not tried: load it with tokenizer_trial.try_tokenizer first. Raises
    BadCheckpoint, which names the key, if the metadata is damaged or of a kind that is not
    supported.
    """
    kind, pre = _text(metadata, "model"), _text(metadata, "pre")
    if kind == "llama":
        found = _vocabulary(metadata, {"bos": 1, "eos": 2, "unknown": 0}, adds_bos=True)
        document = _sentencepiece(metadata, found)
    elif kind in ("gpt2", "gemma4"):
        words = _words("gemma4" if kind == "gemma4" else pre)
        merges = _merges(metadata)
        found = _vocabulary(metadata, {}, words.adds_bos, merges)
        if not merges and any(map(_needs_merges, found.texts, found.kinds)):
            raise BadCheckpoint("tokenizer.ggml.merges is missing: its tokens are made by merges")
        document = _dumped(_byte_pairs(found, merges, words))
    else:
        raise BadCheckpoint(
            f"tokenizer.ggml.model: {str(kind)[:80]!r} is not supported (expected gpt2 or llama)"
        )
    return {
        "tokenizer.json": document,
        "tokenizer_config.json": _dumped(_config(metadata, found)),
        "generation_config.json": _dumped(_generation(found)),
    }


def _words(pre: str | None) -> Words:
    if pre not in WORDS:
        name = "is missing" if pre is None else f"{pre[:80]!r} is unknown"
        raise BadCheckpoint(
            f"tokenizer.ggml.pre {name}: without it nothing says how this model cuts text into "
            "words. Use a newer GGUF of the model, or its safetensors"
        )
    return WORDS[pre]


def _vocabulary(
    metadata: Mapping[str, Any],
    defaults: Mapping[str, int],
    adds_bos: bool,
    merges: list[tuple[str, str]] | None = None,
) -> _Vocabulary:
    """Read what all kinds have. Raises BadCheckpoint."""
    texts = _texts(metadata)
    merged = _merged(texts, merges or [])
    kinds = _numbers(metadata, "token_type", len(texts))
    if not all(type(kind) is int for kind in kinds):
        raise BadCheckpoint("tokenizer.ggml.token_type has a value that is no integer")
    ids = {
        name: _id(metadata, f"{key}_token_id", len(texts), defaults.get(name))
        for name, key in (
            ("bos", "bos"), ("eos", "eos"), ("eot", "eot"), ("eom", "eom"),
            ("unknown", "unknown"), ("padding", "padding"),
        )
    }  # fmt: skip
    ends = _end_ids(texts, merged, (ids["eos"], ids["eot"], ids["eom"]))
    for number in ends:
        kinds[number] = _CONTROL
    name = metadata.get("general.name")
    flags = {
        end: _flag(metadata, f"add_{end}_token", default and ids[end] is not None)
        for end, default in (("bos", adds_bos), ("eos", False))
    }
    for end, wanted in flags.items():
        if wanted and ids[end] is None:
            raise BadCheckpoint(f"tokenizer.ggml.add_{end}_token is true without {end}_token_id")
    return _Vocabulary(
        texts=texts,
        kinds=kinds,
        bos=ids["bos"],
        eos=ids["eos"],
        unknown=ids["unknown"],
        padding=ids["padding"],
        ends=ends,
        adds_bos=flags["bos"],
        adds_eos=flags["eos"],
        strips=isinstance(name, str) and any(phi in name.lower() for phi in ("phi-3", "phi3")),
    )


def _end_ids(texts: list[str], merged: set[str], named: tuple[int | None, ...]) -> list[int]:
    """Return the ids that end an answer: those that keys name, and those of well-known texts.

    merged: texts that merges make, which are ordinary text: Qwen's </s> is of HTML.
    """
    known = _ENDS - merged
    ids = {text: number for number, text in enumerate(texts) if text in known}
    if {"<|call|>", "<|return|>"} <= ids.keys() or {"<|calls|>", "<|flush|>"} <= ids.keys():
        ids.pop("<|end|>", None)  # it ends a message, and the answer goes on
    if "<|tool_response>" in ids:
        ids.pop("</s>", None)  # text, in Gemma 4
    first = [number for number in named if number is not None]
    return list(dict.fromkeys([*first, *sorted(ids.values())]))


def _texts(metadata: Mapping[str, Any]) -> list[str]:
    """Return the token of every id. An empty one gets the name that llama.cpp gives it."""
    found = metadata.get(_KEY + "tokens")
    if not isinstance(found, list) or not 1 <= len(found) <= _MAX_TOKENS:
        raise BadCheckpoint(f"tokenizer.ggml.tokens: expected 1 to {_MAX_TOKENS} tokens")
    if not all(isinstance(text, str) for text in found):
        raise BadCheckpoint("tokenizer.ggml.tokens has a value that is no text")
    if sum(map(len, found)) > _MAX_CHARACTERS:
        raise BadCheckpoint(f"tokenizer.ggml.tokens has more than {_MAX_CHARACTERS} characters")
    texts = [text or f"[EMPTY_{number}]" for number, text in enumerate(found)]
    if len(set(texts)) != len(texts):
        raise BadCheckpoint("tokenizer.ggml.tokens has the same token twice")
    return texts


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the pairs that BPE merges, the first ones first. Raises BadCheckpoint."""
    merges = metadata.get(_KEY + "merges", [])  # a writer leaves an empty list out
    if not isinstance(merges, list) or len(merges) > _MAX_MERGES:
        raise BadCheckpoint(f"tokenizer.ggml.merges: expected a list of up to {_MAX_MERGES} texts")
    pairs: dict[tuple[str, str], None] = {}
    for number, merge in enumerate(merges):
        cut = merge.find(" ", 1) if isinstance(merge, str) else -1
        if cut < 1:
            raise BadCheckpoint(
                f"tokenizer.ggml.merges: entry {number}, {str(merge)[:80]!r}, is invalid "
                "(expected two tokens with a space between them)"
            )
        pairs.setdefault((merge[:cut], merge[cut + 1 :]))
    return list(pairs)


def _needs_merges(text: str, kind: int) -> bool:
    return kind == _NORMAL and len(text) > 1


def _merged(texts: list[str], merges: list[tuple[str, str]]) -> set[str]:
    """Return the tokens that merges make. Raises BadCheckpoint if one is no token."""
    made, known = {left + right for left, right in merges}, set(texts)
    for text in made.union(*merges):
        if text not in known:
            raise BadCheckpoint(f"tokenizer.ggml.merges: {text[:80]!r} is not in its tokens")
    return made


def _numbers(metadata: Mapping[str, Any], name: str, count: int) -> list[Any]:
    """Return a copy of one number per token."""
    found = metadata.get(_KEY + name)
    if not isinstance(found, list) or len(found) != count:
        raise BadCheckpoint(f"tokenizer.ggml.{name}: expected {count} numbers, one per token")
    if any(type(item) not in (int, float) for item in found):
        raise BadCheckpoint(f"tokenizer.ggml.{name} has a value that is no number")
    return list(found)


def _id(metadata: Mapping[str, Any], name: str, count: int, default: int | None) -> int | None:
    found = metadata.get(_KEY + name)
    if found is None:
        return default if default is not None and default < count else None
    if type(found) is not int or not 0 <= found < count:
        raise BadCheckpoint(
            f"tokenizer.ggml.{name}: {str(found)[:40]} is invalid (expected 0 to {count - 1})"
        )
    return found


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    found = metadata.get(_KEY + name, default)
    if not isinstance(found, bool):
        raise BadCheckpoint(f"tokenizer.ggml.{name}: expected true or false")
    return found


def _text(metadata: Mapping[str, Any], name: str) -> str | None:
    found = metadata.get(_KEY + name)
    if found is not None and not isinstance(found, str):
        raise BadCheckpoint(f"tokenizer.ggml.{name}: expected a text")
    return found


# Byte-level BPE: a tokenizer.json of the library `tokenizers`.


def _byte_pairs(found: _Vocabulary, merges: list[tuple[str, str]], words: Words) -> dict[str, Any]:
    """Return tokenizer.json as a document."""
    splits: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in words.patterns
    ]
    letters = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False
    }  # fmt: skip
    space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    undo = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added(found)),
        "normalizer": space if words.raw else None,
        "pre_tokenizer": {
            "type": "Sequence", "pretokenizers": splits if words.raw else [*splits, letters]
        },
        "post_processor": _around(found),
        "decoder": {"type": "Sequence", "decoders": undo} if words.raw else letters,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": words.raw,
            "ignore_merges": words.whole_words,
            "vocab": {text: number for number, text in enumerate(found.texts)},
            "merges": merges,
        },
    }  # fmt: skip


def _added(found: _Vocabulary) -> Iterator[dict[str, Any]]:
    """Give the tokens that are cut out of a text before its words."""
    for number, (text, kind) in enumerate(zip(found.texts, found.kinds, strict=True)):
        if kind in (_UNKNOWN, _CONTROL, _USER):
            yield {
                "id": number,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": found.strips and text not in _KEEP_SPACE,
                "normalized": False,
                "special": kind != _USER,
            }


def _around(found: _Vocabulary) -> dict[str, Any] | None:
    """Return the step that adds the begin and end tokens of a text."""
    bos = found.bos if found.adds_bos else None
    eos = found.eos if found.adds_eos else None
    tokens = {found.texts[end]: end for end in (bos, eos) if end is not None}
    if not tokens:
        return None

    def parts(name: str) -> list[dict[str, Any]]:
        ends = [
            [] if end is None else [{"SpecialToken": {"id": found.texts[end], "type_id": 0}}]
            for end in (bos, eos)
        ]
        return [*ends[0], {"Sequence": {"id": name, "type_id": 0}}, *ends[1]]

    return {
        "type": "TemplateProcessing",
        "single": parts("A"),
        "pair": [*parts("A"), *parts("B")],
        "special_tokens": {
            text: {"id": text, "ids": [number], "tokens": [text]} for text, number in tokens.items()
        },
    }


# SentencePiece: its own file, which the project's converter turns into tokenizer.json.


def _sentencepiece(metadata: Mapping[str, Any], found: _Vocabulary) -> bytes:
    """Return tokenizer.json of a vocabulary whose merges follow from its scores."""
    scores = _numbers(metadata, "scores", len(found.texts))
    if not all(math.isfinite(score) and abs(score) < 3e38 for score in scores):
        raise BadCheckpoint("tokenizer.ggml.scores has a value that is not finite")
    pieces = b"".join(
        _field(1, _field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + _field(3, kind))
        for text, score, kind in zip(found.texts, scores, found.kinds, strict=True)
    )
    ends = [-1 if end is None else end for end in (found.unknown, found.bos, found.eos)]
    trainer = _field(3, 2) + _field(35, int(_BYTE in found.kinds))
    trainer += b"".join(_field(40 + place, end) for place, end in enumerate(ends))
    normalizer = _field(3, int(_flag(metadata, "add_space_prefix", True))) + _field(4, 0)
    stripping = [token for token in _added(found) if token["rstrip"]]
    about = {
        "add_bos_token": found.adds_bos,
        "add_eos_token": found.adds_eos,
        "added_tokens_decoder": {str(token["id"]): token for token in stripping},
    }
    with Trial() as trial:
        model = pieces + _field(2, trainer) + _field(3, normalizer)
        return trial.of_sentencepiece(model, about, "tokenizer.ggml.tokens")


def _field(number: int, value: int | bytes) -> bytes:
    """Return one field of a protobuf message."""
    if isinstance(value, bytes):
        return _varint(number << 3 | 2) + _varint(len(value)) + value
    return _varint(number << 3) + _varint(value % (1 << 64))


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


# The two small files.


def _config(metadata: Mapping[str, Any], found: _Vocabulary) -> dict[str, Any]:
    """Return tokenizer_config.json. Raises BadCheckpoint for a template that is no text."""
    template = metadata.get(_TEMPLATE, metadata.get(_TEMPLATE + ".default"))
    if template is not None and (not isinstance(template, str) or len(template) > _MAX_TEMPLATE):
        raise BadCheckpoint(f"{_TEMPLATE}: expected a text of up to {_MAX_TEMPLATE} characters")
    tokens = {"bos": found.bos, "eos": found.eos, "unk": found.unknown, "pad": found.padding}
    texts = {f"{name}_token": found.texts[end] for name, end in tokens.items() if end is not None}
    flags = {"add_bos_token": found.adds_bos, "add_eos_token": found.adds_eos}
    return texts | flags | ({} if template is None else {"chat_template": template})


def _generation(found: _Vocabulary) -> dict[str, Any]:
    ids = {"bos": found.bos, "pad": found.padding}
    named = {f"{name}_token_id": end for name, end in ids.items() if end is not None}
    return named | ({"eos_token_id": found.ends} if found.ends else {})


def _dumped(document: dict[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")
