"""The pictures of the documents are what their scripts draw, and name what there is."""

from __future__ import annotations

import re
from pathlib import Path

from scripts.picture_architecture import DOCS, LANES, MOVES, STATES, STEPS, pictures
from scripts.picture_memory import PICTURE, measured, picture

ROOT = Path(__file__).parents[2]


def test_the_pictures_are_what_the_script_draws() -> None:
    text = (DOCS / "architecture.md").read_text()
    for name, drawn in pictures().items():
        assert (DOCS / name).read_text(encoding="utf-8") == drawn, f"{name}: run the script again"
        assert f"]({name})" in text


def test_they_name_what_there_is() -> None:
    notes = [step.note for step in STEPS] + [f"{floor}/{file}" for floor, file in LANES]
    files = {file for note in notes for file in note.split(", ")}
    assert [file for file in sorted(files) if not (ROOT / file).is_file()] == []
    assert {state for start, end, *_ in MOVES for state in (start, end)} == set(STATES)
    words = (ROOT / "native/policy/adaptive_core.h").read_text()
    words += (ROOT / "offload/store/residency.py").read_text()
    for state in ("loading", "staged", "kept", "pinned"):
        assert re.search(rf"\b{state}\b", words), state


def test_the_picture_of_the_readme_is_what_the_script_draws() -> None:
    assert PICTURE.read_text(encoding="utf-8") == picture(), f"{PICTURE.name}: run the script again"
    assert "](docs/memory.svg)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f">{measured()['moeinf'][35]}<" in picture()
    assert measured()["llama.cpp"][35] is None
