"""The wheel and the sdist that pyproject.toml describes: their files, their bytes, no compiler."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from scikit_build_core import build

from moeinf.native import _native
from scripts.check_package import MOST_WHEEL_BYTES, ROOT, faults_of, tried

FLOORS = ("api", "cli", "errors", "models", "native", "offload", "runtime", "server")
FILES = ("CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml")
WITHOUT = shutil.ignore_patterns("__pycache__", "*.so")


def tree(folder: Path) -> Path:
    """Copy what is packed; the files are as old as the copy."""
    folder.mkdir()
    for name in FILES:
        shutil.copyfile(ROOT / name, folder / name)
    for name in FLOORS:
        shutil.copytree(ROOT / name, folder / name, ignore=WITHOUT, copy_function=shutil.copyfile)
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack a wheel with the module that this environment has compiled."""
    folder = tmp_path_factory.mktemp("wheel")
    source = tree(folder / "source")
    module = Path(_native.__file__)
    shutil.copyfile(module, source / "native" / module.name)
    patch = pytest.MonkeyPatch()
    with patch.context() as only:
        only.chdir(source)
        name = build.build_wheel(str(folder), {"wheel.cmake": "false", "wheel.platlib": "true"})
    return folder / name


def test_a_wheel_needs_no_compiler_to_answer(wheel: Path) -> None:
    assert faults_of(wheel) == []
    no_index = ["--no-index", "--no-deps", "--no-compile"]
    libraries = Path(np.__file__).parents[1]
    said = tried(sys.executable, wheel, "", no_index, libraries)
    assert said == f"Python {sys.version.split()[0]} answers 42"


def test_a_wheel_that_answers_wrongly_is_an_error(wheel: Path, tmp_path: Path) -> None:
    bad = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as good, zipfile.ZipFile(bad, "w") as file:
        for name in good.namelist():
            entry = name == "moeinf/cli/entry.py"
            file.writestr(name, "def main(): print(41)" if entry else good.read(name))
    options = ["--no-index", "--no-deps", "--no-compile"]
    with pytest.raises(ValueError, match=r"answers '41'"):
        tried(sys.executable, bad, "", options)


@pytest.mark.linux("reads an ELF header")
def test_a_module_of_another_python_or_machine_is_a_fault(wheel: Path, tmp_path: Path) -> None:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    machine = platform.machine()
    other = {"x86_64": "aarch64", "aarch64": "x86_64"}[machine]
    module = Path(_native.__file__).name
    name = wheel.name.replace(machine, other).replace(python, "cp399")
    shutil.copyfile(wheel, tmp_path / name)
    assert faults_of(tmp_path / name) == [
        f"moeinf/native/{module} does not end in .cpython-399-{other}-linux-gnu.so",
        f"moeinf/native/{module} is not compiled for {other}",
    ]


def test_faults_of_a_wheel(wheel: Path, tmp_path: Path) -> None:
    bad = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as good, zipfile.ZipFile(bad, "w") as file:
        for name in good.namelist():
            if not name.endswith(".safetensors"):
                data = good.read(name) if name.endswith(".so") else b""
                file.writestr(name.replace("_native.pyi", "kernels.h"), data)
        file.writestr("weights", os.urandom(1 << 20) * (MOST_WHEEL_BYTES >> 20))
    assert faults_of(bad) == [
        "moeinf/models/demo/model.safetensors is missing",
        "moeinf/native/kernels.h is a source",
        f"{bad.stat().st_size} bytes are more than {MOST_WHEEL_BYTES}",
    ]


def test_two_sdists_have_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1767225600")
    built = []
    for number in (1, 2):
        source = tree(tmp_path / f"tree{number}")
        for path in source.rglob("*"):
            os.utime(path, (10**9 * number, 10**9 * number))
        monkeypatch.chdir(source)
        out = tmp_path / f"out{number}"
        built.append(out / build.build_sdist(str(out)))
    first, second = (path.read_bytes() for path in built)
    assert first == second
    with tarfile.open(built[0]) as file:
        names = file.getnames()
    assert any(name.endswith("native/layer/router.cpp") for name in names)
