"""Valid model names, and names that must never become a path."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeinf.runtime.config import Settings
from moeinf.runtime.hub.aliases import entry_of
from moeinf.runtime.machine.measurements import measured_path
from moeinf.runtime.names import _OLLAMA, BadName, ModelName, is_path, parse_name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("demo", ModelName("demo", "bf16")),
        ("Demo:F32", ModelName("demo", "f32")),
        ("deepseek-v2-lite", ModelName("deepseek-v2-lite", "q4")),
        ("org/Model.v1_x:f32", ModelName("org--model.v1_x", "f32")),
        ("org--model.v1_x", ModelName("org--model.v1_x", "q4")),
        ("demo:latest", ModelName("demo", "bf16")),
        ("Org/Model:LATEST", ModelName("org--model", "q4")),
        ("gpt-oss:20b", ModelName("gpt-oss", "mxfp4")),
        ("Mixtral:8x7B", ModelName("mixtral", "q4")),
        ("hf.co/Org/Model:q8", ModelName("org--model", "q8")),
        ("huggingface.co/Org/Model", ModelName("org--model", "q4")),
        ("https://huggingface.co/Org/Model", ModelName("org--model", "q4")),
        ("https://www.huggingface.co/Org/Model/:bf16", ModelName("org--model", "bf16")),
        ("HTTPS://HF.CO/Org/Model/tree/main", ModelName("org--model", "q4")),
    ],
)
def test_names(text: str, name: ModelName) -> None:
    assert parse_name(text) == name
    assert parse_name(str(name)) == name


@pytest.mark.parametrize(
    "text",
    ["", ".", "..", "a/b/c", "/etc", "a/../b", "a..b", "-a", "a-", "con", "a b", "a\0b", "é",
     "a--b--c", "a/", "/a", ":bf16", "x" * 97, ":latest", "hf.co/", "https://hf.co/a/b/c",
     "https://example.com/a/b", "hf.co/hf.co/a/b", "hf.co/../x", "https://hf.co//a"],
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


def test_ollamas_sizes_lead_to_short_names() -> None:
    for theirs, ours in _OLLAMA.items():
        entry = entry_of(theirs)
        assert entry is not None
        assert (entry.name, parse_name(theirs).tag) == (ours, entry.tag)


@given(st.sampled_from(["", "hf.co/", "https://huggingface.co/"]), st.text(max_size=40))
def test_no_text_leaves_the_folder(before: str, text: str) -> None:
    try:
        name = parse_name(before + text)
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
