"""Tokenizer files that make the library panic, abort or hang: each is refused, or works."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint
from moeinf.runtime.config import Settings
from moeinf.runtime.requests import PromptTooLong
from moeinf.runtime.text.tokenizer import Tokenizer, TokenizerFailed
from moeinf.runtime.text.tokenizer_trial import Trial, try_tokenizer
from tests.conftest import pull
from tests.tiny import save_tiny
from tests.tokenizer_files import WORDS, document, good, hostile, replace, split

HOSTILE = list(hostile())
TEXTS = ["", "17+25= hi", "a" * 300 + "!", " \n" * 300 + "x", "QXZ <s> é日\U0001f642\x00"]


def put(folder: Path, file: dict[str, Any]) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(file))
    return path


def test_each_is_refused_or_works(tmp_path: Path) -> None:
    """A file works if other texts give tokens or TokenizerFailed and this process survives."""
    assert len(HOSTILE) >= 100
    refused = set()
    with Trial(seconds=10) as trial:
        for name, file in HOSTILE:
            path = put(tmp_path, file)
            try:
                trial.of_file(path)
                tokenizer = Tokenizer(tmp_path)
            except BadCheckpoint:
                refused.add(name)
                continue
            for text in TEXTS:
                with suppress(TokenizerFailed):
                    tokenizer.decode(tokenizer.encode_text(text))
                    tokenizer.encode_rendered(tokenizer.guard(text))
    assert len(refused) >= 63
    assert {
        "split (a+)+$",
        r"split \s+$",
        "fixed length 0",
        "replace nothing",
        "doubles",
    } <= refused
    assert {"template none", "strip 3 3", "charsmap ffffffff", "template of ids"} <= refused


@pytest.mark.parametrize(("name", "file"), list(good()))
def test_good_ones_are_read(name: str, file: dict[str, Any], tmp_path: Path) -> None:
    try_tokenizer(put(tmp_path, file))
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode_text("ab" * 30)
    assert len(ids) == 60 + (name == "begins")


def test_a_pull_refuses_such_a_file_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    save_tiny("mixtral", folder)
    put(folder, document(pre_tokenizer={"type": "FixedLength", "length": 0}))
    settings = Settings(tmp_path / "home")
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json is refused"):
        pull(folder, settings, "tiny:f32")
    assert not list(settings.home.rglob("tokenizer.json"))


def test_a_panic_is_an_error(tmp_path: Path) -> None:
    """The file became part of a model despite the check."""
    put(tmp_path, document(pre_tokenizer=split("(a+)+$")))
    tokenizer = Tokenizer(tmp_path)
    for call in (tokenizer.encode_text, tokenizer.encode_rendered):
        with pytest.raises(TokenizerFailed, match="encode"):
            call("a" * 100 + "!")
    assert tokenizer.encode_text("b")
    put(tmp_path, document(decoder={"type": "Strip", "content": "!", "start": 0, "stop": 5}))
    tokenizer = Tokenizer(tmp_path)
    for call in (tokenizer.decode, tokenizer.tail):
        with pytest.raises(TokenizerFailed, match="decode"):
            call([0])
    put(tmp_path, document(normalizer=replace({"Regex": "("}, "")))
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("character", [" ", "\n", "a", "\u00e9", "\U0001f642"])
def test_ten_megabytes_of_one_character_are_too_long(character: str, tmp_path: Path) -> None:
    """The patterns of Qwen2, Llama-3 and DeepSeek-V3 panic, so no tokenizer is called."""
    put(tmp_path, document(pre_tokenizer=split(WORDS)))
    tokenizer = Tokenizer(tmp_path)
    text = character * (10_100_000 // len(character.encode()))
    for call in (tokenizer.encode_text, tokenizer.encode_rendered):
        with pytest.raises(PromptTooLong):
            call(text)
