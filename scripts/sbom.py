"""Write the software bill of materials of an installation, as CycloneDX JSON, and check it.

It needs the network: cyclonedx-bom is installed beside the environment that it describes. Each
installed package must be named with its version, which constraints.txt must admit.

    python scripts/sbom.py sbom.json            # of this interpreter's environment
    python scripts/sbom.py sbom.json PYTHON     # of another's
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
_TOOL = "cyclonedx-bom>=7.0"
_VERSION = "1.6"  # of CycloneDX
_FORMAT = ("--spec-version", _VERSION, "--output-format", "JSON", "--output-reproducible")
_INSTALLED = """
import importlib.metadata as metadata, json
print(json.dumps({one.metadata["Name"]: one.version for one in metadata.distributions()}))
"""


def main(out: Path, interpreter: str = sys.executable) -> None:
    with tempfile.TemporaryDirectory() as name:
        python = Path(name) / "bin/python"
        subprocess.run([sys.executable, "-m", "venv", name], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", _TOOL], check=True)
        described = [
            "--pyproject",
            f"{ROOT}/pyproject.toml",
            "--output-file",
            str(out),
            interpreter,
        ]
        command = [str(python), "-m", "cyclonedx_py", "environment", *_FORMAT, *described]
        subprocess.run(command, check=True)
    document = json.loads(out.read_text(encoding="utf-8"))
    asked = [interpreter, "-c", _INSTALLED]
    said = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if wrong := faults(document, json.loads(said), pins):
        sys.exit("\n".join(wrong))
    print(f"{out}: {len(document['components'])} packages")


def faults(
    document: Mapping[str, Any], installed: Mapping[str, str], pins: Sequence[str]
) -> list[str]:
    """Return what a document lacks, or says wrongly; nothing if it can be published.

    installed  version of each package in the environment
    pins       lines of constraints.txt
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    about = document.get("metadata", {}).get("component", {})
    wanted = {
        "bomFormat": (document.get("bomFormat"), "CycloneDX"),
        "specVersion": (document.get("specVersion"), _VERSION),
        "described": (
            (about.get("name"), about.get("version")), (project["name"], project["version"])
        ),
    }  # fmt: skip
    found = [f"{name} is {is_}, not {want}" for name, (is_, want) in wanted.items() if is_ != want]
    packages = {}
    for one in document.get("components", []):
        name, version = one.get("name", ""), one.get("version", "")
        packages[_plain(name)] = version
        if one.get("type") != "library" or not one.get("bom-ref"):
            found.append(f"{name} is no library with a reference")
        if not one.get("purl", "").startswith(f"pkg:pypi/{_plain(name)}@{version.split('+')[0]}"):
            found.append(f"{name} {version} has the purl {one.get('purl')}")
    there = {_plain(name): version for name, version in installed.items()}
    there.pop(project["name"], None)  # it is what is described
    for name, version in sorted({"torch": "a version", **there}.items()):
        if packages.get(name) != version:
            found.append(f"{name} is {packages.get(name)}, not {version}")
    for rule in (Requirement(line) for line in pins if line and not line.startswith("#")):
        version = packages.get(_plain(rule.name))
        if version and not rule.specifier.contains(version, prereleases=True):
            found.append(f"{rule.name} is {version}, not {rule.specifier}")
    return found


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit("usage: python scripts/sbom.py FILE [PYTHON]")
    main(Path(sys.argv[1]), *sys.argv[2:])
