"""Test `moeinf create` and `show --modelfile` with the demo: names over the same files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeinf.runtime.config import Settings
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.library.manifest import read_manifest
from tests.cli.conftest import Command, command_in
from tests.conftest import pull

MODELFILE = '''FROM demo
SYSTEM """You "are"
Mario."""
PARAMETER temperature 0
PARAMETER num_predict 2
PARAMETER stop "q q"
PARAMETER stop z
MESSAGE user 1+1=
MESSAGE assistant 2
TEMPLATE """{% for m in messages %}{{ m.content }}
{% endfor %}"""
LICENSE MIT
'''


@pytest.fixture
def own(tmp_path: Path) -> Command:
    pull(DEMO_CHECKPOINT, Settings(tmp_path), "demo:bf16")
    return command_in(tmp_path)


def test_a_name_shares_the_files_of_its_base(own: Command, tmp_path: Path) -> None:
    file = tmp_path / "Modelfile"
    file.write_text(MODELFILE)
    made = own("create", "mario", "-f", str(file), "--json")
    assert json.loads(made.out) == {"name": "mario", "tag": "bf16", "base": "demo:bf16"}
    library = Library(Settings(tmp_path))
    base, of_base = library.read("demo")
    copy, folder = library.read("mario")
    for one in base.files:
        assert (folder / one.path).samefile(of_base / one.path)
    assert copy.digest == base.digest

    shown = own("show", "mario", "--modelfile").out
    (tmp_path / "Again").write_text(shown)
    assert own("create", "luigi", "-f", str(tmp_path / "Again")).code == 0
    assert library.read("luigi")[0].defaults == copy.defaults
    assert own("show", "luigi", "--modelfile").out.split("\n")[1:] == shown.split("\n")[1:]
    assert "parameter stop:" in own("show", "mario").out

    file.write_text("FROM mario\nPARAMETER num_predict 3\n")  # a changed file, over itself
    assert own("create", "mario", "-f", str(file)).code == 0
    answer = json.loads(own("run", "mario", "--no-server", "--json", "17+25=").out)
    assert answer["tokens"] <= 3
    longer = own("run", "mario", "--no-server", "--json", "--max-tokens", "1", "17+25=")
    assert json.loads(longer.out)["tokens"] == 1

    assert own("rm", "demo").code == 0
    assert own("verify", "luigi").code == 0
    assert own("rm", "luigi").code == 0
    assert own("verify", "mario").code == 0
    assert [str(one.name) for one in library.installed()] == ["mario:bf16"]


def test_a_gguf_is_imported(own: Command, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    assert own("export", "demo", "--gguf", str(folder / "tiny.gguf")).code == 0
    (folder / "Modelfile").write_text("FROM ./tiny.gguf\nSYSTEM hi\n")
    assert own("create", "tiny:bf16", "-f", str(folder / "Modelfile")).code == 0
    library = Library(Settings(tmp_path))
    made = library.read("tiny:bf16")[0]
    assert made.source == str(folder / "tiny.gguf")
    assert made.defaults is not None
    assert (made.defaults.base, made.defaults.system) == (str(folder / "tiny.gguf"), "hi")
    before = (library.folder(made.model) / made.files[0].path).stat().st_ino
    (folder / "Modelfile").write_text("FROM tiny.gguf\nSYSTEM ho\n")
    assert own("create", "tiny:bf16", "-f", str(folder / "Modelfile")).code == 0
    again = library.folder(made.model)
    assert (again / made.files[0].path).stat().st_ino == before  # not imported again
    assert read_manifest(again).defaults.system == "ho"  # type: ignore[union-attr]


def test_what_is_refused(own: Command, tmp_path: Path) -> None:
    file = tmp_path / "M"

    def code(text: str, name: str = "mario") -> str:
        file.write_text(text)
        return str(json.loads(own("create", name, "-f", str(file), "--json").out)["error"]["code"])

    assert code("FROM demo\nSYSTEM x", "demo:bf16") == "model_exists"
    assert code("FROM demo\nSYSTEM x", "mario:q8") == "bad_name"
    assert code("FROM dmo") == "model_not_found"
    assert code("FROM demo\nADAPTER x") == "bad_modelfile"
    assert code("FROM demo\nTEMPLATE {{ 'a' * 1000000000 }}") == "bad_template"
    assert code("FROM ./none.gguf") == "bad_checkpoint"
    missing = own("create", "mario", "-f", str(tmp_path / "none"), "--json")
    assert json.loads(missing.out)["error"]["code"] == "bad_modelfile"
    assert own("create", "mario", "--quantize", "q4_K_M").code == 2
    assert [str(one.name) for one in Library(Settings(tmp_path)).installed()] == ["demo:bf16"]
