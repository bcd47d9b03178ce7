"""Test the check of the bill of materials: its fields, its packages, and their versions."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from scripts.sbom import ROOT, faults

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = (ROOT / "constraints.txt").read_text().splitlines()
INSTALLED = {"torch": "2.13.0+cpu", "typing_extensions": "4.0", "moeinf": "0.2.0"}


def component(name: str, version: str, plain: str = "") -> dict[str, str]:
    purl = f"pkg:pypi/{plain or name}@{version.replace('+', '%2B')}"
    about = {"bom-ref": f"{name}=={version}", "name": name, "version": version, "purl": purl}
    return {**about, "type": "library"}


def document(**changes: Any) -> dict[str, Any]:
    described = {"name": PROJECT["name"], "version": PROJECT["version"], "type": "application"}
    whole = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "metadata": {"component": described},
        "components": [
            component("torch", "2.13.0+cpu"),
            component("typing_extensions", "4.0", "typing-extensions"),
        ],
    }
    return whole | changes


def test_what_can_be_published() -> None:
    assert faults(document(), INSTALLED, ["# a comment", "torch==2.13.0", "absent==1"]) == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"bomFormat": "SPDX"}, "bomFormat is SPDX, not CycloneDX"),
        ({"specVersion": "1.4"}, "specVersion is 1.4, not 1.6"),
        ({"metadata": {}}, "described is (None, None), not ('moeinf', "),
        ({"components": [component("torch", "2.13.0+cpu")]}, "typing-extensions is None, not 4.0"),
        ({"components": []}, "torch is None, not 2.13.0+cpu"),
        ({"components": [{**component("a", "1"), "type": "file"}]}, "a is no library"),
        ({"components": [{**component("a", "1"), "bom-ref": ""}]}, "a is no library"),
        ({"components": [{**component("a", "1"), "purl": "a@1"}]}, "a 1 has the purl a@1"),
    ],
)
def test_what_is_wrong(changes: dict[str, Any], fault: str) -> None:
    found = faults(document(**changes), INSTALLED, PINS)
    assert any(one.startswith(fault) for one in found), found


def test_torch_is_named_though_it_is_not_installed() -> None:
    assert "torch is None, not a version" in faults(document(components=[]), {}, [])


def test_another_version_than_that_of_the_constraints() -> None:
    (pin,) = [line for line in PINS if line.startswith("msgspec==")]
    components = [*document()["components"], component("msgspec", "0.1")]
    found = faults(document(components=components), {**INSTALLED, "msgspec": "0.1"}, [pin])
    assert found == [f"msgspec is 0.1, not {pin.removeprefix('msgspec')}"]
