"""Convert Kimi's tiktoken.model to tokenizer.json, for repositories without that file.

A line is a token in base64, a space and its rank, which is its id. In a word, the two neighbours
whose joined bytes have the lowest rank are merged first. The pattern that cuts a text into words is
in the repository's tokenization_kimi.py, which is not executed: it is known here, and other
tokenizers of this format are refused. The 256 ids after the ranks are of special tokens.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

NAMES = ("tiktoken.model",)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE, _SHORT = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_WORDS = "|".join(
    (
        r"\p{Han}+",
        f"{_BEFORE}{_UPPER}*{_LOWER}+{_SHORT}",
        f"{_BEFORE}{_UPPER}+{_LOWER}*{_SHORT}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_KIMI = "tokenization_kimi."  # the module that auto_map names
_RESERVED = 256  # num_reserved_special_tokens
_MAX_TOKENS = 1 << 20
_MAX_TOKEN = 512  # bytes; every split of a token is tried
_MAX_LINE = 1024


class BadRanks(ValueError):
    """A file is damaged, or is not a vocabulary of Kimi."""


def characters_of_bytes() -> dict[int, str]:
    """Return the character of each byte in byte-level vocabularies, as in GPT-2.

    A visible byte is its own character; the others are the next ones from U+0100.
    """
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    found = {byte: chr(byte) for byte in seen}
    return found | {byte: chr(0x100 + place) for place, byte in enumerate(unseen)}


def kimi_json(data: bytes, about: Mapping[str, Any]) -> bytes:
    """Return the tokenizer.json of a tiktoken.model of Kimi.

    about: its tokenizer_config.json. Raises BadRanks, or exceptions of the tokenizers library. That
    library can also panic, so call this in a LimitedProcess.
    """
    if not any(name.startswith(_KIMI) for name in _named(about.get("auto_map"))):
        raise BadRanks(
            "tokenizer_config.json does not name Kimi's tokenizer (auto_map: tokenization_kimi), "
            "and the file does not say how to cut a text into words"
        )
    ranks = _ranks(data)
    letters = characters_of_bytes()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [(spelled(left), spelled(right)) for left, right in _merges(ranks)]
    model = models.BPE(
        vocab={spelled(token): rank for token, rank in ranks.items()},
        merges=merges,
        ignore_merges=True,  # a word that is a token needs no merges
    )
    tokenizer = Tokenizer(model)
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.Split(Regex(KIMI_WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytewise])
    tokenizer.decoder = decoders.ByteLevel()
    for number, (text, special) in enumerate(_special(about, len(ranks)), len(ranks)):
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(text, normalized=False)])
        if tokenizer.token_to_id(text) != number:
            raise BadRanks(f"tokenizer_config.json: token {number} would get another id")
    return tokenizer.to_str().encode()


def _named(value: Any) -> Iterator[str]:
    """Yield the classes that an auto_map names."""
    values = list(value.values()) if isinstance(value, dict) else []
    for one in values:
        yield from (name for name in (one if isinstance(one, list) else [one]) if _is_text(name))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _ranks(data: bytes) -> dict[bytes, int]:
    """Return the rank of every token, in the order of ranks. Raises BadRanks for a bad line."""
    lines = data.split(b"\n")
    if len(lines) > _MAX_TOKENS:
        raise BadRanks(f"it has more than {_MAX_TOKENS} lines")
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        token, rank = _line(line, number)
        if token in ranks:
            raise BadRanks(f"line {number}: the token is there twice")
        ranks[token] = rank
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise BadRanks(f"its ranks are not 0 to {len(ranks) - 1}, each once")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise BadRanks("it lacks a token of one byte")
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def _line(line: bytes, number: int) -> tuple[bytes, int]:
    """Return a line's token and rank. Raises BadRanks."""
    text, _, rank = line.strip().partition(b" ")
    try:
        token = binascii.a2b_base64(text, strict_mode=True) if len(line) <= _MAX_LINE else b""
    except binascii.Error:
        token = b""
    if not (1 <= len(token) <= _MAX_TOKEN and rank.isdigit() and len(rank) < 9):
        shown = line[:40].decode("ascii", "replace")
        raise BadRanks(f"line {number}, {shown!r}, is invalid (expected a token and its rank)")
    return token, int(rank)


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield all pairs of tokens whose joined bytes are a token, by its rank."""
    for token in ranks:
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _special(about: Mapping[str, Any], first: int) -> Iterator[tuple[str, bool]]:
    """Yield the text of each id from `first` on, and whether an answer's text leaves it out.

    An id that added_tokens_decoder does not name has a name of its own. Raises BadRanks.
    """
    decoder = about.get("added_tokens_decoder")
    named = dict(decoder) if isinstance(decoder, dict) else {}
    for number in range(first, first + _RESERVED):
        token = named.pop(str(number), None)
        text = token.get("content") if isinstance(token, dict) else None
        if token is None:
            yield f"<|reserved_token_{number}|>", True
        elif isinstance(token, dict) and isinstance(text, str) and text:
            yield text, token.get("special") is not False
        else:
            raise BadRanks(f"tokenizer_config.json: token {number} is invalid")
    if named:
        other = str(next(iter(named)))[:20]
        raise BadRanks(f"tokenizer_config.json: token {other!r} is not {first} to {number}")
