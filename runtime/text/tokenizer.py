"""Convert text to token ids and back, for one model.

Text of a user can never become a special token: special-looking parts are encoded as ordinary text.

A panic of the library is a BaseException. So each library call on untrusted text goes through
`_border`, which raises TokenizerFailed instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as _Tokenizer

from moeinf.errors import UnusableInput
from moeinf.runtime.checkpoints.checkpoint import CONFIG, BadCheckpoint, read_json
from moeinf.runtime.files.regular import read_regular
from moeinf.runtime.requests import MAX_TEXT_BYTES, PromptTooLong
from moeinf.runtime.text.chat_template import family_template
from moeinf.runtime.text.reasoning import has_brackets, has_channels, has_turns, is_harmony
from moeinf.runtime.text.special_spans import SpecialSpans
from moeinf.runtime.text.tiktoken import characters_of_bytes
from moeinf.runtime.text.tool_calls import format_of

TOKENIZER = "tokenizer.json"
_UNKNOWN = "\U0010fffd"  # private use: not in any vocabulary
_CUTS = 8  # maximum number of times to cut a text whose pieces are special tokens
_CONTEXT_TOKENS = 8
_LONGEST_CHARACTER = 8  # tokens; a character has at most four bytes
_SPACE = "\u2581"  # SentencePiece's space
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's token for a byte without a character
_GUARD = "\ue000"  # private use: encloses a special-looking piece of a user's text, in hex
_FENCED = re.compile(f"{_GUARD}((?:[0-9a-f]{{2}})+){_GUARD}")


_BYTES = {letter: byte for byte, letter in characters_of_bytes().items()}


class TokenizerFailed(UnusableInput, ValueError):
    """A model's tokenizer cannot process a text."""

    code = "bad_tokenizer"
    hint = "a shorter text, or another model"


@contextmanager
def _border(what: str) -> Iterator[None]:
    """Turn any error of the library, panics included, into TokenizerFailed."""
    try:
        yield
    except (ImportError, MemoryError):  # not the tokenizer's fault
        raise
    except Exception as error:
        raise TokenizerFailed(f"the model's tokenizer cannot {what}: {error}"[:500]) from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerFailed(f"the model's tokenizer cannot {what}: {error}"[:500]) from None


class Tokenizer:
    """The tokenizer of a model folder: tokenizer.json and tokenizer_config.json.

    template: in place of the model's chat template. The constructor raises BadCheckpoint.
    """

    def __init__(self, folder: Path, template: str | None = None) -> None:
        path = folder / TOKENIZER
        if not path.is_file():
            raise BadCheckpoint(
                f"{path} is missing, and so is a SentencePiece model, or a tiktoken.model of Kimi, "
                "to make it of"
            )
        about = _about(folder)
        self.chat_template = chat_template(folder, about) if template is None else template
        self.bos = _content(about.get("bos_token"))
        self.eos = _content(about.get("eos_token"))
        self._legacy = about.get("legacy_behaviour") is True
        self._adds_bos = about.get("add_bos_token")
        try:
            self._load(path)
        except TokenizerFailed as error:
            raise BadCheckpoint(f"{path} cannot be read: {error}") from None
        form = format_of(self.chat_template)
        marks_calls = form is not None and any(t in form.open for t in self._special)
        kinds = is_harmony, has_brackets, has_channels, has_turns
        shown = any(kind(self.chat_template) for kind in kinds)
        self._shows_special = shown or marks_calls

    def _load(self, path: Path) -> None:
        """Load tokenizer.json. Raises TokenizerFailed."""
        with _border("be read"):
            self._tokenizer = _Tokenizer.from_file(str(path))
            self._tokenizer.no_truncation()  # a saved truncation would cut texts
            self._tokenizer.no_padding()
            added = self._tokenizer.get_added_tokens_decoder()
            decoder = self._tokenizer.decoder
            self._decoder: bytes = b"" if decoder is None else decoder.__getstate__()  # its JSON
        self._added = {t.content: t.special for t in added.values()}  # content -> True if special
        special = {number: t for number, t in added.items() if t.special and t.content}
        self._special = sorted((t.content for t in special.values()), key=len, reverse=True)
        self._exact = SpecialSpans(self._special)
        # Unknown characters give the unknown token, so it is not reserved.
        self._reserved = frozenset(special) - self._made(_UNKNOWN)
        normalized = any(token.normalized for token in special.values())
        # True if a normalizer or the vocabulary turns other texts into special tokens.
        self._disguises = (normalized and self._tokenizer.normalizer is not None) or any(
            self._made(text) & self._reserved for text in self._special
        )

    def _made(self, text: str) -> set[int]:
        """Return the ids of a plain text; an empty set if it cannot be encoded."""
        with suppress(TokenizerFailed):
            return set(self._encoding(text, plain=True).ids)
        return set()

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def encode_text(self, text: str, *, plain: bool = False) -> list[int]:
        """Encode a prompt without a template, with one BOS if the model wants it.

        Special tokens count unless the text is `plain`, as a user's message is. Raises
        PromptTooLong, TokenizerFailed.
        """
        text = _whole(text)
        found = self._encoding(text, plain=plain, around=True)
        ids: list[int] = found.ids
        said = [number for number, added in enumerate(found.special_tokens_mask) if not added]
        if plain and any(ids[number] in self._reserved for number in said):
            ids = [*ids[: said[0]], *self._plain(text), *ids[said[-1] + 1 :]]
        bos = self.token_id(self.bos) if self.bos else None
        if bos is not None:
            if self._adds_bos and ids[:1] != [bos]:
                ids.insert(0, bos)
            if ids[:2] == [bos, bos]:
                del ids[0]
        return ids

    @property
    def special_tokens(self) -> list[str]:
        """Special tokens, the longest first."""
        return self._special

    def encode_source(self, text: str, language: int) -> list[int]:
        """Encode a text to translate in its training format: language, text, end.

        With legacy_behaviour in tokenizer_config.json the order is text, end, language.
        Special-looking pieces are ordinary text.
        """
        end = self.token_id(self.eos) if self.eos else None
        ids, ends = self._plain(_whole(text)), [] if end is None else [end]
        return [*ids, *ends, language] if self._legacy else [language, *ids, *ends]

    def guard(self, text: str) -> str:
        """Fence the special-looking pieces of a user's text, for use in a template.

        Raises PromptTooLong, TokenizerFailed.
        """
        text = _whole(text).replace(_GUARD, "\ufffd")
        return self._fenced(text, list(self._exact.find(text)), _CUTS if self._disguises else 0)

    def _fenced(self, text: str, spans: list[tuple[int, int]], cuts: int) -> str:
        """Fence `spans`, and pieces that a normalizer turns into special tokens.

        Each unfenced piece is checked again: it starts at another place, which can change its
        tokens.
        """
        made, at = [], 0
        for start, end in [*spans, (len(text), len(text))]:
            piece, at = text[at:start], end
            if piece and cuts:
                more = self._spans(self._encoding(piece))
                piece = self._fenced(piece, more, cuts - 1) if more else piece
            made += [piece, _fence(text[start:end])]
        return "".join(made)

    def encode_rendered(self, text: str) -> list[int]:
        """Encode a rendered template. Its special tokens count; fenced pieces are ordinary text.

        Raises PromptTooLong, TokenizerFailed.
        """
        ids: list[int] = []
        for place, piece in enumerate(_FENCED.split(_whole(text))):
            if place % 2:
                ids += self._plain(bytes.fromhex(piece).decode("utf-8", "replace"))
            elif piece:
                ids += self._encoding(piece).ids
        return ids

    def _plain(self, text: str, cuts: int = _CUTS) -> list[int]:
        """Encode a text without special tokens: cut it where the library would give one."""
        found = self._encoding(text, plain=True)
        spans = self._spans(found)
        if not spans:
            return list(found.ids)
        if not cuts:
            return [token for token in found.ids if token not in self._reserved]
        ends = [0, *(start + 1 for start, _ in spans), len(text)]
        pieces = (text[start:end] for start, end in pairwise(ends))
        return [token for piece in pieces if piece for token in self._plain(piece, cuts - 1)]

    def _spans(self, found: Encoding) -> list[tuple[int, int]]:
        """Return the places of special tokens in a text, in order, without overlap."""
        spans: list[tuple[int, int]] = []
        for token, (start, end) in zip(found.ids, found.offsets, strict=True):
            if token in self._reserved:
                start = max(start, spans[-1][1] if spans else 0)
                spans += [(start, end)] if start < end else []
        return spans

    def _encoding(self, text: str, *, plain: bool = False, around: bool = False) -> Encoding:
        """Encode with the library; no other method does. around: add BOS and similar tokens."""
        if 4 * len(text) > MAX_TEXT_BYTES and len(text.encode()) > MAX_TEXT_BYTES:
            raise PromptTooLong(f"the text has {len(text)} characters: too many for a tokenizer")
        self._tokenizer.encode_special_tokens = plain
        try:
            with _border("encode this text"):
                return self._tokenizer.encode(text, add_special_tokens=around)
        finally:
            self._tokenizer.encode_special_tokens = False

    def decode(self, ids: list[int]) -> str:
        """Decode `ids` without special tokens."""
        return _decoded(self._tokenizer, ids, special=False)

    def piece(self, token: int) -> bytes:
        """Return the bytes that one token adds to a text; none for a special token.

        They may be a part of a character.
        """
        name = self._tokenizer.id_to_token(token) or ""
        special = self._added.get(name)
        if special is not None:
            return b"" if special else name.encode()
        if b'"ByteLevel"' in self._decoder:
            return b"".join(bytes([_BYTES[c]]) if c in _BYTES else c.encode() for c in name)
        if b'"ByteFallback"' in self._decoder and (byte := _BYTE.fullmatch(name)):
            return bytes([int(byte[1], 16)])
        return name.replace(_SPACE, " ").encode()

    def tail(self, ids: list[int]) -> str:
        """Decode the last few of `ids`, special tokens included."""
        return _decoded(self._tokenizer, ids[-_CONTEXT_TOKENS:], special=True)

    def stream(self, prompt: list[int]) -> TextStream:
        """Return a decoder for the tokens after `prompt`."""
        # An answer of T5 needs its sentinels, which name the blank that each part fills.
        sentinels = any(token.startswith("<extra_id_") for token in self._special)
        return TextStream(self._tokenizer, prompt, self._shows_special or sentinels)


class TextStream:
    """Incremental decoder. Text appears when its last byte arrives, so UTF-8 is never broken.

    The text of a token is the difference between two decodings with the same few tokens before it.
    These decide if the token begins with a space. They also carry the bytes of an unfinished
    character.
    """

    def __init__(self, tokenizer: _Tokenizer, prompt: list[int], special: bool = False) -> None:
        """Start after the tokens `prompt`.

        special: decode special tokens as text, too.
        """
        self._tokenizer, self._special = tokenizer, special
        self._given = ""  # the text of the first `_known` of `_ids`
        self._begin(prompt)

    def add(self, token: int) -> str:
        """Add a token; return the text that is certain now, empty while a character lacks bytes."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith("\ufffd") and len(self._ids) - self._known < _LONGEST_CHARACTER:
            return ""
        piece = text[len(self._given) :]
        self._begin(self._ids)
        return piece

    def rest(self) -> str:
        """Return the rest at the end: an unfinished character, as U+FFFD."""
        text = self._decode(self._ids)
        piece = text[len(self._given) :]
        self._given, self._known = text, len(self._ids)
        return piece

    def _begin(self, ids: list[int]) -> None:
        """Keep the last few tokens, from the start of a character.

        If a run of byte tokens is cut, ByteFallback turns the whole run, many characters long, into
        U+FFFD.
        """
        for size in range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + _LONGEST_CHARACTER):
            self._ids = ids[-size:]
            self._given = self._decode(self._ids)
            if not self._given.startswith("\ufffd"):
                break
        self._known = len(self._ids)

    def _decode(self, ids: list[int]) -> str:
        return _decoded(self._tokenizer, ids, self._special)


def _decoded(tokenizer: _Tokenizer, ids: list[int], special: bool) -> str:
    with _border("decode an answer"):
        text: str = tokenizer.decode(ids, skip_special_tokens=not special)
    return text


def _fence(text: str) -> str:
    """Return a piece that no template changes: hex between two guards."""
    return f"{_GUARD}{text.encode().hex()}{_GUARD}" if text else ""


def _whole(text: str) -> str:
    """Replace lone surrogates by "?". JSON can contain them, but no encoder accepts them."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _content(token: object) -> str | None:
    """Return a special token from a config file: a string, or a mapping with its content."""
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str) or any("\ud800" <= c <= "\udfff" for c in token):
        return None  # a lone surrogate cannot be encoded
    return token


def _about(folder: Path) -> dict[str, Any]:
    config = folder / "tokenizer_config.json"
    return read_json(config) if config.is_file() else {}


def chat_template(folder: Path, about: dict[str, Any] | None = None) -> str | None:
    """Return a model's chat template, ours if its family's releases have none, or None.

    about: its tokenizer_config, if already read.
    """
    about = _about(folder) if about is None else about
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    template = about.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = (
            t.get("template")
            for t in template
            if isinstance(t, dict) and t.get("name") == "default"
        )
        template = next(named, None)
    if isinstance(template, str):
        return template
    config = folder / CONFIG
    return family_template(read_json(config).get("model_type")) if config.is_file() else None


def marks_of(folder: Path) -> dict[str, str]:
    """Return the special tokens that chat templates name, without the tokenizer."""
    about = _about(folder)
    return {name: _content(about.get(name)) or "" for name in ("bos_token", "eos_token")}


def end_tokens(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Return every id that ends an answer in generation_config, config or tokenizer_config."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        with suppress(OSError, ValueError, AttributeError, RecursionError):
            values = json.loads(read_regular(folder / name))
            for about in (values, values.get("text_config") or {}):
                eos = about.get("eos_token_id")
                found = eos if isinstance(eos, list) else [eos]
                ids.update(i for i in found if type(i) is int)
    if tokenizer.eos is not None:
        own = tokenizer.token_id(tokenizer.eos)
        ids.update(() if own is None else (own,))
    return frozenset(ids)
