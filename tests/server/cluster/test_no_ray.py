"""Test that Ray is imported only where a cluster is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import moeinf.server.cluster

WITH_RAY = {"ingress", "launch", "request_router"}
_SHOW = """
import importlib, sys
for name in {names}:
    importlib.import_module(name)
print([name for name in sys.modules if name.partition(".")[0] == "ray"])
"""


def test_a_single_server_does_not_import_ray() -> None:
    room = Path(moeinf.server.cluster.__file__ or "").parent
    names = ["moeinf.cli.commands.serve", "moeinf.cli.commands.measuring.simulate"]
    names += ["moeinf.server.serve"]
    names += [
        f"moeinf.server.cluster.{p.stem}" for p in room.glob("*.py") if p.stem not in WITH_RAY
    ]
    run = subprocess.run(
        [sys.executable, "-c", _SHOW.format(names=names)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"
