"""Test `moeinf pull ollama:NAME` and `--list-local` with made-up stores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeinf.cli.main import answer
from scripts.make_checkpoint import byte_tokenizer
from tests.cli.conftest import check_document
from tests.gguf_files import write_gguf
from tests.runtime.library.test_local_stores import DIGEST, REGISTRY, put
from tests.tiny import save_tiny


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give Ollama a tiny model tiny:7b, and a damaged one."""
    root = tmp_path / "ollama"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MOEINF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OLLAMA_MODELS", str(root))
    put(root, f"{REGISTRY}/tiny/7b")
    put(root, f"{REGISTRY}/zzz/latest", content="{")
    save_tiny("olmoe", tmp_path / "x", seed=3)
    byte_tokenizer().save(str(tmp_path / "x" / "tokenizer.json"))
    file = write_gguf(tmp_path / "x", tmp_path / "x.gguf")
    file.rename(root / "blobs" / f"sha256-{DIGEST}")
    return root


def test_a_model_of_ollama_is_pulled(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(["pull", "ollama:tiny:7b", "--json", "--quiet"]) == 0
    pulled = json.loads(capsys.readouterr().out)
    assert pulled["name"] == "tiny-7b"
    assert pulled["source"] == str(store / "blobs" / f"sha256-{DIGEST}")
    assert answer(["pull", "ollama:tiny:7b", "--name", "mine:q8", "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert (planned["name"], planned["tag"]) == ("mine", "q8")
    assert answer(["plan", "ollama:tiny:7b", "--json"]) == 0
    assert answer(["verify", f"{pulled['name']}:{pulled['tag']}", "--json"]) == 0


def test_the_list(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["pull", "--list-local", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    check_document("pull-list-local", document)
    assert [model["name"] for model in document["models"]] == [
        "ollama:tiny:7b", "ollama:zzz:latest"
    ]  # fmt: skip
    assert answer(["pull", "--list-local"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].split() == ["MODEL", "SIZE", "STORE", "FILE"]
    assert f"sha256-{DIGEST}" in shown
    assert "damaged: its manifest is not JSON" in shown


def test_without_a_model_a_pull_is_wrong_usage() -> None:
    assert answer(["pull"]) == 2
