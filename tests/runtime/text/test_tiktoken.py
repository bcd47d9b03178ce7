"""Kimi's tiktoken.model becomes a tokenizer.json with tiktoken's tokens.

tests/data/README.md says how the vocabulary and the expected tokens were made.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint, open_checkpoint
from moeinf.runtime.config import Settings
from moeinf.runtime.gguf.writing.vocabulary import vocabulary
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.repacking.repack import repack
from moeinf.runtime.library.sources import LocalSource
from moeinf.runtime.names import parse_name
from moeinf.runtime.text.tiktoken import BadRanks, kimi_json
from moeinf.runtime.text.tokenizer import Tokenizer
from moeinf.runtime.text.tokenizer_trial import convert
from tests.conftest import ignore
from tests.tiny import save_tiny

PLACE = Path(__file__).parents[2] / "data"
RANKS = (PLACE / "kimi.tiktoken").read_bytes()
DATA = json.loads((PLACE / "kimi_tokens.json").read_text("utf-8"))
ABOUT: dict[str, Any] = DATA["about"]
COUNT = RANKS.count(b"\n")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("kimi")
    files = {"tiktoken.model": RANKS, "tokenizer_config.json": json.dumps(ABOUT).encode()}
    made = convert(files.get)
    assert made is not None
    (folder / "tokenizer.json").write_bytes(made)
    (folder / "tokenizer_config.json").write_bytes(files["tokenizer_config.json"])
    return Tokenizer(folder)


@pytest.mark.parametrize(("text", "ids"), DATA["plain"], ids=range(len(DATA["plain"])))
def test_the_tokens_of_tiktoken(text: str, ids: list[int], tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_text(text, plain=True) == ids
    guarded = tokenizer.encode_rendered(tokenizer.guard(text))
    assert tokenizer.decode(guarded) == text
    if "[BOS]" not in text:  # a fenced piece is encoded alone
        assert guarded == ids
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.piece, ids)).decode() == text


@pytest.mark.parametrize(("text", "ids"), DATA["marked"])
def test_special_tokens(text: str, ids: list[int], tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_rendered(text) == ids


def test_every_id_has_a_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == COUNT + 256
    named = {
        int(number): token["content"] for number, token in ABOUT["added_tokens_decoder"].items()
    }
    for number in range(COUNT, COUNT + 256):
        name = named.get(number, f"<|reserved_token_{number}|>")
        assert tokenizer.token_id(name) == number
    shown = {
        token["content"] for token in ABOUT["added_tokens_decoder"].values() if not token["special"]
    }
    assert shown == {"<think>", "<|tool_calls_section_begin|>"}
    assert len(tokenizer.special_tokens) == 256 - len(shown)
    assert tokenizer.decode([COUNT + 2, *DATA["plain"][1][1], COUNT + 5]) == "a<think>"


def test_an_export_names_its_words() -> None:
    """llama.cpp knows the pattern by name."""
    made = json.loads(kimi_json(RANKS, ABOUT))
    keys = vocabulary(made, COUNT + 256, "deepseek2")
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("gpt2", "kimi-k2")


def line(token: bytes, rank: object) -> bytes:
    return base64.b64encode(token) + f" {rank}\n".encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        RANKS + b"no line\n",
        RANKS + b"YWJjZA==\n",
        RANKS + line(b"new token", -1),
        RANKS + line(b"new token", "9" * 12),
        RANKS + line(b"new token", COUNT + 1),  # a gap
        RANKS + line(b"new token", 5),  # a rank twice
        RANKS + line(b"a", COUNT),  # a token twice
        RANKS + line(b"x" * 513, COUNT),
        RANKS + b"A" * 100_000 + b" %d\n" % COUNT,
        RANKS + b"YW=JjZ %d\n" % COUNT,
        RANKS.partition(b"\n")[2],
        b"\n".join(line(bytes([n]), n).strip() for n in range(255)),
        b"\n" * (1 << 20),
        b"\x00\xff" * 1000,
    ],
    ids=range(15),
)
def test_a_bad_file_is_refused(data: bytes) -> None:
    with pytest.raises(BadRanks):
        kimi_json(data, ABOUT)


@pytest.mark.parametrize(
    "changes",
    [
        {"auto_map": None},
        {"auto_map": {"AutoTokenizer": ["tokenization_other.TikTokenTokenizer", None]}},
        {"auto_map": ["tokenization_kimi.TikTokenTokenizer"]},
        {"added_tokens_decoder": {str(COUNT - 1): {"content": "[X]"}}},
        {"added_tokens_decoder": {str(COUNT + 256): {"content": "[X]"}}},
        {"added_tokens_decoder": {"x": {"content": "[X]"}}},
        {"added_tokens_decoder": {str(COUNT): {"content": 5}}},
        {"added_tokens_decoder": {str(COUNT): {"content": "a"}}},  # the text of another token
        {
            "added_tokens_decoder": {
                str(COUNT): {"content": "[X]"},
                str(COUNT + 1): {"content": "[X]"},
            }
        },
    ],
)
def test_another_tokenizer_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadRanks):
        kimi_json(RANKS, {**ABOUT, **changes})


def test_the_refusal_names_the_file() -> None:
    for data in (RANKS + b"!\n", b"x" * (65 << 20)):
        files = {"tiktoken.model": data, "tokenizer_config.json": json.dumps(ABOUT).encode()}
        with pytest.raises(BadCheckpoint, match=r"^tiktoken\.model "):
            convert(files.get)


def test_a_pull_converts_it(tmp_path: Path) -> None:
    folder = tmp_path / "kimi"
    save_tiny("kimi-k2", folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    (folder / "tiktoken.model").write_bytes(RANKS)
    (folder / "tokenization_kimi.py").write_text("raise SystemExit('executed')")
    (folder / "tokenizer_config.json").write_text(json.dumps(ABOUT))
    library, name = Library(Settings(tmp_path / "home")), parse_name("kimi:q8")
    repack(LocalSource(open_checkpoint(folder), "x"), library, name, ignore, ignore)
    inside = library.folder(name)
    assert not (inside / "tiktoken.model").exists()
    assert not (inside / "tokenization_kimi.py").exists()
    found = Tokenizer(inside)
    for text, ids in DATA["plain"]:
        assert found.encode_text(text, plain=True) == ids
    (folder / "tiktoken.model").unlink()
    with pytest.raises(BadCheckpoint):
        repack(LocalSource(open_checkpoint(folder), "x"), library, name, ignore, ignore)
