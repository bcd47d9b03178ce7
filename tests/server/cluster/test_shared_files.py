"""Test that replicas on one host share the page cache: the second reads nothing from the drive."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from moeinf.runtime.machine.page_cache import cached_share

pytestmark = [pytest.mark.full, pytest.mark.linux("reads /proc")]

# Prints the bytes that a replica's engine reads from the drive. It lives until its input ends.
ENGINE = """
import sys
from pathlib import Path
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.library.library import Library
from moeinf.runtime.sizes import parse_memory

def read_bytes():
    fields = Path("/proc/self/io").read_text().split()
    return int(fields[fields.index("read_bytes:") + 1])

settings = Settings(Path(sys.argv[1]))
manifest, folder = Library(settings).read("demo:bf16")
config = EngineConfig(memory=parse_memory("100%"), prefix=None, trace=False, direct_io=False)
before = read_bytes()
engine = Engine.open(manifest, folder, config, settings)
engine.extend(engine.new_state(), list(range(16, 216)))
print(read_bytes() - before, engine.store.stats.bytes_read, flush=True)
sys.stdin.readline()
engine.close()
"""


def test_the_second_replica_finds_what_the_first_has_read(demo_home: Path, tmp_path: Path) -> None:
    shutil.copytree(demo_home / "models", tmp_path / "models")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    for path in files:
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_share(files) == 1.0:
        pytest.skip("the temporary folder is in memory: it has no page cache")
    with ExitStack() as opened:
        (first, experts), (second, again) = (_read(opened, tmp_path) for _ in range(2))
    assert min(experts, again) > 1 << 20  # each one has read experts into its own slots
    assert first > 1 << 20
    assert second < first / 100


def _read(opened: ExitStack, home: Path) -> tuple[int, int]:
    """Start a replica; return the bytes that it read from the drive, and of experts by any way."""
    process = opened.enter_context(
        subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(home)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    )
    assert process.stdin is not None
    assert process.stdout is not None
    opened.callback(process.stdin.close)
    drive, experts = process.stdout.readline().split()
    return int(drive), int(experts)
