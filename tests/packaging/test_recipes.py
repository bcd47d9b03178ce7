"""Test the Homebrew formula and the PKGBUILD: versions, hashes, and what they install and run."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts.recipes import PACKAGING, RECIPES, write

ROOT = PACKAGING.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FORMULA = (PACKAGING / "homebrew/moeinf.rb").read_text()
PKGBUILD = (PACKAGING / "aur/PKGBUILD").read_text()
NAMES = ("pkgname", "pkgver", "url", "license", "source", "sha256sums")


def pkgbuild(path: Path) -> dict[str, str]:
    """Return the variables of a PKGBUILD, as bash expands them."""
    asked = "; ".join(f'printf "%s\\n" "${{{name}[0]}}"' for name in NAMES)
    said = subprocess.run(
        ["bash", "-euc", f'source "$1"; {asked}', "bash", path],
        check=True,
        capture_output=True,
        text=True,
    )
    return dict(zip(NAMES, said.stdout.splitlines(), strict=True))


def formula(text: str, name: str) -> str:
    (value,) = re.findall(rf'^  {name} "([^"]*)"$', text, re.MULTILINE)
    return str(value)


def test_the_recipes_name_this_version_and_one_sdist() -> None:
    project, build = PROJECT["project"], pkgbuild(PACKAGING / "aur/PKGBUILD")
    assert build["pkgver"] == project["version"]
    assert build["source"].endswith(f"/moeinf-{project['version']}.tar.gz")
    assert build["source"] == formula(FORMULA, "url")
    assert build["sha256sums"] == formula(FORMULA, "sha256")
    assert build["license"] == formula(FORMULA, "license") == project["license"]
    assert build["url"] == formula(FORMULA, "homepage")


def test_the_version_is_the_same_everywhere() -> None:
    """Above the changelog's newest version, Unreleased collects what comes next."""
    version = PROJECT["project"]["version"]
    citation = (ROOT / "CITATION.cff").read_text()
    (cited,) = re.findall(r"^version: (.+)$", citation, re.MULTILINE)
    (date,) = re.findall(r"^date-released: (.+)$", citation, re.MULTILINE)
    sections = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert (cited, sections[:2]) == (version, ["[Unreleased]", f"[{version}] - {date}"])
    minor = version.rpartition(".")[0]
    assert f"| {minor}.x, the newest" in (ROOT / "SECURITY.md").read_text()


def test_a_release_sets_version_and_hash(tmp_path: Path) -> None:
    for name in RECIPES:
        (tmp_path / name).parent.mkdir()
        shutil.copyfile(PACKAGING / name, tmp_path / name)
    sdist = tmp_path / "moeinf-9.8.7.tar.gz"
    sdist.write_bytes(b"an sdist")
    write(sdist, tmp_path)
    digest = hashlib.sha256(b"an sdist").hexdigest()
    build = pkgbuild(tmp_path / "aur/PKGBUILD")
    assert (build["pkgver"], build["sha256sums"]) == ("9.8.7", digest)
    written = (tmp_path / "homebrew/moeinf.rb").read_text()
    assert (formula(written, "url"), formula(written, "sha256")) == (build["source"], digest)


def test_an_sdist_of_no_release_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="MAJOR"):
        write(tmp_path / "moeinf-0.2.0.dev1.tar.gz", tmp_path)


def test_the_sdist_has_what_the_recipes_install_and_not_the_recipes() -> None:
    left_out = PROJECT["tool"]["scikit-build"]["sdist"]["exclude"]
    for name in ("packaging/systemd/moeinf.service", "constraints.txt", "LICENSE"):
        assert name in PKGBUILD
        assert (ROOT / name).is_file()
        assert not any(name.startswith(folder) for folder in left_out), name
    for name in RECIPES:  # they hold its hash
        assert any(f"packaging/{name}".startswith(folder) for folder in left_out), name


def test_the_unit_runs_what_the_package_installs() -> None:
    unit = (PACKAGING / "systemd/moeinf.service").read_text()
    (program,) = re.findall(r"^ExecStart=(\S+)", unit, re.MULTILINE)
    assert f'"$pkgdir{Path(program).parents[1]}"' in PKGBUILD
    assert f"ln -s {program} " in PKGBUILD


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("wrong", ["", "Restarts=always\n", "ProtectSystem=very\n"])
def test_systemd_reads_the_unit(wrong: str, tmp_path: Path) -> None:
    """Its program is another one here: the unit's is not installed."""
    unit = (PACKAGING / "systemd/moeinf.service").read_text()
    text = re.sub(r"^ExecStart=\S+", f"{wrong}ExecStart=/bin/sh", unit, flags=re.MULTILINE)
    (tmp_path / "moeinf.service").write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", f"{tmp_path}/moeinf.service"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert bool(ended.stdout + ended.stderr) == bool(wrong), ended.stderr


def test_the_python_of_the_formula_is_a_supported_one() -> None:
    (version,) = set(re.findall(r"python@?(\d\.\d+)\"", FORMULA))
    assert f"cp{version.replace('.', '')}-manylinux_*" in PROJECT["tool"]["cibuildwheel"]["build"]


@pytest.mark.skipif(shutil.which("ruby") is None, reason="ruby is not installed")
def test_the_formula_is_ruby() -> None:
    checked = subprocess.run(
        ["ruby", "-wc", PACKAGING / "homebrew/moeinf.rb"], capture_output=True, text=True
    )
    assert (checked.stdout.strip(), checked.stderr) == ("Syntax OK", "")


def test_the_constraints_admit_what_torch_with_cuda_needs() -> None:
    """The metadata of torch's wheel on PyPI fixes these versions; without CUDA it has none."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    rules = [Requirement(line) for line in lines if not line.startswith("#")]
    found = {rule.name: rule.specifier for rule in rules}
    assert str(found["torch"]) == "==2.13.0"  # another one has other needs
    assert found["triton"].contains("3.7.1")
    assert found["nvidia-cuda-runtime"].contains("13.0.96")
    exact = {"==", "==="}
    ranges = {rule.name for rule in rules if {one.operator for one in rule.specifier} - exact}
    assert ranges == {"triton", "nvidia-cuda-runtime"}
