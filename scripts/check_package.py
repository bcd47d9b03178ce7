"""Build the sdist, install it with each named interpreter, and ask the demo a question.

It runs no tests. It needs the network. Where pip has no CPU build of torch for an interpreter, it
needs several GB of disk per interpreter (one after the other).

    python scripts/check_package.py python3.11 python3.12 python3.13
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(interpreters: list[str]) -> None:
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


def tried(interpreter: str, sdist: Path) -> str:
    """Return the demo's answer in an environment with only this sdist, or the error."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([interpreter, "-m", "venv", str(folder / "venv")], check=True)
        python = folder / "venv/bin/python"
        pins = ["-c", str(ROOT / "constraints.txt")]
        subprocess.run([python, "-m", "pip", "install", "-q", *pins, sdist], check=True)
        version = subprocess.run([python, "--version"], capture_output=True, text=True).stdout
        ended = subprocess.run(
            [folder / "venv/bin/moeinf", "run", "demo", "17+25="],
            cwd=folder,
            env={
                "MOEINF_HOME": str(folder / "home"),
                "MOEINF_NO_SERVER": "1",
                "PATH": "/usr/bin:/bin",
            },
            capture_output=True,
            text=True,
        )
        answer = ended.stdout.strip()
        return f"{version.strip()} answers {answer}" if answer == "42" else ended.stderr.strip()


if __name__ == "__main__":
    main(sys.argv[1:] or [sys.executable])
