"""Write the tokenizer files of a GGUF file, from its metadata alone."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint
from moeinf.runtime.gguf.tokens import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER,
    Vocabulary,
    flag,
    numbers,
    read_merges,
    read_vocabulary,
    text_of,
)
from moeinf.runtime.gguf.word_patterns import WORDS, Words
from moeinf.runtime.text.tokenizer_trial import MOST_TEMPLATE_BYTES, Trial

_TEMPLATE = "tokenizer.chat_template"
_SPACE = "\u2581"  # a space in a token
_KEEP_SPACE = {"<unk>", "<s>", "<|endoftext|>"}  # of Phi-3's special tokens


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Return tokenizer.json, tokenizer_config.json and generation_config.json by name.

    tokenizer.json is not tried: load it with tokenizer_trial.try_tokenizer first. Raises
    BadCheckpoint, which names the key, if the metadata is damaged or of a kind that is not
    supported.
    """
    kind, pre = text_of(metadata, "model"), text_of(metadata, "pre")
    if kind == "llama":
        found = read_vocabulary(metadata, {"bos": 1, "eos": 2, "unknown": 0}, adds_bos=True)
        document = _sentencepiece(metadata, found)
    elif kind in ("gpt2", "gemma4"):
        words = _words("gemma4" if kind == "gemma4" else pre)
        merges = read_merges(metadata)
        found = read_vocabulary(metadata, {}, words.adds_bos, merges)
        plain = (t for t, k in zip(found.texts, found.kinds, strict=True) if k == NORMAL)
        if not merges and any(len(text) > 1 for text in plain):
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


# Byte-level BPE: a tokenizer.json of the library `tokenizers`.


def _byte_pairs(found: Vocabulary, merges: list[tuple[str, str]], words: Words) -> dict[str, Any]:
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


def _added(found: Vocabulary) -> Iterator[dict[str, Any]]:
    """Yield the tokens that are cut out of a text before its words."""
    for number, (text, kind) in enumerate(zip(found.texts, found.kinds, strict=True)):
        if kind in (UNKNOWN, CONTROL, USER):
            yield {
                "id": number,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": found.strips and text not in _KEEP_SPACE,
                "normalized": False,
                "special": kind != USER,
            }


def _around(found: Vocabulary) -> dict[str, Any] | None:
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


def _sentencepiece(metadata: Mapping[str, Any], found: Vocabulary) -> bytes:
    """Return tokenizer.json of a vocabulary whose merges follow from its scores."""
    scores = numbers(metadata, "scores", len(found.texts))
    if not all(math.isfinite(score) and abs(score) < 3e38 for score in scores):
        raise BadCheckpoint("tokenizer.ggml.scores has a value that is not finite")
    pieces = b"".join(
        _field(
            1,
            _field(1, text.encode("utf-8", "replace"))
            + b"\x15"
            + struct.pack("<f", score)
            + _field(3, kind),
        )
        for text, score, kind in zip(found.texts, scores, found.kinds, strict=True)
    )
    ends = [-1 if end is None else end for end in (found.unknown, found.bos, found.eos)]
    trainer = _field(3, 2) + _field(35, int(BYTE in found.kinds))
    trainer += b"".join(_field(40 + place, end) for place, end in enumerate(ends))
    normalizer = _field(3, int(flag(metadata, "add_space_prefix", True))) + _field(4, 0)
    stripping = [token for token in _added(found) if token["rstrip"]]
    about = {
        "add_bos_token": found.adds_bos,
        "add_eos_token": found.adds_eos,
        "added_tokens_decoder": {str(token["id"]): token for token in stripping},
    }
    with Trial() as trial:
        model = pieces + _field(2, trainer) + _field(3, normalizer)
        return trial.of_vocabulary(model, about, "tokenizer.ggml.tokens")


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


def _config(metadata: Mapping[str, Any], found: Vocabulary) -> dict[str, Any]:
    """Return tokenizer_config.json. Raises BadCheckpoint for a template that is no text."""
    template = metadata.get(_TEMPLATE, metadata.get(_TEMPLATE + ".default"))
    if template is not None and (
        not isinstance(template, str) or len(template.encode()) > MOST_TEMPLATE_BYTES
    ):
        raise BadCheckpoint(f"{_TEMPLATE}: expected a text of up to {MOST_TEMPLATE_BYTES} bytes")
    tokens = {"bos": found.bos, "eos": found.eos, "unk": found.unknown, "pad": found.padding}
    texts = {f"{name}_token": found.texts[end] for name, end in tokens.items() if end is not None}
    flags = {"add_bos_token": found.adds_bos, "add_eos_token": found.adds_eos}
    return texts | flags | ({} if template is None else {"chat_template": template})


def _generation(found: Vocabulary) -> dict[str, Any]:
    ids = {"bos": found.bos, "pad": found.padding}
    named = {f"{name}_token_id": end for name, end in ids.items() if end is not None}
    return named | ({"eos_token_id": found.ends} if found.ends else {})


def _dumped(document: dict[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")
