"""Build the sdist, install it with each named interpreter, and ask the demo a question.

It runs no tests. It needs the network. Where pip has no CPU build of torch for an interpreter, it
needs several GB of disk per interpreter (one after the other).

A wheel is checked for its size and contents instead. If it is for this interpreter, it is installed
where no command, and so no compiler, can be found.

--unpinned installs the newest libraries instead of those of constraints.txt, whose versions of
CUDA's packages suit torch's CPU build only.

--all checks every part of a release with the scripts and tests that exist for it, in this
environment. It names each tool that a part needs and this machine lacks. The whole takes about an
hour on two cores, and needs root for the container.

    python scripts/check_package.py python3.11 python3.12 python3.13
    python scripts/check_package.py dist/moeinf-*.whl
    python scripts/check_package.py --all
    python scripts/check_package.py --all docs sdist recipes
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINS = ("-c", str(ROOT / "constraints.txt"))
MOST_WHEEL_BYTES = 20 << 20  # with the demo
_NEEDED = ("moeinf/models/demo/model.safetensors", "moeinf/cli/entry.py")
_SOURCES = (".cpp", ".h", ".clang-format")


@dataclass(frozen=True)
class Part:
    """A part of a release: the commands that check it, and the tools that they need.

    commands  each with words; `python` is this interpreter, {out} an empty folder
    modules   Python modules beyond those of '.[test]'
    programs  commands of the system
    """

    commands: tuple[str, ...]
    modules: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()


PARTS = {
    "wheels": Part(
        (
            "python scripts/build_wheels.py --out {out}",
            "python scripts/check_package.py {out}/*.whl",
        ),
        modules=("auditwheel", "ziglang"),
        programs=("patchelf",),
    ),
    "sdist": Part(
        (
            "python scripts/check_package.py python3",
            "python -m pytest tests/scripts/test_package.py",
        )
    ),
    "doctor": Part(("python -m pytest tests/cli/commands/test_doctor.py",)),
    "systems": Part(("python scripts/check_systems.py",), modules=("pybind11", "ziglang")),
    "container": Part(("python scripts/check_container.py",), programs=("buildah", "debootstrap")),
    "recipes": Part(
        ("python -m pytest tests/packaging", "python -m scripts.check_recipes"),
        programs=("bsdtar", "makepkg", "pacman", "ruby"),
    ),
    "docs": Part(
        (
            "python -m mkdocs build --strict -q --site-dir {out}",
            "python -m pytest tests/house tests/cli/test_readme.py tests/api/test_model.py",
        ),
        modules=("mkdocs", "material", "mkdocstrings"),
    ),
    "sbom": Part(("python scripts/sbom.py {out}/sbom.json",)),
    "upgrade": Part(("python -m pytest tests/cli/commands/models/test_upgrade.py",)),
    "aarch64": Part(
        ("python scripts/check_aarch64.py",),
        modules=("pybind11",),
        programs=("aarch64-linux-gnu-g++", "qemu-aarch64"),
    ),
}


def main(arguments: list[str]) -> None:
    if arguments[0] == "--all":
        check_all(arguments[1:] or list(PARTS))
        return
    pins: Sequence[str] = () if "--unpinned" in arguments else PINS
    arguments = [argument for argument in arguments if argument != "--unpinned"]
    wheels = [Path(argument) for argument in arguments if argument.endswith(".whl")]
    for wheel in wheels:
        faults = faults_of(wheel)
        if faults:
            sys.exit(f"{wheel.name}: {'; '.join(faults)}")
        print(f"{wheel.name}: {wheel.stat().st_size >> 10} KiB")
        here = f"-cp{sys.version_info.major}{sys.version_info.minor}-"
        if here in wheel.name and wheel.stem.endswith(platform.machine()):
            print(f"{wheel.name}: {tried(sys.executable, wheel, '', pins)}")
    interpreters = [argument for argument in arguments if not argument.endswith(".whl")]
    if not interpreters:
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build = folder / "build"
        subprocess.run([sys.executable, "-m", "venv", str(build)], check=True)
        subprocess.run([build / "bin/pip", "install", "-q", "build"], check=True)
        command = [str(build / "bin/python"), "-m", "build", "--sdist", "--outdir", name, str(ROOT)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (sdist,) = folder.glob("*.tar.gz")
        print(f"{sdist.name}: {sdist.stat().st_size >> 10} KiB")
        for interpreter in interpreters:
            print(f"{interpreter}: {tried(interpreter, sdist, options=pins)}")


def check_all(names: Sequence[str]) -> None:
    """Check the named parts and print a line for each; exit with 1 if one fails or lacks a tool."""
    if unknown := set(names) - set(PARTS):
        sys.exit(f"{', '.join(sorted(unknown))}: the parts are {', '.join(PARTS)}")
    states = {}
    for name in names:
        lacks = lacking(PARTS[name])
        print(f"== {name}", flush=True)
        states[name] = f"not checked: {', '.join(lacks)}" if lacks else checked(PARTS[name])
    print()
    for name, state in states.items():
        print(f"{name:10} {state}")
    if set(states.values()) != {"ok"}:
        sys.exit(1)


def lacking(part: Part) -> list[str]:
    """Return the tools that a part needs and that cannot be found."""
    modules = [name for name in part.modules if importlib.util.find_spec(name) is None]
    return modules + [name for name in part.programs if shutil.which(name) is None]


def checked(part: Part) -> str:
    """Return "ok", or the first command of a part that failed. Its output goes to the terminal."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as out:
        for command in part.commands:
            line = command.format(out=out)
            shell = ["sh", "-c", line]
            if subprocess.run(shell, cwd=ROOT, env={**os.environ, "PATH": path}).returncode:
                return f"failed: {line}"
    return "ok"


def faults_of(wheel: Path) -> list[str]:
    """Return what is wrong with the size and the files of a wheel, in words."""
    names = zipfile.ZipFile(wheel).namelist()
    size = wheel.stat().st_size
    faults = [f"{name} is missing" for name in _NEEDED if name not in names]
    faults += [f"{name} is a source" for name in names if name.endswith(_SOURCES)]
    modules = [name for name in names if name.endswith(".so")]
    if len(modules) != 1:
        faults.append(f"{len(modules)} compiled modules")
    if size > MOST_WHEEL_BYTES:
        faults.append(f"{size} bytes are more than {MOST_WHEEL_BYTES}")
    return faults


def tried(
    interpreter: str,
    package: Path,
    path: str = "/usr/bin:/bin",
    options: Sequence[str] = PINS,
    libraries: Path | None = None,
) -> str:
    """Return the demo's answer in an environment with only this package, or the error.

    path       the PATH of the installation and of the question
    libraries  a folder with everything that the package needs, which pip then does not fetch
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(
            [interpreter, "-m", "venv", "--without-pip", str(folder / "venv")], check=True
        )
        python = folder / "venv/bin/python"
        environment = {
            "MOEINF_HOME": str(folder / "home"),
            "MOEINF_NO_SERVER": "1",
            "PATH": path,
        }
        if libraries is not None:
            (site,) = (folder / "venv/lib").glob("python*/site-packages")
            (site / "libraries.pth").write_text(f"{libraries}\n")
            options = [*options, "--ignore-installed"]  # this package may be among them
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
        subprocess.run([*pip, *options, package], check=True, env=environment)
        version = subprocess.run([python, "--version"], capture_output=True, text=True).stdout
        ended = subprocess.run(
            [folder / "venv/bin/moeinf", "run", "demo", "17+25="],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        answer = ended.stdout.strip()
        return f"{version.strip()} answers {answer}" if answer == "42" else ended.stderr.strip()


if __name__ == "__main__":
    main(sys.argv[1:] or [sys.executable])
