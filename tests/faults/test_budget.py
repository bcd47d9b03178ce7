"""Run a whole conversation in a cgroup whose limit is exactly the promised memory.

The kernel kills a process above the limit, so the conversation ends only within the budget.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from moeinf.runtime.config import Settings
from scripts.make_checkpoint import config, make_checkpoint
from tests.conftest import pull
from tests.faults.conftest import Tally

pytestmark = pytest.mark.linux("makes a memory cgroup")
GROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)
TALK = '''
import re
import sys
from pathlib import Path
import torch
from moeinf.runtime.generation.chat import Conversation
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.requests import Limits
from moeinf.runtime.library.library import Library
from moeinf.runtime.machine.memory import keep_code_caches_small, peak_rss_bytes, rss_bytes
from moeinf.runtime.sampling.sampler import SamplingOptions
from moeinf.runtime.sizes import parse_memory
def code_bytes():
    """Resident pages of libraries: huge ones come 2 MiB at a time, when their code first runs."""
    total, library = 0, False
    for line in open("/proc/self/smaps"):
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            library = ".so" in line
        elif library and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total
home, memory, limit, turns = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
settings = Settings(home)
manifest, folder = Library(settings).read("many:bf16")
keep_code_caches_small()
for rows in (1, 40):  # the code of torch's libraries is no memory of ours
    torch.nn.functional.linear(*torch.ones(2, rows, 64, dtype=torch.bfloat16))
imported, code = rss_bytes(), code_bytes()
config = EngineConfig(memory=parse_memory(memory), context=512)
with Engine.open(manifest, folder, config, settings) as engine:
    place = engine.info.placement
    allowed = imported + place.memory_bytes + place.dense_bytes + place.kv_bytes + (64 << 20)
    limit.write_text(str(allowed))
    talk = Conversation(engine)
    for turn in range(turns):
        text = "".join(chr(32 + (7 * i + turn) % 90) for i in range(60 + 30 * turn % 200))
        list(talk.complete(text, SamplingOptions(temperature=0), Limits(12)))
    room = allowed + code_bytes() - code - peak_rss_bytes()
    print(room, engine.store.stats.bytes_read > place.memory_bytes)
'''


@pytest.fixture
def group() -> Iterator[tuple[Path, str]]:
    """Yield a new memory cgroup and the name of its limit."""
    for root, limit in GROUPS:
        folder = root / f"moeinf-{os.getpid()}"
        with suppress(OSError):
            folder.mkdir()
            if (folder / limit).exists():
                yield folder, limit
                folder.rmdir()
                return
            folder.rmdir()
    pytest.skip("no memory cgroup may be made here")


@pytest.mark.parametrize("memory", ["30%", pytest.param("12MiB", marks=pytest.mark.full)])
def test_a_conversation_under_a_cgroup_limit(
    memory: str, every_point: bool, group: tuple[Path, str], tmp_path: Path, tally: Tally
) -> None:
    make_checkpoint(tmp_path / "checkpoint", config(4, 16, 256, 256, 4))
    pull(tmp_path / "checkpoint", Settings(tmp_path / "home"), "many:bf16")
    folder, limit = group

    def enter() -> None:
        (folder / "cgroup.procs").write_text(str(os.getpid()))

    turns = 30 if every_point else 5
    run = subprocess.run(
        [sys.executable, "-c", TALK, tmp_path / "home", memory, folder / limit, str(turns)],
        capture_output=True, text=True, check=False, preexec_fn=enter,
    )  # fmt: skip
    assert run.returncode == 0, f"{run.returncode}: {run.stderr}"
    room, evicted = run.stdout.split()
    assert int(room) >= 0
    assert evicted == "True"  # more was loaded than fits
    for _ in range(turns):
        tally("a turn within the limit")
