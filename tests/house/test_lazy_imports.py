"""Commands without computation and an idle server do not import torch or numpy."""

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
SERVER = f"""
import socket, sys, threading
from urllib.request import urlopen
from moeinf.cli.main import app
from moeinf.runtime.config import EngineConfig, ServerSettings, Settings, read_environment
from moeinf.server.serve import make_server
server = make_server(read_environment(), ServerSettings(port=0), EngineConfig())
with socket.socket() as sock:
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    thread = threading.Thread(target=server.run, args=([sock],))
    thread.start()
    for path in ("/health", "/metrics", "/api/tags", "/api/ps", "/api/version", "/v1/models"):
        with urlopen(f"http://127.0.0.1:{{sock.getsockname()[1]}}{{path}}") as response:
            print(response.status)
    server.should_exit = True
    thread.join()
{CHECK}
"""


def run(code: str, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "MOEINF_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("line", ["--help", "--version", "list", "search", "run --help"])
def test_commands(line: str, tmp_path: Path) -> None:
    ran = run(COMMAND, tmp_path, *line.split())
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout


def test_server_that_nobody_has_asked_for_a_model(tmp_path: Path) -> None:
    ran = run(SERVER, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["200"] * 6


def test_names_of_policies() -> None:
    assert tuple(POLICIES) == POLICY_NAMES
    assert DEFAULT_POLICY in POLICIES
