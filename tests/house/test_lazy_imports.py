"""Commands that compute nothing answer without importing torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = """
import sys
from moeinf.cli.main import answer
code = answer(sys.argv[1:])
heavy = [name for name in ("torch", "tokenizers", "transformers") if name in sys.modules]
assert not heavy, heavy
sys.exit(code)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["list"], ["run", "--help"]])
def test_without_torch(arguments: list[str], tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments],
        env={**os.environ, "MOEINF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout
