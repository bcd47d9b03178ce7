"""Commands without computation do not import torch or numpy.

A server imports all before it listens: tests/server/test_first_requests.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moeinf.offload.policy.names import DEFAULT_POLICY, POLICY_NAMES
from moeinf.offload.policy.table import POLICIES

HEAVY = "torch numpy tokenizers transformers llguidance huggingface_hub pyarrow matplotlib".split()
CHECK = f"""
heavy = [name for name in {HEAVY} if name in sys.modules]
assert not heavy, heavy
"""
COMMAND = f"""
import sys
from moeinf.cli.main import answer
code = answer(sys.argv[1:])
{CHECK}
sys.exit(code)
"""


def run(code: str, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "MOEINF_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "line",
    [
        "--help",
        "--version",
        "list",
        "search",
        "run --help",
        "pull --help",
        "plan --help",
        "serve --help",
    ],
)
def test_commands(line: str, tmp_path: Path) -> None:
    ran = run(COMMAND, tmp_path, *line.split())
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout


def test_names_of_policies() -> None:
    assert tuple(POLICIES) == POLICY_NAMES
    assert DEFAULT_POLICY in POLICIES
