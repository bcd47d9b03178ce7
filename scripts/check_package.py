"""Build the sdist, install it with each named interpreter, and ask the demo a question.

It runs no tests. It needs the network. Where pip has no CPU build of torch for an interpreter, it
needs several GB of disk per interpreter (one after the other).

A wheel is checked for its size and contents instead. If it is for this interpreter, it is installed
where no command, and so no compiler, can be found.

    python scripts/check_package.py python3.11 python3.12 python3.13
    python scripts/check_package.py dist/moeinf-*.whl
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINS = ("-c", str(ROOT / "constraints.txt"))
MOST_WHEEL_BYTES = 20 << 20  # with the demo
_NEEDED = ("moeinf/models/demo/model.safetensors", "moeinf/cli/entry.py")
_SOURCES = (".cpp", ".h", ".clang-format")


def main(arguments: list[str]) -> None:
    wheels = [Path(argument) for argument in arguments if argument.endswith(".whl")]
    for wheel in wheels:
        faults = faults_of(wheel)
        if faults:
            sys.exit(f"{wheel.name}: {'; '.join(faults)}")
        print(f"{wheel.name}: {wheel.stat().st_size >> 10} KiB")
        if f"-cp{sys.version_info.major}{sys.version_info.minor}-" in wheel.name:
            print(f"{wheel.name}: {tried(sys.executable, wheel, path='')}")
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
            print(f"{interpreter}: {tried(interpreter, sdist)}")


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
