"""A pull refuses chat templates above 1 MiB, in each way in which a template comes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.runtime.text.tokenizer_trial import MOST_TEMPLATE_BYTES
from tests.cli.conftest import command_in
from tests.gguf_files import matrices, write_gguf

SHOWN = "{{ messages[-1].content }}"


def template(size: int) -> str:
    return "{#" + "x" * (size - 4 - len(SHOWN)) + "#}" + SHOWN


def in_config(folder: Path, given: Any) -> None:
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    about = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**about, "chat_template": given}))


def named(size: int) -> list[dict[str, str]]:
    other = {"name": "tool_use", "template": template(size - 100)}
    return [{"name": "default", "template": template(100)}, other]


WAYS = {
    "file": lambda folder, size: (folder / "chat_template.jinja").write_text(template(size)),
    "text": lambda folder, size: in_config(folder, template(size)),
    "named": lambda folder, size: in_config(folder, named(size)),
}


@pytest.mark.parametrize("way", [*WAYS, "gguf"])
def test_a_long_template_is_refused(way: str, tmp_path: Path) -> None:
    moeinf = command_in(tmp_path / "home")
    for size, code in ((MOST_TEMPLATE_BYTES + 1, 1), (MOST_TEMPLATE_BYTES, 0)):
        folder = tmp_path / str(size)
        shutil.copytree(DEMO_CHECKPOINT, folder)
        if way == "gguf":
            WAYS["file"](folder, size)
            source = write_gguf(folder, tmp_path / f"{size}.gguf", matrices(Kind.BF16))
        else:
            WAYS[way](folder, size)
            source = folder
        told = moeinf("pull", str(source), "--name", "x:bf16")
        assert (told.code, "template" in told.err) == (code, code == 1), told.err
