"""The registry: entries are complete and lead to families; a name has one model."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from huggingface_hub import constants

from moeinf.models.families import FAMILIES
from moeinf.runtime.config import Settings
from moeinf.runtime.hub import listing, resolve
from moeinf.runtime.hub.aliases import Entry, entry_of, licence_of, registry
from moeinf.runtime.names import TAGS, ModelName, parse_name
from tests.conftest import ignore


@pytest.mark.parametrize("entry", registry().values(), ids=lambda entry: entry.name)
def test_an_entry(entry: Entry) -> None:
    assert entry.family in FAMILIES
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", entry.repo)
    assert re.fullmatch(r"[a-z0-9.-]+", entry.licence)
    assert 0.1 < entry.parameters < 2000
    assert entry.tag in TAGS
    for name in (entry.name, *entry.aliases):
        assert parse_name(name) == ModelName(name, entry.tag)
        assert entry_of(f"{name.upper()}:q4") is entry
    sizes = entry.sizes()
    assert sizes["q4"] < sizes["q4d8"] < sizes["q8"] < sizes["bf16"] < sizes["f32"]


@pytest.mark.parametrize(("asked", "taken"), [(None, "v2"), ("v3", "v3")])
def test_an_entrys_revision_is_what_a_pull_takes(
    asked: str | None, taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def look_up(name: str, revision: str | None, *_: object) -> NoReturn:
        seen.append((name, revision))
        raise listing.RepositoryError("enough")

    olmoe = entry_of("olmoe")
    assert olmoe is not None
    monkeypatch.setattr(resolve, "entry_of", lambda _: replace(olmoe, revision="v2"))
    monkeypatch.setattr(resolve, "look_up_all", look_up)
    monkeypatch.setattr(resolve, "is_offline", lambda: False)
    with pytest.raises(listing.RepositoryError):
        resolve.find_source("olmoe", None, Settings(tmp_path), ignore, asked)
    assert seen == [(olmoe.repo, taken)]


def test_names_are_unique() -> None:
    names = [name for entry in registry().values() for name in (entry.name, *entry.aliases)]
    assert len(set(names)) == len(names)


def test_every_family_has_a_model() -> None:
    """No short name stands for a granitemoeshared yet."""
    families = {f.model_type for f in FAMILIES.values()} - {"granitemoeshared"}
    known = {FAMILIES[entry.family].model_type for entry in registry().values()}
    assert known == families


def test_the_licence_of_a_source() -> None:
    entry = entry_of("mixtral")
    assert entry is not None
    for source in (f"hub:{entry.repo}", f"hub:{entry.repo}:Q4_K_M"):
        assert licence_of(source) == entry.licence == "apache-2.0"
    assert licence_of("hub:Org/Other") is None
    assert licence_of("demo") == "apache-2.0"


def test_sizes_come_near_what_is_published() -> None:
    """Sizes are bytes of the safetensors files of bfloat16 repositories."""
    for name, published in (("mixtral", 93.4e9), ("olmoe", 13.8e9), ("phi-3.5-moe", 83.7e9)):
        entry = entry_of(name)
        assert entry is not None
        assert entry.sizes()["bf16"] == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize("entry", registry().values(), ids=lambda entry: entry.name)
def test_every_name_resolves_without_a_network(
    entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error says which repository is missing, and the command that prints what is known."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for name in (entry.name, *entry.aliases):
        with pytest.raises(listing.RepositoryError, match=re.escape(entry.repo)) as caught:
            resolve.find_source(name, None, Settings(tmp_path), ignore)
        assert f"`moeinf show {entry.name}`" in caught.value.hint
