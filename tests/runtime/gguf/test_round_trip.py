"""A model that is exported and pulled again has the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeinf.offload.format.layout import ExpertForms
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.hub.resolve import find_source
from moeinf.runtime.jobs.export_gguf import export_gguf
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.repack import repack
from scripts.make_checkpoint import config, make_checkpoint
from tests.conftest import endless, ignore
from tests.exported import checkpoint, exported
from tests.generating import answering
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
        ("qwen3", "q6k"),  # with rows of 128 weights, which are no blocks of 256
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


@pytest.mark.parametrize(("tag", "other"), [("q4k", "Q4"), ("q6k", "Q8")])
def test_rows_that_are_not_whole_blocks(tag: str, other: str, tmp_path: Path) -> None:
    """The experts' down_proj is not padded to 256 columns, not widened in the file, and runs."""
    folder = tmp_path / "checkpoint"
    make_checkpoint(folder, config(2, 6, 256, 64, 2))
    settings, notes = Settings(tmp_path / "home"), list[str]()
    name, source = find_source(str(folder), f"tiny:{tag}", settings, ignore)
    made = repack(source, Library(settings), name, ignore, notes.append)
    assert made.forms == (ExpertForms(tag.upper(), other),)
    assert any(f"of 256 become {other.lower()}: experts' down_proj" in note for note in notes)
    file, library = tmp_path / "x.gguf", Library(settings)
    kinds = export_gguf(library.folder(name), made, file, ignore, ignore, force=False).tensors
    assert kinds[{"Q4": "Q4_0", "Q8": "Q8_0"}[other]] >= made.layers
    name, source = find_source(str(file), "again", settings, ignore)
    again = repack(source, library, name, ignore, ignore)
    assert name.tag == tag
    assert contents(again) == contents(made)
    with Engine.open(made, library.folder(made.model), EngineConfig(), settings) as engine:
        endless(engine)
        answer = answering(engine, [5, 9, 14, 3], 5)
        list(answer)
        assert len(answer.tokens) == 5
