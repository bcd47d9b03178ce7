"""Valid model names, and names that must never become a path."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeinf.runtime.config import Settings
from moeinf.runtime.machine.measurements import measured_path
from moeinf.runtime.names import BadName, ModelName, is_path, parse_name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("demo", ModelName("demo", "bf16")),
        ("Demo:F32", ModelName("demo", "f32")),
        ("deepseek-v2-lite", ModelName("deepseek-v2-lite", "q4")),
        ("org/Model.v1_x:f32", ModelName("org--model.v1_x", "f32")),
        ("org--model.v1_x", ModelName("org--model.v1_x", "q4")),
    ],
)
def test_names(text: str, name: ModelName) -> None:
    assert parse_name(text) == name
    assert parse_name(str(name)) == name


@pytest.mark.parametrize(
    "text",
    ["", ".", "..", "a/b/c", "/etc", "a/../b", "a..b", "-a", "a-", "con", "a b", "a\0b", "é",
     "a--b--c", "a/", "/a", ":bf16", "x" * 97],
)  # fmt: skip
def test_not_names(text: str) -> None:
    with pytest.raises(BadName, match="is not a model name"):
        parse_name(text)


@pytest.mark.parametrize("text", ["devices.json", "Devices.JSON:q4"])
def test_no_model_has_the_name_of_a_file_in_state(text: str, tmp_path: Path) -> None:
    assert measured_path(Settings(tmp_path)).name == "devices.json"
    with pytest.raises(BadName, match="moeinf has a file of that name"):
        parse_name(text)
    assert parse_name("org/devices.json:q4").name == "org--devices.json"


def test_unknown_tag_names_the_tags() -> None:
    with pytest.raises(BadName, match=r"the tag 'q9' is invalid"):
        parse_name("demo:q9")


@given(st.text(max_size=40))
def test_no_text_leaves_the_folder(text: str) -> None:
    try:
        name = parse_name(text)
    except BadName:
        return
    assert "/" not in name.name
    assert "\\" not in name.name
    assert ".." not in name.name
    assert not name.name.startswith(".")
    assert len(name.name) <= 200


@pytest.mark.parametrize("text", ["./x", "../x", "/x", "~/x", ".", "..", "~"])
def test_paths(text: str) -> None:
    assert is_path(text)


@pytest.mark.parametrize("text", ["demo", "org/name", ".x", "x/./y"])
def test_not_paths(text: str) -> None:
    assert not is_path(text)
