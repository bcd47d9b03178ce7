"""Test the scripts that check a release: their parts, and the commands of other Debians."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.check_package import PARTS, ROOT, Part, checked, lacking
from scripts.debian_wheels import commands
from scripts.emulated_wheels import fetch_libraries, version_of


def test_a_part_ends_with_its_first_command_that_fails() -> None:
    assert checked(Part(("true", "exit 3", "false"))) == "failed: exit 3"
    assert checked(Part(("true", "test -d {out}"))) == "ok"


def test_options_reach_a_command_as_words() -> None:
    part = Part(('set -- {options} && test "$#:$2" = "2:a b"',))
    assert checked(part, ["-v", "a b"]) == "ok"
    assert checked(part, []) != "ok"


def test_what_is_missing_is_named() -> None:
    part = Part((), modules=("json", "no_such_module"), programs=("sh", "no-such-program"))
    assert lacking(part) == ["no_such_module", "no-such-program"]


@pytest.mark.parametrize("name", sorted(PARTS))
def test_what_a_part_runs_exists(name: str) -> None:
    lines = " ".join(PARTS[name].commands)
    paths = re.findall(r"\b(?:tests|scripts)/[\w/.]+", lines)
    modules = re.findall(r"-m (scripts\.\w+)", lines)
    paths += [f"{module.replace('.', '/')}.py" for module in modules]
    assert paths or name == "docs"
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_each_python_builds_for_each_machine_and_is_asked() -> None:
    lines = commands(("3.13", "3.14"), ("x86_64", "aarch64")).splitlines()
    builds = [line for line in lines if "build_wheels.py" in line]
    asks = [line for line in lines if "check_package.py" in line]
    for version, build, ask in zip(("3.13", "3.14"), builds, asks, strict=True):
        python = Path("/tools", version, "bin/python")
        assert "--machine x86_64 --machine aarch64" in build
        assert build.endswith(f" {python}")
        assert ask.startswith(f"{python} ")
        assert ask.endswith(f"-cp{version.replace('.', '')}-*.whl")
    assert lines.index(builds[-1]) < lines.index(asks[0])


def test_a_foreign_module_has_the_name_and_the_tag_of_its_machine(tmp_path: Path) -> None:
    pytest.importorskip("ziglang", reason="pip install ziglang")
    from scripts.build_wheels import cross_settings

    about = {
        "SOABI": "cpython-314-x86_64-linux-gnu",
        "MULTIARCH": "x86_64-linux-gnu",
        "LDVERSION": "3.14",
    }
    settings = cross_settings(about, "aarch64", tmp_path)
    assert settings["SETUPTOOLS_EXT_SUFFIX"] == ".cpython-314-aarch64-linux-gnu.so"
    assert settings["_PYTHON_HOST_PLATFORM"] == "linux-aarch64"
    assert "-target aarch64-linux-gnu.2.28" in settings["CXX"]
    assert "'-DCMAKE_SYSTEM_PROCESSOR=aarch64'" in settings["CMAKE_ARGS"]
    module = "'-DPYTHON_MODULE_EXTENSION=.cpython-314-aarch64-linux-gnu.so'"
    assert module in settings["CMAKE_ARGS"]


def test_the_libraries_of_an_emulated_wheel_are_for_its_machine(tmp_path: Path) -> None:
    words = fetch_libraries("3.14", tmp_path)
    options = [(word, words[at + 1]) for at, word in enumerate(words[:-1]) if word[:2] == "--"]
    tags = [value for option, value in options if option == "--platform"]
    assert "manylinux_2_31_aarch64" in tags  # llguidance offers no older one
    assert all(tag.endswith("_aarch64") for tag in tags)
    assert ("--python-version", "3.14") in options
    assert ("--target", str(tmp_path)) in options
    assert any(word.startswith("torch>") for word in words)


def test_a_wheel_names_the_python_that_the_emulated_debian_needs() -> None:
    assert version_of(Path("moeinf-0.2.0-cp313-cp313-manylinux_2_28_aarch64.whl")) == "3.13"
    for name in ("cp313-cp313-manylinux_2_28_x86_64", "cp312-cp312-manylinux_2_28_aarch64"):
        with pytest.raises(ValueError, match=r"is not for aarch64"):
            version_of(Path(f"moeinf-0.2.0-{name}.whl"))
