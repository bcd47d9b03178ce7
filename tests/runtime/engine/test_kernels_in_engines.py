"""Whole engines on the device's own kernels, in Triton's interpreter: the CPU's bits.

All but the GPU is product code: dense layers, experts by list and by table, sums. Both sides run
the kernels between the products under tests/strict_device.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

pytest.importorskip("triton", reason="Triton is built for Linux only")

from moeinf.models.base import Linear
from moeinf.native import _native
from moeinf.offload.format.layout import ExpertLayout
from moeinf.offload.gpu_kernels import (
    decode_attention,
    elementwise,
    linear,
    prefill_attention,
    router,
)
from moeinf.offload.gpu_kernels.expert_ffn import DeviceMath
from moeinf.offload.gpu_kernels.router_spec import RouterKind
from moeinf.offload.gpu_tier.arithmetic import RoutedRunner
from moeinf.offload.store.compute import TorchFfn
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.dense import cpu_linear
from moeinf.runtime.dense import graphed_step as graphs
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.library.library import Library
from moeinf.runtime.machine import gpu as gpus
from scripts.make_checkpoint import byte_tokenizer
from tests.conftest import pull
from tests.native.fake_cuda import Fake
from tests.offload.device import DEVICE
from tests.strict_device import Strict, laid_there, lies_there
from tests.strict_fake import StrictFake
from tests.tiny import save_tiny

Made = TypeVar("Made", bound=Tensor | tuple[Tensor, ...])


class KernelFake(StrictFake):
    """A StrictFake with Triton's kernels instead of the CPU's.

    routed: number of layers whose experts were found by table.
    """

    routed = 0

    def tiled_linear(self, *given: Any) -> Linear:
        return self.made_there(linear.tiled_linear, *given)

    def plain_linear(self, *given: Any) -> Linear:
        return self.made_there(linear.plain_linear, *given)

    def tiled_embedding(self, *given: Any) -> cpu_linear.Rows:
        return self.made_there(linear.tiled_embedding, *given)

    def attend_newest(
        self, q: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float,
        window: int | None = None, sinks: Tensor | None = None, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert out is not None
        given = q, k, v, position, scale, window, sinks, out
        self.changed(lambda: decode_attention.attend_newest(*given), out)
        return out

    def attend_rows(self, q: Tensor, *given: Any) -> Tensor:
        return self.made(lambda: prefill_attention.attend_rows(q, *given), q, *given[:2])

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, wide: bool) -> Tensor:
        return self.made(lambda: elementwise.rms_norm(x, weight, eps, wide), x, weight)

    def gqa_heads(self, *given: Any) -> None:
        *_, planes, out, _norms, _wide, _clip = given
        self.changed(lambda: elementwise.gqa_heads(*given), *planes, out)

    def mla_heads(self, *given: Any) -> None:
        *_, memory, out, _norm = given
        self.changed(lambda: elementwise.mla_heads(*given), memory, out)

    def route(
        self, x: Tensor, weight: Tensor, kind: RouterKind, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        given = x, weight, kind, bias
        return self.made(lambda: router.route(*given), x, weight)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.made(lambda: elementwise.gated(gate, up), gate, up)

    def made(self, compute: Callable[[], Made], *given: Tensor) -> Made:
        """Return a kernel's results, marked as device tensors."""
        assert all(map(lies_there, given))
        with torch._C.DisableTorchFunction():
            found = self.writing.opaque(compute, *given)
        for x in [found] if isinstance(found, Tensor) else found:
            laid_there(x)
        return found

    def changed(self, compute: Callable[[], object], *places: Tensor) -> None:
        """Run a kernel that writes into device tensors."""
        assert all(map(lies_there, places))
        with torch._C.DisableTorchFunction():
            self.writing.changing(compute, *places)

    def math(
        self, layout: ExpertLayout, address: int, shape: tuple[int, int], reference: TorchFfn
    ) -> RoutedRunner:
        memory = (ctypes.c_char * (shape[0] * shape[1])).from_address(address)
        with torch._C.DisableTorchFunction():
            arena = torch.frombuffer(memory, dtype=torch.uint8).view(shape)
            return _Later(DeviceMath(layout, arena, reference), self)


class PlainFake(KernelFake):
    """Runs the CPU's products and experts with the device's kernels between them.

    Torch would give other bits than these kernels. Nothing is captured.
    """

    tiled_linear = StrictFake.tiled_linear
    plain_linear = StrictFake.plain_linear
    tiled_embedding = StrictFake.tiled_embedding
    math = StrictFake.math

    def graphs(self) -> None:
        return None


class _Later:
    """The kernels, run when the stream reaches them."""

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


@pytest.mark.interpreter
@pytest.mark.skipif(DEVICE.type != "cpu", reason="the fake's memory is not the GPU's")
@pytest.mark.parametrize(
    ("name", "form"), [("deepseek-lite", "q8"), ("gpt-oss", "q4"), ("olmoe-yarn", "bf16")]
)
def test_the_cpus_logits(
    name: str, form: str, fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    monkeypatch.setattr(decode_attention, "SPLITS", 4)  # each split is slow in the interpreter
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
    monkeypatch.setattr(gpus, "torch_device", lambda *_: devices[-1])

    def logits(device: StrictFake) -> list[NDArray[np.float32]]:
        devices.append(device)
        config = EngineConfig(device="cuda", miss="fetch", libcuda=fake.path, trace=False)
        with Strict(), Engine.open(manifest, folder, config, settings) as engine:
            state = engine.new_state()
            found = [engine.extend(state, [1, 2, 3, 4, 5])]
            while engine.store.device_resident < manifest.slots.experts or len(found) < 4:
                found.append(engine.extend(state, [len(found)]))
            found.append(engine.extend(state, [6, 7]))
        return found

    kernels = KernelFake(fake)
    ours, wanted = logits(kernels), logits(PlainFake(fake))
    assert kernels.routed >= manifest.layers
    for mine, its in zip(ours, wanted, strict=False):  # prefetched reads may end at any time
        np.testing.assert_array_equal(mine, its)
