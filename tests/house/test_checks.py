"""House rules that tools can check: format, lint, types, imports between layers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = ("cli", "server", "api", "runtime", "offload", "models", "native", "errors")


LINT_IMPORTS = (
    "import sys; from importlinter.cli import lint_imports_command as run; sys.exit(run())"
)


def check(*command: str, cwd: Path = ROOT) -> None:
    environment = {**os.environ, "NO_COLOR": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, f"{' '.join(command)}\n{run.stdout}{run.stderr}"


def test_format() -> None:
    check("-m", "ruff", "format", "--check", "--no-cache", ".")


def test_lint() -> None:
    check("-m", "ruff", "check", "--no-cache", ".")


@pytest.mark.timeout(900)  # 25 s of processor time; a busy machine takes longer
def test_types() -> None:
    """Check the clone: mypy finds `src/moeinf` there, however the package is installed."""
    check("-m", "mypy", "--cache-dir", os.devnull)


def test_import_floors(tmp_path: Path) -> None:
    check(
        "-c",
        LINT_IMPORTS,
        "--config",
        str(ROOT / "pyproject.toml"),
        "--no-cache",
        cwd=tmp_path,
    )


def test_small_files() -> None:
    """A file above 400 lines must be split, or give its reason at the top."""
    sources = [
        p for folder in (*FLOORS, "scripts", "tools", "tests") for p in (ROOT / folder).rglob("*")
    ]
    long = [
        str(path.relative_to(ROOT))
        for path in sources
        if path.suffix in (".py", ".cpp", ".h") and len(path.read_text().splitlines()) > 400
    ]
    assert long == []


def test_print_only_in_output() -> None:
    """Only cli/output.py prints for users; limited processes answer on their standard output."""
    allowed = {ROOT / "cli" / "output.py", ROOT / "runtime" / "limited_process.py"}
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in FLOORS
        for path in (ROOT / folder).rglob("*.py")
        if path not in allowed
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.lstrip().startswith(("print(", "sys.stdout.write("))
    ]
    assert wrong == []


def test_one_importer_of_the_copy_queue() -> None:
    """Only offload/store/transfer.py moves experts."""
    importers = [
        str(path.relative_to(ROOT))
        for folder in FLOORS
        if folder != "native"
        for path in (ROOT / folder).rglob("*.py")
        if "CopyQueue" in path.read_text()
    ]
    assert importers == ["offload/store/transfer.py"]


def test_one_way_to_an_engine() -> None:
    """Only Engine.open makes engines, and no other module sets their parts."""
    made = re.compile(r"\bEngine\(|\bengine\.(?!info = replace)\w+ = |delattr\(")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in (*FLOORS, "benchmarks", "scripts", "tools", "tests")
        for path in (ROOT / folder).rglob("*.py")
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if made.search(line)
    ]
    assert wrong == []
