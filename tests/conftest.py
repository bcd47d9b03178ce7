"""Shared fixtures: the demo model, pulled once, and engines that run it."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

# Torch's threads sleep between their turns, as in the command. They would spin on the cores of
# the other workers. GCC's OpenMP reads this while torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from hypothesis import settings

from moeinf.runtime.checkpoints.checkpoint import open_checkpoint
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.files import atomic
from moeinf.runtime.jobs import bench
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.library.repacking.repack import repack
from moeinf.runtime.library.sources import LocalSource
from moeinf.runtime.machine import gpu as gpus
from moeinf.runtime.names import ModelName, parse_name
from moeinf.runtime.placement import bandwidth
from moeinf.runtime.sizes import parse_memory
from moeinf.runtime.system import Unsupported
from tests.native.fake_cuda import Fake, built_fake
from tests.selection import chosen, dist_of, families_of, selection_of_kernel
from tests.shared_processes import shared_processes

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell's background job: children inherit the ignored signal
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The same examples in every run, without a time limit.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
os.environ["MOEINF_NO_SERVER"] = "1"  # no test leaves a server; those of this feature unset it
# Triton reads it when a kernel is defined, whichever test defines it
GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    config.option.dist = dist_of(config.getoption("dist", "no"), GPU)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `full` the cases that tests marked `matrix` or `first` do not run by default.

    `-k` finds a case of a family by the family's name, whatever its tiny configuration is called.
    """
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if sys.platform != "linux" and (mark := item.get_closest_marker("linux")):
            item.add_marker(pytest.mark.skip(f"needs Linux: {mark.args[0]}"))
        if kernel := item.get_closest_marker("kernel"):
            left_out = selection_of_kernel(*kernel.args, GPU)
            item.add_marker(left_out or "gpu")
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        item.extra_keyword_matches.update(families_of(item.callspec.params.values()))
        if not item.get_closest_marker("full"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        by_default = list(range(len(cases)))
        if cases[0].get_closest_marker("matrix"):
            by_default = chosen([case.callspec.params for case in cases])
        elif cases[0].get_closest_marker("first"):
            by_default = [0]
        for position in set(range(len(cases))).difference(by_default):
            cases[position].add_marker("full")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    with _refusals_skip():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    with _refusals_skip():
        return (yield)


@contextmanager
def _refusals_skip() -> Iterator[None]:
    """Skip a test on another system that ends in moeinf's refusal to work there."""
    try:
        yield
    except Unsupported as refused:
        if sys.platform == "linux":
            raise
        pytest.skip(f"needs Linux: {refused}")


def pytest_collection_finish() -> None:
    """Exempt imported modules from garbage collection, which would take 0.3 s each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _short_measurements() -> Iterator[None]:
    """Measure RAM with few bytes: no test needs an exact speed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bandwidth, "_RAM_BYTES", 16 << 20)
        patch.setattr(bench, "_CEILING_BYTES", 16 << 20)
        yield


@pytest.fixture(scope="session", autouse=True)
def _quick_syncs() -> Iterator[None]:
    """Check a descriptor where the product waits for the disk: no test needs its data there.

    tests/faults/test_crash_points.py checks what is synced, and processes of commands wait.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        patch.setattr(atomic, "syncfs", os.fstat)
        yield


@pytest.fixture(scope="session", autouse=True)
def _few_processes() -> Iterator[None]:
    with shared_processes():
        yield


@pytest.fixture(scope="module", autouse=True)
def memory() -> Iterator[None]:
    """Free memory after each file: cyclic garbage and the allocator's cache."""
    yield
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def ignore(*_: object) -> None:
    """Ignore a progress bar or a note."""


def pull(folder: Path, settings: Settings, name: str) -> Manifest:
    """Repack a checkpoint folder under `name`."""
    source = LocalSource(open_checkpoint(folder), str(folder))
    return repack(source, Library(settings), parse_name(name), ignore, ignore)


@pytest.fixture(scope="session")
def demo_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a MOEINF_HOME with the demo as bf16 and f32. Tests must not change its models."""
    home = tmp_path_factory.mktemp("home")
    for tag in ("bf16", "f32"):
        pull(DEMO_CHECKPOINT, Settings(home), str(ModelName("demo", tag)))
    return home


@pytest.fixture(scope="session")
def fake(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fake:
    """Return the fake libcuda, built once and cached by pytest; tests reset it."""
    cache = getattr(request.config, "cache", None)
    folder = cache.mkdir("native-drivers") if cache else tmp_path_factory.mktemp("drivers")
    return Fake(built_fake(folder))


@pytest.fixture
def new_to_gpus() -> Iterator[None]:
    """Reset the state of a process that has not used a GPU, before the test and after it."""
    forget_gpus()
    yield
    forget_gpus()


def forget_gpus() -> None:
    gpus._driver.cache_clear()
    gpus._opened.cache_clear()
    gc.collect()  # contexts that tracebacks and reference cycles hold


def endless(engine: Engine) -> None:
    """Make answers continue past the end-of-sequence tokens."""
    engine.info = replace(engine.info, ends=frozenset())


Open = Callable[..., Engine]


@pytest.fixture
def open_engine(demo_home: Path) -> Iterator[Open]:
    """Return a function that opens an engine and closes it after the test.

    Example: open_engine("demo:f32", memory="30%", context=64).
    """
    engines: list[Engine] = []

    def open_one(model: str = "demo", memory: str = "100%", **options: Any) -> Engine:
        settings = Settings(demo_home)
        manifest, folder = Library(settings).read(model)
        config = EngineConfig(memory=parse_memory(memory), **options)
        engines.append(Engine.open(manifest, folder, config, settings))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close()
