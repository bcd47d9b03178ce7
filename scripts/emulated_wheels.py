"""Install wheels for 64-bit Arm in an emulated Debian without a compiler, and ask the demo.

mmdebstrap unpacks a Debian with the wheel's Python. pip fetches the libraries here, for that
machine; the emulated Debian installs the wheel and runs it. Needs root, Linux and 6 GB of disk for
each Python, and a qemu-aarch64 that is registered in binfmt_misc with the flag F:

    apt install mmdebstrap qemu-user-static
    python -m scripts.emulated_wheels FOLDER dist/*aarch64.whl

FOLDER is kept for the next time. qemu 7.2 crashes while it imports torch; 11.1 does not.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from scripts.debian_wheels import INSIDE, MIRROR, run_inside

ROOT = Path(__file__).resolve().parents[1]
SUITES = {"3.11": "bookworm", "3.13": "forky", "3.14": "forky"}  # those with the interpreter
GLIBCS = range(36, 16, -1)  # minor versions of the platform tags; bookworm has 36
PACKAGES = ("bash", "coreutils", "dash", "libc-bin", "libgomp1", "libstdc++6", "python3-pip")
_ASK = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from scripts.check_package import faults_of, tried
wheel, libraries = Path(sys.argv[2]), Path(sys.argv[3])
if faults := faults_of(wheel):
    sys.exit(f"{wheel.name}: {'; '.join(faults)}")
pip = ["--no-index", "--no-deps", "--no-compile"]
print(f"{wheel.name}: {tried(sys.executable, wheel, '', pip, libraries)}", flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("wheels", nargs="+", type=Path)
    options = parser.parse_args()
    folder = options.folder.absolute()
    for wheel in options.wheels:
        version = version_of(wheel)
        libraries = folder / "libraries" / version
        if not libraries.is_dir():
            subprocess.run(fetch_libraries(version, libraries), cwd=ROOT, check=True)
        root = folder / SUITES[version]
        make_root(root, SUITES[version])
        run_inside(root, [ROOT, libraries.parent, wheel], ask(version, wheel, libraries))


def version_of(wheel: Path) -> str:
    """Return the Python of a wheel's name, as "3.13"; raise ValueError for another wheel."""
    found = re.search(r"-cp3(\d+)-cp3\1-\w*_aarch64\.whl$", wheel.name)
    if found is None or f"3.{found[1]}" not in SUITES:
        raise ValueError(f"{wheel.name} is not for aarch64 and one of {', '.join(SUITES)}")
    return f"3.{found[1]}"


def fetch_libraries(version: str, target: Path) -> list[str]:
    """Return the command that puts everything a wheel needs into a folder, for aarch64."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--only-binary=:all:"]
    tags = [f"manylinux_2_{minor}_aarch64" for minor in GLIBCS] + ["manylinux2014_aarch64"]
    pip += [word for tag in tags for word in ("--platform", tag)]
    pip += ["--implementation", "cp", "--python-version", version, "--target", str(target)]
    return [*pip, "-c", "constraints.txt", *project["dependencies"]]


def make_root(root: Path, suite: str) -> None:
    """Unpack a Debian for aarch64 with its Pythons, if the folder has no system yet."""
    if (root / "usr/bin").is_dir():
        return
    pythons = [version for version, name in SUITES.items() if name == suite]
    packages = [*PACKAGES, *(f"python{version}-venv" for version in pythons)]
    unpack = ["mmdebstrap", "--variant=extract", "--architectures=arm64"]
    old = ["--aptopt=Acquire::Check-Valid-Until false"]  # a mirror may be weeks old
    include = f"--include={','.join(packages)}"
    subprocess.run([*unpack, *old, include, suite, str(root), MIRROR], check=True)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")  # pip asks for the home


def ask(version: str, wheel: Path, libraries: Path) -> str:
    """Return the shell command that installs a wheel in the root and asks the demo."""
    words = f"{INSIDE} {wheel.absolute()} {libraries}"
    return f"python{version} - {words} <<'END'{_ASK}END"


if __name__ == "__main__":
    main()
