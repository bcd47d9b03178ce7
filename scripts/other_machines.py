"""Run the tests on two faked machines: a small one and a large one.

Run: python scripts/other_machines.py small|large [--keep FOLDER] [pytest arguments]
A new virtual environment gets the project with a native module whose processor flags can be
hidden. Then pytest runs with faked cores, caches, memory, disk and processor (tests/machines).
Both machines must pass every test: a failing test assumes a particular machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FAKES = ROOT / "tests" / "machines"
_SSE = ["sse2", "sse4_1", "sse4.2", "sse4_2"]

MACHINES: dict[str, dict[str, Any]] = {
    # An old laptop: one core, no named cache, 3 GiB free, SSE only, a drive of 0.5 ms a read.
    "small": {
        "cores": 1,
        "cache_kib": 0,
        "available_kib": 3 << 20,
        "physical_pages": 1 << 20,
        "free_bytes": 20 << 30,
        "flags": _SSE,
    },
    # A server: 8 cores (more would only wait for the real ones), 480 MiB of L3, 2 TiB of memory.
    "large": {
        "cores": 8,
        "cache_kib": 480 << 10,
        "available_kib": 2 << 30,
        "physical_pages": 1 << 29,
        "free_bytes": 100 << 40,
        "flags": None,
    },
}


def environment(name: str, folder: Path) -> dict[str, str]:
    """Return the environment variables of a faked machine's processes."""
    machine = MACHINES[name]
    made = {**os.environ, "MOEINF_FAKE_MACHINE": json.dumps(machine), "PYTHONPATH": str(FAKES)}
    if name == "small":
        made["MOEINF_FAKE_FLAGS"] = " ".join(machine["flags"])
        made["MOEINF_FAKE_READ_US"] = "500"
        made["LD_PRELOAD"] = str(folder / "slow_drive.so")
        made["ASAN_OPTIONS"] = "verify_asan_link_order=0"  # our library is loaded before ASan's
        made["ATEN_CPU_CAPABILITY"] = "default"
        made["ONEDNN_MAX_CPU_ISA"] = "SSE41"
    return made


def prepare(folder: Path) -> Path:
    """Install the project into a new environment in `folder`; return its Python."""
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    flags = f"-include {FAKES / 'fake_processor.h'}"
    install = [str(python), "-m", "pip", "install", "-q", "-c", "constraints.txt", ".[test]"]
    own = {**os.environ, "CXXFLAGS": flags, "SKBUILD_BUILD_DIR": str(folder / "build")}
    subprocess.run(install, cwd=ROOT, env=own, check=True)
    shim = ["gcc", "-shared", "-fPIC", "-O2", str(FAKES / "slow_drive.c"), "-ldl"]
    subprocess.run([*shim, "-o", str(folder / "slow_drive.so")], check=True)
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("machine", choices=sorted(MACHINES))
    parser.add_argument("--keep", type=Path, help="a folder that keeps the environment")
    options, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="moeinf-machine-") as made:
        folder = (options.keep or Path(made)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        python = prepare(folder)
        command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", *more]
        return subprocess.run(
            command, cwd=ROOT, env=environment(options.machine, folder), check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
