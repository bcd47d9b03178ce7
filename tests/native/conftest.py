"""Shards on disk, and C++ drivers built with ThreadSanitizer.

Does not know what any test expects.
"""

import random
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from moeinf.native import SHARD_DATA_OFFSET, CopyQueue, SlotPool, crc32c

ROOT = Path(__file__).resolve().parents[2]
BUILD_TIMEOUT_S = 120
RUN_TIMEOUT_S = 60  # a driver that deadlocks is killed, and fails


@dataclass(frozen=True)
class Shard:
    path: Path
    payload: bytes  # what stands from SHARD_DATA_OFFSET to the end of the file

    @property
    def crc32c(self) -> int:
        return crc32c(self.payload)

    def add_to(self, queue: CopyQueue, *, checked: bool = True) -> int:
        crc = self.crc32c if checked else None
        return queue.add_source(self.path, SHARD_DATA_OFFSET, len(self.payload), crc)

    def is_in(self, pool: SlotPool, slot: int) -> bool:
        return memoryview(pool).cast("B")[slot * pool.slot_bytes :][: len(self.payload)] == (
            self.payload
        )


@pytest.fixture
def make_shard(tmp_path: Path) -> Callable[..., Shard]:
    def make(name: str, payload_bytes: int = 5000) -> Shard:
        payload = random.Random(name).randbytes(payload_bytes)
        path = tmp_path / name
        path.write_bytes(b" " * SHARD_DATA_OFFSET + payload)
        return Shard(path, payload)

    return make


@pytest.fixture
def run_driver(tmp_path: Path) -> Callable[..., None]:
    """Builds tests/native/<name>.cpp with -fsanitize=thread and runs it; fails on any output."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to build the driver with")

    def run(name: str, *sources: str) -> None:
        program = tmp_path / name
        build = subprocess.run(
            [compiler, "-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]
            + ["-fsanitize=thread", f"-I{ROOT / 'native'}", f"-o{program}"]
            + [str(Path(__file__).with_name(f"{name}.cpp"))]
            + [str(ROOT / "native" / source) for source in sources],
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
        )
        if "libtsan" in build.stderr:
            pytest.skip("g++ has no ThreadSanitizer library")
        assert build.returncode == 0, build.stderr
        command = [str(program), str(tmp_path)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S)
        if "unexpected memory mapping" in ended.stderr:
            pytest.skip("this ThreadSanitizer cannot run with the kernel's address randomisation")
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")

    return run
