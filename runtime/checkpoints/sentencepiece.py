"""Convert a SentencePiece model to tokenizer.json, for repositories without that file.

A downloaded file is untrusted, so the protobuf parser below has bounds and reads only the fields
that it needs. Field numbers are those of sentencepiece_model.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

NAMES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
MAX_BYTES = 64 << 20
_MAX_PIECES = 1 << 20
_MAX_PIECE = 512  # characters; _bpe tries every split of a piece
_SPACE = "\u2581"  # a space in a piece
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
_UNIGRAM, _BPE = 1, 2

Message = dict[int, list[int | bytes]]


@dataclass(frozen=True)
class Piece:
    """One entry of the vocabulary. Its index is its id."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class Vocabulary:
    """The fields of a SentencePiece model that determine how it splits text."""

    pieces: tuple[Piece, ...]
    algorithm: int
    byte_fallback: bool
    unknown: int
    begin: int  # id, -1 if absent
    end: int  # id, -1 if absent
    character_map: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool


class BadVocabulary(ValueError):
    """A file is damaged, or is not a supported SentencePiece model."""


def tokenizer_json(data: bytes, about: Mapping[str, Any]) -> bytes:
    """Return the tokenizer.json of a SentencePiece file.

    about: its tokenizer_config.json, or empty. Raises BadVocabulary, or exceptions of the
    tokenizers library. That library can also panic, so call this in a LimitedProcess.
    """
    try:
        tokenizer = _tokenizer(_read(data), about)
    except (ValueError, IndexError, struct.error) as error:
        raise BadVocabulary(f"not a SentencePiece model we read: {error}") from error
    return tokenizer.to_str().encode()


def _read(data: bytes) -> Vocabulary:
    model = _message(data, _MAX_PIECES + 16)
    pieces: list[Piece] = []
    for raw in model.get(1, []):
        field = _message(_bytes(raw), 16)
        score = struct.unpack("<f", _bytes(field.get(2, [bytes(4)])[-1]))[0]
        text = _bytes(field.get(1, [b""])[-1]).decode()
        if not text or len(text) > _MAX_PIECE or score != score:
            raise ValueError(f"piece {len(pieces)} is invalid")
        pieces.append(Piece(text, score, _int(field, 3, _NORMAL)))
    if not 1 <= len(pieces) <= _MAX_PIECES or len({p.text for p in pieces}) != len(pieces):
        raise ValueError("the vocabulary is empty, too large, or has duplicate pieces")
    trainer, normalizer = (
        _message(_bytes(model.get(number, [b""])[-1]), 1 << 16) for number in (2, 3)
    )
    unknown = _int(trainer, 40, 0)
    if not (0 <= unknown < len(pieces)):
        raise ValueError(f"unk_id: {unknown} is invalid (expected less than {len(pieces)})")
    if _int(trainer, 24, 0):
        raise ValueError("treat_whitespace_as_suffix is not supported")
    found = Vocabulary(
        pieces=tuple(pieces),
        algorithm=_int(trainer, 3, _UNIGRAM),
        byte_fallback=bool(_int(trainer, 35, 0)),
        unknown=unknown,
        begin=_int(trainer, 41, 1),
        end=_int(trainer, 42, 2),
        character_map=_bytes(normalizer.get(2, [b""])[-1]),
        add_dummy_prefix=bool(_int(normalizer, 3, 1)),
        remove_extra_whitespaces=bool(_int(normalizer, 4, 1)),
    )
    if found.algorithm not in (_UNIGRAM, _BPE):
        raise ValueError(f"model_type {found.algorithm} is not supported")
    trie = int.from_bytes(found.character_map[:4], "little")
    # The library would allocate the size that the map claims.
    if found.character_map and not 4 <= 4 + trie <= len(found.character_map):
        raise ValueError("its character map is damaged")
    if any(number >= len(pieces) for number in (found.begin, found.end)):
        raise ValueError("bos_id or eos_id is not the id of a piece")
    return found


def _tokenizer(vocabulary: Vocabulary, about: Mapping[str, Any]) -> Tokenizer:
    pieces = vocabulary.pieces
    special = [p.text for p in pieces if p.kind in (_UNKNOWN, _CONTROL)]
    tokenizer = Tokenizer(
        _unigram(vocabulary) if vocabulary.algorithm == _UNIGRAM else _bpe(vocabulary)
    )
    steps: list[Any] = []
    if vocabulary.character_map:
        steps.append(normalizers.Precompiled(vocabulary.character_map))
    if vocabulary.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        steps.append(normalizers.Replace(Regex(r"\A "), ""))
    if vocabulary.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    steps.append(normalizers.Replace(" ", _SPACE))
    if vocabulary.remove_extra_whitespaces:  # also strip a literal _SPACE at the end
        steps.append(normalizers.Replace(Regex(f"(?<!{_SPACE}){_SPACE}+\\z"), ""))
    tokenizer.normalizer = normalizers.Sequence(steps)
    # Text that spells a control or byte piece must not become one: split after its first letter.
    hidden = [p.text for p in pieces if p.kind in (_CONTROL, _UNKNOWN, _UNUSED, _BYTE)]
    pattern = _never(hidden)
    if pattern:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "merged_with_previous")
    undo: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.add_dummy_prefix:
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(undo)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(p.text, normalized=False) for p in pieces if p.kind == _USER])
    _add_configured(tokenizer, about)
    _add_ends(tokenizer, vocabulary, about)
    return tokenizer


def _unigram(vocabulary: Vocabulary) -> models.Unigram:
    scores = [(piece.text, piece.score) for piece in vocabulary.pieces]
    normal = [p.score for p in vocabulary.pieces if p.kind == _NORMAL]
    least = min(normal, default=0.0)
    for number, piece in enumerate(vocabulary.pieces):
        if piece.kind != _NORMAL:  # in the file its score is 0, unlike any normal piece
            scores[number] = (piece.text, least)
    return models.Unigram(scores, vocabulary.unknown, vocabulary.byte_fallback)


def _bpe(vocabulary: Vocabulary) -> models.BPE:
    """Return a BPE model whose merges are all splits of a normal piece into two normal pieces.

    Merges of pieces with higher scores come first.
    """
    ids = {piece.text: number for number, piece in enumerate(vocabulary.pieces)}
    normal = {p.text for p in vocabulary.pieces if p.kind == _NORMAL}
    merges = []
    for piece in vocabulary.pieces:
        if piece.kind != _NORMAL:
            continue
        for cut in range(1, len(piece.text)):
            left, right = piece.text[:cut], piece.text[cut:]
            if left in normal and right in normal:
                merges.append((-piece.score, ids[piece.text], ids[left], ids[right], left, right))
    merges.sort()
    return models.BPE(
        vocab=ids,
        merges=[(left, right) for *_, left, right in merges],
        unk_token=vocabulary.pieces[vocabulary.unknown].text,
        fuse_unk=True,
        byte_fallback=vocabulary.byte_fallback,
    )


def _never(texts: list[str]) -> str:
    """Return a regex for the first character of any text, if the rest of that text follows."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        if len(text) > 1:
            rests.setdefault(text[0], []).append(text[1:])
    return "|".join(
        f"{_escaped(first)}(?={'|'.join(map(_escaped, ends))})" for first, ends in rests.items()
    )


def _escaped(text: str) -> str:
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _add_configured(tokenizer: Tokenizer, about: Mapping[str, Any]) -> None:
    """Add the tokens of tokenizer_config.json: those with ids, or T5's <extra_id_…>.

    Raises ValueError if a token would get another id.
    """
    decoder = about.get("added_tokens_decoder")
    decoder = decoder if isinstance(decoder, dict) else {}
    tokens = {int(key): t for key, t in decoder.items() if key.isdigit() and isinstance(t, dict)}
    for _, token in sorted(tokens.items()):
        content = token.get("content")
        if isinstance(content, str) and content:
            kept = {
                k: bool(token.get(k)) for k in ("lstrip", "rstrip", "single_word", "normalized")
            }
            add = tokenizer.add_special_tokens if token.get("special") else tokenizer.add_tokens
            add([AddedToken(content, **kept)])
    count = about.get("extra_ids")
    if type(count) is int and 0 < count <= 1000 and not tokens:
        names = [f"<extra_id_{number}>" for number in reversed(range(count))]
        tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    for number, token in tokens.items():
        if tokenizer.token_to_id(str(token.get("content"))) != number:
            raise ValueError(f"tokenizer_config.json: token {number} would get another id")


def _add_ends(tokenizer: Tokenizer, vocabulary: Vocabulary, about: Mapping[str, Any]) -> None:
    """Add the begin and end tokens of every text.

    By default T5 has only the end token, and all others only the begin token. add_bos_token and
    add_eos_token override this.
    """
    t5 = str(about.get("tokenizer_class", "")).startswith("T5")
    parts, tokens = ["$A"], []
    for number, key, default in (
        (vocabulary.begin, "add_bos_token", not t5),
        (vocabulary.end, "add_eos_token", t5),
    ):
        if number >= 0 and about.get(key, default) is True:
            text = vocabulary.pieces[number].text
            tokens.append((text, number))
            parts = [text, *parts] if key == "add_bos_token" else [*parts, text]
    if tokens:
        tokenizer.post_processor = TemplateProcessing(single=" ".join(parts), special_tokens=tokens)


def _message(data: bytes, most: int) -> Message:
    """Return the fields of one protobuf message, by number. Raises ValueError or IndexError."""
    fields: Message = {}
    for count, (number, value) in enumerate(_fields(data)):
        if count >= most:
            raise ValueError("too many fields")
        fields.setdefault(number, []).append(value)
    return fields


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if size > len(data) - at:
            raise ValueError("it ends early")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
    raise ValueError("a number without an end")


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where bytes should be")
    return value


def _int(message: Message, number: int, default: int) -> int:
    value = message.get(number, [default])[-1]
    if not isinstance(value, int):
        raise ValueError("bytes where a number should be")
    return value - (1 << 64) if value >= 1 << 63 else value
