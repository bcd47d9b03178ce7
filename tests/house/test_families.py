"""Every family has the checks that docs/adding-a-family.md lists, and its row in docs/models.md."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from moeinf.cli.commands.models.export import export
from moeinf.models.families import FAMILIES
from moeinf.runtime.gguf.writing.architectures import _FAMILIES
from tests.exported import FAMILIES as RUN_BY_LLAMA_CPP
from tests.exported import STREAMS
from tests.runtime.engine import test_families, test_quantised_families
from tests.runtime.gguf.writing.test_like_the_converter import EXPORTED
from tests.tiny_configs import TINY
from tests.tiny_families import Tiny

_TABLE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
_ROW = re.compile(r"\| `([a-z]\w*)`[^|]*\|[^|]*\|[^|]*\| `([^`]+)` \|")
ROWS = [(family, words.strip('"')) for family, words in _ROW.findall(_TABLE)]
ALL = {tiny.family for tiny in TINY.values()}


def of(names: Iterable[str | Tiny]) -> set[str]:
    return {(TINY[name] if isinstance(name, str) else name).family for name in names}


def test_every_family_is_checked() -> None:
    """The tests of tests/models take all of TINY. These choose."""
    assert of(test_families.CONFIGS) | {"olmoe"} == ALL
    quantised = [*test_quantised_families.CONFIGS, *test_quantised_families.BRIEF_TOO]
    assert of(name for name in quantised if name in TINY) == ALL


def test_every_family_is_exported() -> None:
    exported = of([*EXPORTED.values(), *RUN_BY_LLAMA_CPP.values(), *STREAMS.values()])
    assert exported == ALL
    assert {FAMILIES[family].model_type for family in ALL} == set(_FAMILIES)
    _, _, named = str(export.__doc__).partition("config.json): ")
    assert [name.strip() for name in named.partition(".")[0].split(",")] == sorted(_FAMILIES)


def test_every_name_is_in_the_documents() -> None:
    """The README leaves out the names of text parts."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert [name for name in FAMILIES if f"`{name}`" not in _TABLE] == []
    parts = {"mistral3"} | {name for name in FAMILIES if name.endswith("_text")}
    assert {name for name in FAMILIES if f"`{name}`" not in readme} == parts


@pytest.mark.parametrize(("family", "words"), ROWS, ids=[family for family, _ in ROWS])
def test_the_command_of_a_row_selects_its_family(family: str, words: str) -> None:
    expression = Expression.compile(words)
    chosen = {
        name
        for name in TINY
        if expression.evaluate(lambda word, name=name: word.lower() in name.lower())
    }
    assert family in of(chosen)
