"""Resolve the README's pip line and that of docs/gpu.md for CUDA. Nothing is installed.

The first must find torch for the CPU and nothing of CUDA; the second must find both. It needs
an index for each. Where an index offers no metadata beside its wheels, pip downloads them.

    python scripts/check_torch.py [cpu] [cuda]
    PIP_USE_FEATURE=fast-deps python scripts/check_torch.py    # reads the metadata within wheels
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_ASKS_THE_DRIVER = "nvidia-ml-py"  # Python alone, a few KB


def cpu_line() -> list[str]:
    """Return the words of the README's first command: the installation for the CPU."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return shlex.split(re.findall(r"```sh\n(.*)\n", text)[0].partition(" && ")[0])


def cuda_line() -> list[str]:
    """Return the words of the first command of docs/gpu.md: the installation for a GPU."""
    text = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    return shlex.split(re.findall(r"`(pip install [^`]*)`", text)[0])


def resolved(words: list[str]) -> dict[str, str]:
    """Return the packages that pip would install, with their versions.

    Raises subprocess.CalledProcessError where pip finds no solution or no index.
    """
    with tempfile.TemporaryDirectory() as name:
        report = Path(name, "report.json")
        pip = [sys.executable, "-m", *words, "-q", "--dry-run", "--ignore-installed"]
        subprocess.run([*pip, "--report", str(report)], cwd=ROOT, check=True)
        return packages(json.loads(report.read_text(encoding="utf-8")))


def packages(report: dict[str, Any]) -> dict[str, str]:
    """Return name and version of each package in a report of pip."""
    found = (one["metadata"] for one in report["install"])
    return {one["name"].lower().replace("_", "-"): one["version"] for one in found}


def cuda_of(found: dict[str, str]) -> list[str]:
    """Return the packages of CUDA: NVIDIA's libraries, and Triton, which only they need."""
    names = (name for name in found if name.startswith(("nvidia-", "triton", "cuda-")))
    return sorted(name for name in names if name != _ASKS_THE_DRIVER)


def fault(found: dict[str, str], cuda: bool) -> str:
    """Return what is wrong with the packages of a line; nothing if they fit."""
    if "torch" not in found:
        return "no torch"
    parts = cuda_of(found)
    if cuda and (not parts or "+cpu" in found["torch"]):
        return f"torch {found['torch']} without CUDA"
    if not cuda and parts:
        return f"torch {found['torch']} with {', '.join(parts)}"
    return ""


LINES = {"cpu": cpu_line, "cuda": cuda_line}


def main(names: Sequence[str]) -> None:
    faults = []
    for name in names:
        found = resolved(LINES[name]())
        said = f"torch {found.get('torch')}, {len(found)} packages, {len(cuda_of(found))} of CUDA"
        print(f"{name}: {said}", flush=True)
        if wrong := fault(found, name == "cuda"):
            faults.append(f"{name}: {wrong}")
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    if set(sys.argv[1:]) - set(LINES):
        sys.exit("usage: python scripts/check_torch.py [cpu] [cuda]")
    main(sys.argv[1:] or list(LINES))
