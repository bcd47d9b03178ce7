"""Device memory of a prefill chunk beside weights, cache and slots, against the plan.

All tensors are on torch's meta device: they have sizes but no bytes, and no kernel runs. The shapes
are those of real models. A few layers are enough to give the maximum.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton", reason="Triton is built for Linux only")

from benchmarks.shapes import shape
from moeinf.models.base import Embedding, KvForm, Linear
from moeinf.models.families import family_of
from moeinf.models.layers.decoder import Decoder
from moeinf.models.layers.kv_cache import KvCache, Span
from moeinf.models.layers.moe import TorchMath
from moeinf.native import matrix_bytes
from moeinf.offload.format.layout import ExpertLayout
from moeinf.offload.gpu_kernels import (
    decode_attention,
    elementwise,
    expert_ffn,
    prefill_attention,
    router,
)
from moeinf.offload.gpu_kernels import linear as device_linears
from moeinf.offload.gpu_kernels.device import CudaDevice
from moeinf.runtime.config import PREFILL_CHUNK
from moeinf.runtime.dense.gpu_backend import DevicePieces
from moeinf.runtime.placement.gpu_plan import _GRAPHS_BYTES, _TORCH_BYTES, dense_workspace_bytes

META = torch.device("meta")
LAUNCHING = (
    decode_attention, expert_ffn, device_linears, prefill_attention, router, elementwise,
)  # fmt: skip
# hidden, heads and experts of a family's largest model, where the races use a smaller one
LARGER = {
    "deepseek-v3": ("deepseek-v2-lite", {
        "hidden_size": 7168, "num_attention_heads": 128, "q_lora_rank": 1536,
        "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
    }),
    "qwen3-235b-a22b": ("qwen3-30b-a3b", {
        "hidden_size": 4096, "num_attention_heads": 64, "moe_intermediate_size": 1536,
    }),
    "mixtral-8x22b": ("mixtral-8x7b", {
        "hidden_size": 6144, "num_attention_heads": 48, "intermediate_size": 16384,
    }),
}  # fmt: skip


class Live(TorchDispatchMode):
    """Measures memory; most: peak bytes of the tensors made within, as torch's allocator rounds."""

    def __init__(self) -> None:
        super().__init__()
        # by storage: number of tensors that hold it, and its bytes
        self._held: dict[int, list[int]] = {}
        self._now = self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, Tensor) and x.device == META:
                self._hold(x, known=_storage(x) in given)
        return found

    def _hold(self, x: Tensor, known: bool) -> None:
        storage = _storage(x)
        if storage in self._held:
            self._held[storage][0] += 1
        elif known:
            return  # a weight, the cache, or a view of one
        else:
            size = -(-x.untyped_storage().nbytes() // 512) * 512
            self._held[storage] = [1, size]
            self._now += size
            self.most = max(self.most, self._now)
        weakref.finalize(x, self._let_go, storage)

    def _let_go(self, storage: int) -> None:
        self._held[storage][0] -= 1
        if not self._held[storage][0]:
            self._now -= self._held.pop(storage)[1]


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


class MetaDevice(CudaDevice):
    """Launches no kernel; allocates the kernel's results."""

    place = META

    def __init__(self) -> None:
        """Skip CUDA's initialisation."""

    def graphs(self) -> Any:
        return None


class MetaParts:
    """`Parts` with the sizes that a loader gives."""

    def __init__(self, form: str, device: MetaDevice) -> None:
        self._form, self._device = form, device
        self.kv: KvForm = "full"
        self.tuned = DevicePieces(device).tuned

    def tensor(self, name: str, *sides: int) -> Tensor:
        dtype = torch.float32 if self._form == "f32" else torch.bfloat16
        return torch.empty(sides, dtype=dtype, device=META)

    def _tiles(self, form: str, rows: int, columns: int) -> Tensor:
        return torch.empty(matrix_bytes(form, rows, columns), dtype=torch.uint8, device=META)

    def linear(self, prefix: str, out: int, into: int, bias: bool = False) -> Linear:
        offset = self.tensor(prefix, out) if bias else None
        if self._form == "q4":
            return self._device.tiled_linear(self._tiles("q4", out, into), "q4", out, into, offset)
        return self._device.plain_linear(self.tensor(prefix, out, into), offset)

    def embedding(self, prefix: str, count: int, width: int) -> Embedding:
        if self._form == "q4":
            tiles = self._tiles("q8", count, width)
            rows = self._device.tiled_embedding(tiles, "q8", count, width)
            return Embedding(rows, torch.bfloat16, META)
        return Embedding.of(self.tensor(prefix, count, width))


class OnDevice:
    """`Experts` that are all in device slots; a layer allocates like TierRunner."""

    wants_hints = False

    def __init__(self, layout: ExpertLayout, experts: int) -> None:
        arena = torch.empty(8, layout.slot_bytes, dtype=torch.uint8, device=META)
        self._math = expert_ffn.DeviceMath(layout, arena, TorchMath())
        self._table = torch.empty(experts, dtype=torch.int32, device=META)

    def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Any:
        rows = x.new_zeros(ids.numel(), x.shape[1])
        if self._math.can_route(len(x)):
            self._math.run_routed(x, ids, self._table, 0, rows)
        else:  # bf16: one expert after another, each with its maximum number of rows
            self._math.run(x, [(0, list(range(0, ids.numel(), ids.shape[1])))], ids.shape[1], rows)
        shape = (*ids.shape, -1)
        return SimpleNamespace(result=lambda: self._math.combine(rows.view(shape), weights))


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the kernels by functions that do nothing."""

    class Silent:
        def __getitem__(self, grid: object) -> Any:
            return lambda *given, **named: None

    for module in LAUNCHING:
        for name, found in list(vars(module).items()):
            if type(found).__name__ in ("InterpretedFunction", "JITFunction"):
                monkeypatch.setattr(module, name, Silent())


@pytest.mark.parametrize("context", [512, 16384])
@pytest.mark.parametrize("form", ["q4", "bf16"])
@pytest.mark.parametrize(
    "name", ["olmoe", "deepseek-v2-lite", "qwen3-30b-a3b", "mixtral-8x7b", *LARGER]
)
def test_a_chunk_takes_no_more_than_is_counted(
    name: str, form: str, context: int, silent: None
) -> None:
    raced, sizes = LARGER.get(name, (name, {}))
    config = {**shape(raced, 4), **sizes}
    family = family_of(config)
    model = family.build(family.parse(config), MetaParts(form, MetaDevice()))
    assert isinstance(model, Decoder)
    moe, context = model.moe, min(context, model.max_context)
    layout = ExpertLayout(moe.hidden, moe.intermediate, form.upper(), moe.activation, moe.biased)
    state = model.new_state(context)
    assert isinstance(state, KvCache)
    past = state._length = context - PREFILL_CHUNK
    experts: Any = OnDevice(layout, moe.experts)
    live = Live()
    with torch.inference_mode(), live:
        ids = torch.empty(PREFILL_CHUNK, dtype=torch.int64, device=META)
        span = Span(state, slice(0, PREFILL_CHUNK), past)
        x = model.body.states(ids, ids, (span,), experts)
        model._logits(x[-1:])
    manifest: Any = SimpleNamespace(
        top_k=moe.top_k, hidden=moe.hidden, intermediate=moe.intermediate, dtype=form.upper(),
        encoder_layers=0, hidden_width=moe.width or moe.hidden,
    )  # fmt: skip
    counted = dense_workspace_bytes(manifest, context) - _TORCH_BYTES - _GRAPHS_BYTES
    assert counted / 8 < live.most <= counted, (live.most >> 20, counted >> 20)
