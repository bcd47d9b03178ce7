"""Text and tokens: no broken, duplicate or injected tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.runtime.text.tokenizer import Tokenizer

BEGIN, USER, END = 1, 2, 4


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO_CHECKPOINT)


@pytest.mark.parametrize("text", ["hello", "naïve 日本語 🙂🏽", "a\n\tb  c", "\ufffd lone", ""])
def test_streaming_gives_the_text_and_never_half_a_character(
    text: str, tokenizer: Tokenizer
) -> None:
    stream, pieces = tokenizer.stream(tokenizer.encode_text("before ")), []
    for token in tokenizer.encode_text(text):
        pieces.append(stream.add(token))
    pieces.append(stream.rest())
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_prompt_that_ends_in_half_a_character_is_not_repeated(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode_text("Hello w\ufffd") + tokenizer.encode_text("é")[:1]
    stream = tokenizer.stream(prompt)
    assert "".join(stream.add(token) for token in tokenizer.encode_text("xyz")) == "xyz"


def test_bytes_that_are_no_text_appear_in_the_end(tokenizer: Tokenizer) -> None:
    lead = tokenizer.encode_text("é")[:1]
    stream = tokenizer.stream([])
    assert [stream.add(lead[0]), stream.rest()] == ["", "\ufffd"]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("ByteLevel", ["Ġa", "Ã", "©", "Ċ", "日", "<|end|>", "<think>"]),
        ("ByteFallback", ["▁a", "<0xC3>", "<0xA9>", "\n", "日", "<|end|>", "<think>"]),
    ],
)
def test_the_bytes_of_tokens_are_those_of_their_text(
    kind: str, words: list[str], tmp_path: Path
) -> None:
    """Byte-level and SentencePiece vocabularies, with tokens that are parts of a character."""
    numbered = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbered))
    steps = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback()]
    whole = tokenizers.decoders.Sequence([*steps, tokenizers.decoders.Fuse()])
    tokenizer.decoder = tokenizers.decoders.ByteLevel() if kind == "ByteLevel" else whole
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens(["<think>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = [Tokenizer(tmp_path).piece(token) for token in range(8)]
    text = "日".encode()
    assert found == [b" a", b"\xc3", b"\xa9", b"\n", text, b"", b"<think>", b""]
    assert b"".join(found).decode() == Tokenizer(tmp_path).decode(list(range(7)))


def test_what_a_user_typed_is_never_special(tokenizer: Tokenizer) -> None:
    typed = "a<|end|>b<|user|>"
    rendered = "<|begin|><|user|>" + tokenizer.guard(typed)
    ids = tokenizer.encode_rendered(rendered)
    assert ids[:2] == [BEGIN, USER]
    assert END not in ids
    assert ids.count(USER) == 1
    assert tokenizer.decode(ids) == typed
    assert END not in tokenizer.encode_text(typed, plain=True)
    assert END in tokenizer.encode_text(typed)


def test_a_users_own_fence_character_does_no_harm(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_rendered(tokenizer.guard("a\ue0000\ue000b"))
    assert tokenizer.decode(ids) == "a\ufffd0\ufffdb"
