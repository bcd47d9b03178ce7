"""Many processes pull, run, copy, trace and remove one model at once, and some are killed."""

from __future__ import annotations

import random
import re
import tempfile
import time
from pathlib import Path
from typing import IO

from moeinf.runtime.config import Settings
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.library.manifest import read_manifest
from moeinf.runtime.library.processes import Registry
from moeinf.runtime.library.verify import verify
from moeinf.runtime.names import ModelName
from tests.cli.conftest import command_in, environment
from tests.cli.warm import Warm
from tests.faults.conftest import EVERY, Tally

# Allowed messages of a process that lost a race; any other failure is wrong.
_FAIR = re.compile(
    r"no model|is in use|another process is pulling|already exists|unfinished pull|"
    r"is not what was pulled|cannot be read|[Nn]o such file|is using|in use by process|"
    r"--repair` restores them"  # verify, while rm deletes
)
ACTS: tuple[tuple[str, ...], ...] = (
    ("pull", str(DEMO_CHECKPOINT), "--name", "shared:bf16", "--quiet"),
    ("run", "shared:bf16", "17+25=", "--memory", "20%"),
    ("rm", "shared:bf16"),
    ("cp", "shared:bf16", "copied"),
    ("rm", "copied:bf16"),
    ("trace", "shared:bf16", "--dataset", "demo", "--limit", "2"),
    ("verify", "shared:bf16"),
    ("list",),
)


def _text(file: IO[bytes]) -> str:
    with file:
        file.seek(0)
        return file.read().decode()


def test_one_model_many_processes(every_point: bool, tmp_path: Path, tally: Tally) -> None:
    rng = random.Random(0)
    first = command_in(tmp_path)(*ACTS[0])
    assert first.code == 0, first.err
    rounds, at_once = (25 if EVERY else 8, 6) if every_point else (2, 3)
    for _ in range(rounds):
        running = []
        for _ in range(at_once):
            act = rng.choice(ACTS)
            printed = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
            process = Warm(act, environment(tmp_path), None, None, *printed)
            running.append((act, process, printed, rng.random() < 0.25))
            time.sleep(rng.random() * 0.3)
        for act, process, printed, doomed in running:
            if doomed:
                time.sleep(rng.random())
                process.kill()
            process.wait(timeout=120)
            out, error = map(_text, printed)
            assert "Traceback" not in error
            if process.returncode == 0:
                assert act[0] != "run" or out.strip() == "42", (act, out)
                tally(f"{act[0]} done")
            elif process.returncode == -9:
                tally(f"{act[0]} killed")
            else:
                assert _FAIR.search(error), (act, process.returncode, error)
                tally(f"{act[0]} refused in words")
        settings = Settings(tmp_path)
        assert Registry(settings.run).engines() == []
        for name in (ModelName("shared", "bf16"), ModelName("copied", "bf16")):
            folder = Library(settings).folder(name)
            if Library(settings).has(name):
                assert verify(folder, read_manifest(folder), lambda *_: None) == []
    last = command_in(tmp_path)(*ACTS[0])
    assert last.code == 0, last.err
    assert command_in(tmp_path)("run", "shared:bf16", "17+25=").out == "42\n"
    assert command_in(tmp_path)("prune").code == 0
    left = [p for p in (tmp_path / "models").rglob("*") if p.name.endswith((".partial", ".old"))]
    assert left == []
