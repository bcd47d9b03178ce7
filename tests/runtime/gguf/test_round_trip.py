"""A model that is exported and pulled again has the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeinf.runtime.hub.resolve import find_source
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.repack import repack
from tests.conftest import ignore
from tests.exported import checkpoint, exported
from tests.runtime.gguf.test_pulls import contents


@pytest.mark.parametrize(
    ("family", "tag"),
    [
        ("olmoe", "q4"),
        ("qwen3", "q8"),
        ("mixtral", "q4"),
        ("arctic", "q8"),
        ("phimoe", "q4"),
        ("olmoe", "q4k"),
        ("mixtral", "q5k"),
        ("olmoe", "q6k"),
    ],
)
def test_exported_and_pulled_again(family: str, tag: str, tmp_path: Path) -> None:
    model = exported(checkpoint(family, tmp_path / "checkpoint"), tmp_path / "made", tag)
    name, source = find_source(str(model.file), "again", model.settings, ignore)
    assert name.tag == tag
    notes: list[str] = []
    again = repack(source, Library(model.settings), name, ignore, notes.append)
    assert contents(again) == contents(model.manifest)
    assert notes == []
