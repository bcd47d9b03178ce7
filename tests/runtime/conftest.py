"""Engines on a fake GPU in strict mode: see tests/strict_device.py."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, cycle

import pytest

from moeinf.runtime.dense import graphed_step
from moeinf.runtime.machine import gpu as gpus
from tests.native.fake_cuda import Fake
from tests.strict_device import Strict
from tests.strict_fake import StrictFake


@pytest.fixture
def devices() -> list[StrictFake]:
    """Collect the devices of the engines that were opened."""
    return []


@pytest.fixture
def strict(
    fake: Fake, devices: list[StrictFake], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Strict]:
    """Enter strict mode; CUDA graphs always take a third of the time without them."""
    fake.reset("mode=deferred,seed=3,memory=2000000000")

    def device(_: object) -> StrictFake:
        devices.append(StrictFake(fake))
        return devices[-1]

    ticks = accumulate(cycle([1.0, 0.003, 1.0, 0.001]))
    monkeypatch.setattr(graphed_step, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(gpus, "missing_for_kernels", lambda: None)
    monkeypatch.setattr(gpus, "torch_device", device)
    with Strict() as mode:
        yield mode
