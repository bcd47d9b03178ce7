"""Test `moeinf eamc` on a traced model: show, export, import and clear."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, Command, command_in, environment


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, demo_home: Path) -> Path:
    """Trace forty prompts of four kinds; two are too similar to others for an entry each."""
    folder = tmp_path_factory.mktemp("eamc")
    (folder / "models").symlink_to(demo_home / "models")
    options = ("--subset", "sort,upper,brackets,convert", "--limit", "40", "--quiet")
    result = command_in(folder)("trace", "demo", "--dataset", "demo", *options)
    assert result.code == 0, result.err
    return folder


@pytest.fixture
def moeinf(home: Path) -> Command:
    return command_in(home)


@pytest.fixture
def entries(moeinf: Command) -> int:
    """Count the entries of the collection: 40 requests, less those that are alike."""
    found = json.loads(moeinf("eamc", "show", "demo", "--json").out)["entries"]
    assert 32 <= found <= 40
    return int(found)


def test_show_finds_the_kinds_of_requests(moeinf: Command, entries: int) -> None:
    about = json.loads(moeinf("eamc", "show", "demo", "--json").out)
    assert about["model"] == "demo:bf16"
    sizes = [group["entries"] for group in about["groups"]]
    assert sum(sizes) == entries
    assert 4 <= len(sizes) <= 7  # a kind may form two groups
    assert max(sizes) < 20  # no group holds two kinds; some processors mix a few requests
    assert (about["capacity"], about["capacity_limit"], about["alike"]) == (512, "matching", 0.97)
    assert about["silhouette"] > 0.3
    assert 0 < about["experts_used_per_request"] < about["experts_used"] <= 1
    assert 0.7 < about["nearest"]["median"] < 1
    assert len(about["heat"]) == 6
    assert all(len(row) == 32 and sum(row) == pytest.approx(1, abs=1e-3) for row in about["heat"])


def test_show_in_words_with_a_small_heat_map(moeinf: Command, entries: int) -> None:
    result = moeinf("eamc", "show", "demo")
    lines = result.out.splitlines()
    assert f"entries:       {entries} of at most 512" in lines
    (groups,) = (line for line in lines if line.startswith("groups:"))
    assert re.search(r"\d, of \d+, \d+, .* \(k-means by cosine, silhouette 0\.\d+\)", groups)
    layers = [line for line in lines if line.startswith("L")]
    assert [line[:6] for line in layers] == [f"L{layer}    " for layer in range(6)]
    assert all("█" in line and len(line) <= 6 + 32 for line in layers)


def test_a_narrow_terminal(home: Path, demo_home: Path) -> None:
    result = command_in(home)("eamc", "show", "demo", COLUMNS="24")
    assert all(len(line) <= 24 for line in result.out.splitlines() if line.startswith("L"))


def test_plot_writes_a_picture(moeinf: Command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "x.png"
    result = moeinf("eamc", "show", "demo", "--plot", str(path))
    assert result.code == 0, result.err
    assert path.read_bytes().startswith(b"\x89PNG")
    assert moeinf("eamc", "show", "demo", "--plot", str(tmp_path / "x.what")).code != 0


def test_without_matplotlib_one_clear_line(home: Path, tmp_path: Path) -> None:
    code = "import sys; sys.modules['matplotlib'] = None; " + COMMAND[-1]
    done = subprocess.run(
        [sys.executable, "-c", code, "eamc", "show", "demo", "--plot", str(tmp_path / "x.png")],
        env=environment(home),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "Error: drawing needs matplotlib, which is not installed",
        "Try: `pip install matplotlib`",
    ]


def test_export_clear_import(home: Path, demo_home: Path, tmp_path: Path, entries: int) -> None:
    (tmp_path / "models").symlink_to(demo_home / "models")
    fresh, file = command_in(tmp_path), str(tmp_path / "x.eamc")
    assert command_in(home)("eamc", "export", "demo", file).out == (
        f"exported {entries} entries; the EAMC of demo:bf16 holds {entries}\n"
    )
    assert json.loads(fresh("eamc", "import", "demo", file, "--json").out) == {
        "model": "demo:bf16", "imported": entries, "entries": entries, "file": file,
    }  # fmt: skip
    shown = json.loads(fresh("eamc", "show", "demo", "--json").out)
    assert shown == json.loads(command_in(home)("eamc", "show", "demo", "--json").out)
    assert fresh("eamc", "clear", "demo").out == f"cleared {entries} entries\n"
    empty = fresh("eamc", "show", "demo")
    assert "0 of at most 512" in empty.out
    assert "`moeinf run demo:bf16` and `moeinf trace` fill it" in empty.err
    assert fresh("eamc", "show", "demo", "--plot", "x.png").code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["import", "demo", "{}/gone"], "gone"),
        (["import", "demo", "{}/x.txt"], "x.txt is not an EAMC"),
        (["show", "dmo"], "demo:bf16, "),
        (["export", "demo", "/no/x.eamc"], "/no/x.eamc"),
    ],
)
def test_errors(arguments: list[str], words: str, moeinf: Command, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("something else")
    result = moeinf("eamc", *(argument.format(tmp_path) for argument in arguments))
    assert result.code == 1
    assert words in result.err
    assert "Traceback" not in result.err
    assert len(result.err.splitlines()) <= 2


def test_a_damaged_log_is_put_aside_in_one_line(demo_home: Path, tmp_path: Path) -> None:
    (tmp_path / "models").symlink_to(demo_home / "models")
    moeinf = command_in(tmp_path)
    folder = tmp_path / "state/demo/bf16"
    folder.mkdir(parents=True)
    (folder / "eamc.log").write_text("what is this")
    result = moeinf("run", "demo", "17+25=")
    assert (result.code, result.out) == (0, "42\n")
    (line,) = result.err.splitlines()
    assert "is not a log of moeinf: it was put aside as eamc.log.aside-1" in line
    assert (folder / "eamc.log.aside-1").read_text() == "what is this"
    assert moeinf("run", "demo", "sort: 5 3 9").err == ""
    assert json.loads(moeinf("eamc", "show", "demo", "--json").out)["entries"] == 2
