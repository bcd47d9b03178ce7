"""Shards on disk, and the C++ drivers."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from moeinf.native import SHARD_DATA_OFFSET, CopyQueue, SlotPool, crc32c
from tests.native.drivers import PROGRAMS, Drivers


@dataclass(frozen=True)
class Shard:
    path: Path
    payload: bytes  # the bytes from SHARD_DATA_OFFSET to the end of the file

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


@pytest.fixture(scope="session")
def drivers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Drivers]:
    """Return the C++ drivers, cached by pytest between runs.

    If a long test of test_drivers.py is selected, all are built in the background.
    """
    cache = getattr(request.config, "cache", None)
    folder = cache.mkdir("native-drivers") if cache else tmp_path_factory.mktemp("drivers")
    drivers = Drivers(folder)
    items = [item for item in request.session.items if item.path.name == "test_drivers.py"]
    if any(item.get_closest_marker("full") for item in items):
        drivers.start(PROGRAMS)
    yield drivers
    drivers.close()
