"""Compile the native code for macOS on Arm and for Windows, with zig. Nothing is run.

The bindings are compiled for macOS with this interpreter's headers. For Windows they need the
headers of a Python for Windows, and are left out without them.

    pip install pybind11 ziglang
    python scripts/check_systems.py [--windows-headers FOLDER] [aarch64-macos] [x86_64-windows-gnu]

FOLDER has Python.h and pyconfig.h: `include` of an installation, or of CPython's sources `Include`
together with `PC/pyconfig.h`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

NATIVE = Path(__file__).resolve().parents[1] / "native"
TARGETS = ("aarch64-macos", "x86_64-windows-gnu")
FLAGS = ("-std=c++20", "-O0", "-g0", "-fno-sanitize=undefined", "-ffp-contract=off")
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Werror", "-Wno-psabi")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("targets", nargs="*", default=TARGETS)
    parser.add_argument("--windows-headers", type=Path)
    options = parser.parse_args()
    for package in ("pybind11", "ziglang"):
        if importlib.util.find_spec(package) is None:
            sys.exit(f"{package} is missing: pip install pybind11 ziglang")
    for target in options.targets:
        headers = Path(sysconfig.get_path("include"))
        if "windows" in target:
            headers = options.windows_headers
        sources = sources_for(headers)
        with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(os.cpu_count()) as pool:
            faults = list(pool.map(partial(compiled, target, headers, Path(name)), sources))
        for fault in filter(None, faults):
            print(fault)
        if any(faults):
            sys.exit(f"native/ does not compile for {target}")
        print(f"{len(sources)} files of native/ compile for {target}", flush=True)


def sources_for(headers: Path | None) -> list[Path]:
    """Return the files of native/ that can be compiled; without Python's headers no bindings."""
    found = sorted(NATIVE.rglob("*.cpp"))
    if headers is None:
        found = [path for path in found if path.parent.name != "bindings"]
    return found


def compiled(target: str, headers: Path | None, folder: Path, source: Path) -> str:
    """Return what the compiler says about a file; nothing when it compiles without a warning."""
    includes = [f"-I{NATIVE}"]
    if source.parent.name == "bindings" and (spec := importlib.util.find_spec("pybind11")):
        folders = [Path(folder, "include") for folder in spec.submodule_search_locations or ()]
        folders += [headers] if headers else []
        includes += [f"-isystem{folder}" for folder in folders]
    output = folder / f"{source.parent.name}-{source.stem}.o"
    command = [sys.executable, "-m", "ziglang", "c++", "-target", target, *FLAGS, *WARNINGS]
    command += [*includes, "-c", str(source), "-o", str(output)]
    ended = subprocess.run(command, capture_output=True, text=True)
    return "" if ended.returncode == 0 else ended.stdout + ended.stderr


if __name__ == "__main__":
    main()
