"""Check the metadata of a GGUF file about its tokens, which may be hostile.

The keys are those of docs/gguf.md in the repository ggml. Where a key is missing, its default is
llama.cpp's. Every function raises BadCheckpoint, which names the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint

_KEY = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
_MAX_TOKENS, _MAX_MERGES = 1 << 20, 1 << 21
_MAX_CHARACTERS = 1 << 24  # of all tokens; the largest vocabularies have some 2 million
# Ids that a file can do without: those of absent tokens are ignored.
_OPTIONAL = ("eot_token_id", "eom_token_id", "padding_token_id", "unknown_token_id")
# Texts that end an answer or a turn in every model that has them as one token. Some files mark
# them as text, which would let a user's text end a turn.
_ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn>"
    " <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance>"
    " <eos> <turn|> <|tool_response> <\uff5cend\u2581of\u2581sentence\uff5c> [e~[".split()
)


@dataclass(frozen=True)
class Vocabulary:
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


def read_vocabulary(
    metadata: Mapping[str, Any],
    defaults: Mapping[str, int],
    adds_bos: bool,
    merges: list[tuple[str, str]] | None = None,
) -> Vocabulary:
    """Read what all kinds have. Raises BadCheckpoint."""
    texts = _texts(metadata)
    merged = _merged(texts, merges or [])
    kinds = numbers(metadata, "token_type", len(texts))
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
        kinds[number] = CONTROL
    name = metadata.get("general.name")
    flags = {
        end: flag(metadata, f"add_{end}_token", default and ids[end] is not None)
        for end, default in (("bos", adds_bos), ("eos", False))
    }
    for end, wanted in flags.items():
        if wanted and ids[end] is None:
            raise BadCheckpoint(f"tokenizer.ggml.add_{end}_token is true without {end}_token_id")
    return Vocabulary(
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


def read_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
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


def _merged(texts: list[str], merges: list[tuple[str, str]]) -> set[str]:
    """Return the tokens that merges make. Raises BadCheckpoint if one is no token."""
    made, known = {left + right for left, right in merges}, set(texts)
    for text in made.union(*merges):
        if text not in known:
            raise BadCheckpoint(f"tokenizer.ggml.merges: {text[:80]!r} is not in its tokens")
    return made


def numbers(metadata: Mapping[str, Any], name: str, count: int) -> list[Any]:
    """Return a copy of the numbers of one key, one per token."""
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
    if type(found) is int and not 0 <= found < count and name in _OPTIONAL:
        return None  # llama.cpp ignores it, too
    if type(found) is not int or not 0 <= found < count:
        raise BadCheckpoint(
            f"tokenizer.ggml.{name}: {str(found)[:40]} is invalid (expected 0 to {count - 1})"
        )
    return found


def ignored_ids(metadata: Mapping[str, Any]) -> list[str]:
    """Return the keys and values of ids beyond the tokens that read_vocabulary ignores."""
    count = len(metadata.get(_KEY + "tokens", ()))
    found = ((_KEY + name, metadata.get(_KEY + name)) for name in _OPTIONAL)
    return [f"{key} {n}" for key, n in found if type(n) is int and not 0 <= n < count]


def flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return the value of a key that is true or false."""
    found = metadata.get(_KEY + name, default)
    if not isinstance(found, bool):
        raise BadCheckpoint(f"tokenizer.ggml.{name}: expected true or false")
    return found


def text_of(metadata: Mapping[str, Any], name: str) -> str | None:
    """Return the text of a key, or None if it is missing."""
    found = metadata.get(_KEY + name)
    if found is not None and not isinstance(found, str):
        raise BadCheckpoint(f"tokenizer.ggml.{name}: expected a text")
    return found
