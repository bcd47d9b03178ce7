"""Take away what other systems lack: every module is still imported, and a home listed.

The child imports every module on Linux first, because its libraries are those of Linux. Then it
takes away what Windows or macOS lacks, and imports every module of moeinf again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHILD = """
import ctypes, importlib, json, os, pkgutil, sys
from types import SimpleNamespace

system, home, root = sys.argv[1:]
FLOORS = ("errors", "native", "api", "cli", "models", "offload", "runtime", "server")


def import_all():
    count = 0
    for floor in FLOORS:
        package = importlib.import_module("moeinf." + floor)
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not found.name.startswith(("moeinf.server.cluster", "moeinf.offload.gpu_kernels")):
                importlib.import_module(found.name)
                count += 1
    return count


import_all()
import rich.console  # it looks at the system once
sys.path.append(root)
from tests.other_systems.imitated import take_away
for name in list(sys.modules):
    if name.startswith("moeinf.") and name.split(".")[1] not in ("errors", "native"):
        del sys.modules[name]
take_away(system)


def installed(kib):
    kib._obj.value = 8 << 20
    return 1


kernel = SimpleNamespace(GetPhysicallyInstalledSystemMemory=installed)
ctypes.windll = SimpleNamespace(kernel32=kernel)
count = import_all()
from moeinf.cli.main import answer
os.environ["MOEINF_HOME"] = home
codes = {}
for line in ("--help", "list", "plan demo", "doctor", "run demo 17+25=", "stop demo"):
    codes[line.split()[0]] = answer(line.split())
sys.stdout.flush()
print(json.dumps({"modules": count, "codes": codes}), file=sys.__stderr__)
"""


def listed(system: str, home: Path) -> tuple[dict[str, int], str]:
    environment = {**os.environ, "MOEINF_NO_SERVER": "1", "PYTHONPATH": ""}
    command = [sys.executable, "-P", "-c", CHILD, system, str(home), str(ROOT)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert ended.returncode == 0, ended.stderr
    *said, last = ended.stderr.strip().splitlines()
    report = json.loads(last)
    assert report["modules"] > 300
    return report["codes"], ended.stdout + "\n".join(said)


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_every_module_is_imported_without(system: str, demo_home: Path) -> None:
    codes, said = listed(system, demo_home)
    assert [codes[name] for name in ("--help", "list", "plan", "doctor")] == [0] * 4, said
    if system == "win32":
        assert (codes["run"], codes["stop"]) == (1, 1)
        assert "lacks on win32" in said
    else:
        assert codes["run"] == 0
        assert "42" in said
