"""Whole engines on the device's own kernels, in Triton's interpreter: the bits of the CPU's.

Everything but the GPU is the product's: dense layers, experts found by list and by table, sums.
Both sides have torch between the products, in the world of tests/strict_device.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeinf.models.base import Linear
from moeinf.native import _native
from moeinf.offload import device_attention, device_linears
from moeinf.offload.device_ffn import DeviceMath
from moeinf.offload.device_tier import RoutedRunner
from moeinf.offload.layout import ExpertLayout
from moeinf.offload.slot_math import TorchFfn
from moeinf.runtime import gpu as gpus
from moeinf.runtime import graphs, linears
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine import Engine
from moeinf.runtime.library import Library
from scripts.make_checkpoint import byte_tokenizer
from tests.conftest import pull
from tests.native.fake_cuda import Fake
from tests.offload.device import DEVICE
from tests.strict_device import Strict, laid_there
from tests.strict_fake import StrictFake
from tests.tiny import save_tiny


class KernelFake(StrictFake):
    """Triton's kernels where the other has the CPU's. routed: layers that were found by table."""

    routed = 0

    def tiled_linear(self, *given: Any) -> Linear:
        return self.made_there(device_linears.tiled_linear, *given)

    def plain_linear(self, *given: Any) -> Linear:
        return self.made_there(device_linears.plain_linear, *given)

    def tiled_embedding(self, *given: Any) -> linears.Rows:
        return self.made_there(device_linears.tiled_embedding, *given)

    def attend_newest(
        self, q: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float,
        window: int | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        given = q, k, v, position, scale, window, sinks
        with torch._C.DisableTorchFunction():
            found = self.writing.opaque(
                lambda: device_attention.attend_newest(*given), q, k, v, position
            )
        return laid_there(found)

    def math(
        self, layout: ExpertLayout, address: int, shape: tuple[int, int], reference: TorchFfn
    ) -> RoutedRunner:
        memory = (ctypes.c_char * (shape[0] * shape[1])).from_address(address)
        with torch._C.DisableTorchFunction():
            arena = torch.frombuffer(memory, dtype=torch.uint8).view(shape)
            return _Later(DeviceMath(layout, arena, reference), self)


class PlainFake(StrictFake):
    """The CPU's, but for attention, of which torch has other bits; nothing is written down."""

    attend_newest = KernelFake.attend_newest

    def graphs(self) -> None:
        return None


class _Later:
    """The kernels, when the stream comes to them."""

    def __init__(self, math: DeviceMath, device: KernelFake) -> None:
        self._math, self._device = math, device
        self.can_route = math.can_route

    def run(
        self, x: Tensor, experts: Sequence[tuple[int, list[int]]], top_k: int, rows: Tensor
    ) -> None:
        self._device.launch(lambda: self._math.run(x, experts, top_k, rows))

    def run_routed(
        self, x: Tensor, ids: Tensor, table: Tensor, first_cell: int, rows: Tensor
    ) -> None:
        self._device.routed += 1
        self._device.launch(lambda: self._math.run_routed(x, ids, table, first_cell, rows))

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        def work() -> Tensor:
            self._device.synchronise()
            return self._math.combine(rows, weights)

        with torch._C.DisableTorchFunction():
            found = self._device.writing.opaque(work, rows, weights)
        return laid_there(found)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the fake's memory is not the GPU's")
@pytest.mark.parametrize(
    ("name", "form"), [("deepseek-lite", "q8"), ("gpt-oss", "q4"), ("olmoe-yarn", "bf16")]
)
def test_the_cpus_logits(
    name: str, form: str, fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    monkeypatch.setattr(device_attention, "SPLITS", 4)  # the interpreter takes its time for each
    monkeypatch.setattr(graphs, "_ROUNDS", 1)
    assert _native._use_kernels("portable")
    request.addfinalizer(lambda: _native._use_kernels(""))
    fake.reset("mode=deferred,seed=9,memory=2000000000")
    save_tiny(name, tmp_path / "checkpoint", seed=3)
    byte_tokenizer().save(str(tmp_path / "checkpoint" / "tokenizer.json"))
    settings = Settings(tmp_path / "home")
    manifest = pull(tmp_path / "checkpoint", settings, f"tiny:{form}")
    folder = Library(settings).folder(manifest.model)
    devices: list[StrictFake] = []
    monkeypatch.setattr(gpus, "missing_for_kernels", lambda: None)
    monkeypatch.setattr(gpus, "torch_device", lambda: devices[-1])

    def logits(device: StrictFake) -> list[NDArray[np.float32]]:
        devices.append(device)
        config = EngineConfig(device="cuda", miss="fetch", libcuda=fake.path, trace=False)
        with Strict(), Engine(manifest, folder, config, settings) as engine:
            state = engine.new_state()
            found = [engine.extend(state, [1, 2, 3, 4, 5])]
            while engine.store.device_resident < manifest.slots.experts or len(found) < 4:
                found.append(engine.extend(state, [len(found)]))
            found.append(engine.extend(state, [6, 7]))
        return found

    kernels = KernelFake(fake)
    ours, wanted = logits(kernels), logits(PlainFake(fake))
    assert kernels.routed >= manifest.layers
    for mine, its in zip(ours, wanted, strict=False):  # reads end when they end
        np.testing.assert_array_equal(mine, its)
