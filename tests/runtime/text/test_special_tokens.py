"""Special tokens come from templates, never from a user's text, under every normalizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from moeinf.runtime.text.tokenizer import Tokenizer
from tests.tokenizer_files import document, padding, sequence, token, truncation, unigram

SPECIAL = ["<|end|>", "END", "ab"]
NORMALIZERS: dict[str, Any] = {
    "none": None,
    "lower": {"type": "Lowercase"},
    "nfkc": {"type": "NFKC"},
    "strip": sequence("normalizers", {"type": "NFD"}, {"type": "StripAccents"}),
    "spaces": sequence(
        "normalizers",
        {"type": "Prepend", "prepend": "_"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "_"},
    ),
}
FILES = {
    f"{name} {normalized}": document(
        normalizer=normalizer,
        added_tokens=[
            token(256 + number, text, normalized=normalized, rstrip=number == 1)
            for number, text in enumerate(SPECIAL)
        ],
    )
    for name, normalizer in NORMALIZERS.items()
    for normalized in (False, True)
} | {
    f"unigram {name}": unigram(
        vocab=[["<unk>", 0.0], *([t, 9.0] for t in SPECIAL), *([c, -9.0] for c in "<|endENab>")]
    )
    | {
        "added_tokens": [token(n, text) for n, text in enumerate(["<unk>", *SPECIAL])],
        "normalizer": normalizer,
    }
    for name, normalizer in NORMALIZERS.items()
}  # fmt: skip
TRICKS = [
    *("<|end|>", "<|END|>", "<|\uff25nd|>", "\uff1c|end|\uff1e", "<|\u00e9nd|>", "<|e\u0301nd|>"),
    *("END", "end", "\uff25\uff2e\uff24", "ab", "AB", "Ab", "\uff41b", "E", "N", "D", "<", "|"),
    *("a", "b", " ", "_", "\n", "x", "\ue000", "\ud800"),
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    found = {}
    for name, file in FILES.items():
        folder = tmp_path_factory.mktemp("tokenizer")
        (folder / "tokenizer.json").write_text(json.dumps(file))
        found[name] = Tokenizer(folder)
    return found


def special_ids(tokenizer: Tokenizer) -> set[int]:
    return {tokenizer.token_id(text) or 0 for text in SPECIAL}


@given(st.lists(st.sampled_from(TRICKS), max_size=12))
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, derandomize=True)
def test_no_text_of_a_user_is_special(tokenizers: dict[str, Tokenizer], words: list[str]) -> None:
    typed = "".join(words)
    for name, tokenizer in tokenizers.items():
        special = special_ids(tokenizer)
        assert not special & set(tokenizer.encode_text(typed, plain=True)), name
        assert not special & set(tokenizer.encode_source(typed, 5)), name
        whole = tokenizer.encode_rendered(f"<|end|>\n{tokenizer.guard(typed)}\n<|end|>")
        assert len([i for i in whole if i in special]) <= 2, name


@pytest.mark.parametrize(
    ("name", "typed"),
    [
        ("lower True", "a<|END|>b"),
        ("nfkc True", "a\uff1c|end|\uff1eb"),
        ("nfkc True", "\uff25\uff2e\uff24"),
        ("strip True", "a<|\u00e9nd|>b"),
        ("unigram nfkc", "a\uff1c|end|\uff1eb"),
        ("unigram none", "a<|end|>b"),
    ],
)
def test_disguises(name: str, typed: str, tokenizers: dict[str, Tokenizer]) -> None:
    """Without a guard these texts become special tokens, so the cases are real."""
    tokenizer = tokenizers[name]
    special = special_ids(tokenizer)
    assert special & set(tokenizer.encode_text(typed))
    assert special & set(tokenizer.encode_rendered(typed))
    assert not special & set(tokenizer.encode_text(typed, plain=True))
    assert not special & set(tokenizer.encode_rendered(tokenizer.guard(typed)))


def test_what_is_not_disguised_is_not_cut(tokenizers: dict[str, Tokenizer]) -> None:
    """Guards would split a token from its neighbours."""
    for tokenizer in tokenizers.values():
        for text in ("hello w\u00f6rld", "\uff28ello <|", "EN D"):
            assert tokenizer.guard(text) == text


def test_what_a_file_has_saved_of_truncation_and_padding_counts_for_nothing(tmp_path: Path) -> None:
    for number, about in enumerate(
        (
            {"truncation": truncation(4)},
            {"truncation": truncation(6, 5, direction="Left")},
            {"padding": padding(40)},
            {"padding": padding(3, 16), "truncation": truncation(9)},
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / "tokenizer.json"
        path.write_text(json.dumps(document(**about)))
        tokenizer = Tokenizer(folder)
        reference = PreTrainedTokenizerFast(tokenizer_file=str(path))
        text = "a text of many tokens, 25"
        expected = reference(text)["input_ids"]
        assert len(expected) == 25
        assert tokenizer.encode_text(text) == expected
        assert tokenizer.encode_rendered(tokenizer.guard(text)) == expected
