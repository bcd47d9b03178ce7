"""Build the sdist, install it with each named interpreter, and ask the demo a question.

It runs no tests. It needs the network. Where pip has no CPU build of torch for an interpreter, it
needs several GB of disk per interpreter (one after the other).

A wheel is checked for its size and contents instead. If it is for this interpreter, it is installed
where no command, and so no compiler, can be found.

--unpinned installs the newest libraries instead of those of constraints.txt.

pip's variables are read: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu spares CUDA.

--all checks every part of a release with the scripts and tests that exist for it, in this
environment. It names each tool that a part needs and this machine lacks. The whole takes about an
hour on two cores, and needs root for the container. Words behind -- are options of buildah build.

    python scripts/check_package.py python3.11 python3.12 python3.13
    python scripts/check_package.py dist/moeinf-*.whl
    python scripts/check_package.py --all
    python scripts/check_package.py --all docs sdist recipes
    python scripts/check_package.py --all container -- -v /etc/pip.conf:/etc/pip.conf
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINS = ("-c", str(ROOT / "constraints.txt"))
MOST_WHEEL_BYTES = 20 << 20  # with the demo
_NEEDED = ("moeinf/models/demo/model.safetensors", "moeinf/cli/entry.py")
_SOURCES = (".cpp", ".h", ".clang-format")
_ELF_MACHINES = {"x86_64": 62, "aarch64": 183}  # e_machine, two bytes at 18


@dataclass(frozen=True)
class Part:
    """A part of a release: the commands that check it, and the tools that they need.

    commands  each with words; `python` is this interpreter, {out} an empty folder, {options} the
              options of buildah build
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
    "torch": Part(("python scripts/check_torch.py",)),
    "doctor": Part(
        (
            "python -m pytest tests/cli/commands/test_doctor.py "
            "tests/runtime/machine/test_diagnosis.py",
        )
    ),
    "systems": Part(
        (
            "python scripts/check_systems.py",
            "python -m pytest -m 'full or not full' tests/other_systems "
            "tests/native/test_platform.py",
        ),
        modules=("pybind11", "ziglang"),
    ),
    "container": Part(
        ("python scripts/check_container.py -- {options}",),
        programs=("buildah", "debootstrap", "ip"),
    ),
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
        (
            "python scripts/check_aarch64.py",
            "python -m pytest -m 'full or not full' tests/native/test_aarch64.py",
        ),
        modules=("pybind11",),
        programs=("aarch64-linux-gnu-g++", "qemu-aarch64"),
    ),
}


def main(arguments: list[str]) -> None:
    if arguments[0] == "--all":
        at = arguments.index("--") if "--" in arguments else len(arguments)
        check_all(arguments[1:at] or list(PARTS), arguments[at + 1 :])
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


def check_all(names: Sequence[str], options: Sequence[str] = ()) -> None:
    """Check the named parts and print a line for each; exit with 1 if one fails or lacks a tool.

    options  of buildah build
    """
    if unknown := set(names) - set(PARTS):
        sys.exit(f"{', '.join(sorted(unknown))}: the parts are {', '.join(PARTS)}")
    states = {}
    for name in names:
        lacks = lacking(PARTS[name])
        print(f"== {name}", flush=True)
        states[name] = (
            f"not checked: {', '.join(lacks)}" if lacks else checked(PARTS[name], options)
        )
    print()
    for name, state in states.items():
        print(f"{name:10} {state}")
    if set(states.values()) != {"ok"}:
        sys.exit(1)


def lacking(part: Part) -> list[str]:
    """Return the tools that a part needs and that cannot be found."""
    modules = [name for name in part.modules if importlib.util.find_spec(name) is None]
    return modules + [name for name in part.programs if shutil.which(name) is None]


def checked(part: Part, options: Sequence[str] = ()) -> str:
    """Return "ok", or the first command of a part that failed. Its output goes to the terminal."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as out:
        for command in part.commands:
            line = command.format(out=out, options=shlex.join(options))
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
    faults += [fault for name in modules for fault in _misplaced(wheel, name)]
    if size > MOST_WHEEL_BYTES:
        faults.append(f"{size} bytes are more than {MOST_WHEEL_BYTES}")
    return faults


def _misplaced(wheel: Path, module: str) -> Iterator[str]:
    """Yield what does not fit the tag of a Linux wheel: a module's Python, its machine."""
    python, _, system = wheel.stem.split("-")[-3:]
    for machine, number in _ELF_MACHINES.items():
        if "linux" not in system or not system.endswith(machine):
            continue
        suffix = f".cpython-{python.removeprefix('cp')}-{machine}-linux-gnu.so"
        if not module.endswith(suffix):
            yield f"{module} does not end in {suffix}"
        with zipfile.ZipFile(wheel).open(module) as file:
            if int.from_bytes(file.read(20)[18:], "little") != number:
                yield f"{module} is not compiled for {machine}"


def tried(
    interpreter: str,
    package: Path,
    path: str = "/usr/bin:/bin",
    options: Sequence[str] = PINS,
    libraries: Path | None = None,
) -> str:
    """Return what the demo answers in an environment with only this package.

    Raises ValueError for a wrong answer, and subprocess.CalledProcessError where pip fails.

    path       the PATH of the installation and of the question
    libraries  a folder with everything that the package needs, which pip then does not fetch
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(
            [interpreter, "-m", "venv", "--without-pip", str(folder / "venv")], check=True
        )
        python = folder / "venv/bin/python"
        environment = {name: text for name, text in os.environ.items() if name.startswith("PIP_")}
        environment |= {
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
        if answer != "42":
            raise ValueError(f"{version.strip()} answers {answer!r}: {ended.stderr.strip()}")
        return f"{version.strip()} answers {answer}"


if __name__ == "__main__":
    main(sys.argv[1:] or [sys.executable])
