"""Device operations between the products: which parts use them, and how much they launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton", reason="Triton is built for Linux only")

from moeinf.models.base import Family, Linear, Model
from moeinf.models.families import family_of
from moeinf.models.layers.attention import GqaCore
from moeinf.models.layers.decoder import Decoder
from moeinf.models.layers.ffn import GatedMlp
from moeinf.models.layers.moe import Done
from moeinf.models.layers.norms import HeadNorm, RmsNorm, WideRmsNorm
from moeinf.models.layers.routing import SoftmaxRouter
from moeinf.offload.gpu_kernels import decode_attention, elementwise, prefill_attention, router
from moeinf.offload.store.compute import MOST_ROWS
from moeinf.runtime.checkpoints.checkpoint import read_json
from moeinf.runtime.dense.gpu_attention import DeviceGqa, DeviceMla
from moeinf.runtime.dense.gpu_backend import DevicePieces
from tests.fake_device import FakeDevice
from tests.fakes import DictParts
from tests.native.fake_cuda import Fake
from tests.runtime.dense.test_cpu_fused import CASES, Draw, Made, gqa, play
from tests.tiny import save_tiny


def with_head_norms(kind: type[RmsNorm] | type[WideRmsNorm]) -> Made:
    """Make a norm of queries that differs from the norm of keys."""
    core, layout, widths = gqa(clip=1.1)
    norms = [HeadNorm(kind(Draw(seed)(32, about=1.0), eps)) for seed, eps in ((5, 1e-5), (6, 0.3))]
    return GqaCore(core.layer, core.shape, *norms, sinks=Draw(7)(6)), layout, widths


CORES: dict[str, Callable[[], Made]] = {
    **CASES,
    "norms of heads": lambda: with_head_norms(RmsNorm),
    "wide norms of heads": lambda: with_head_norms(WideRmsNorm),
}
_NOTHING = ("aten.empty", "aten.new_empty")  # allocation only


class Launches(TorchDispatchMode):
    """Counts kernel launches: torch's computing operations and a device's own kernels."""

    KERNELS: ClassVar = {"attend_newest": 2, "route": 2}  # and 1 for each other kernel

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if func._can_decompose():  # a name for several operations
            with self:
                return func.decompose(*args, **named)
        given = {_storage(x) for x in tree_leaves((args, named)) if isinstance(x, Tensor)}
        found = func(*args, **named)
        made = {_storage(x) for x in tree_leaves(found) if isinstance(x, Tensor)}
        if (func._schema.is_mutable or not made <= given) and not str(func).startswith(_NOTHING):
            self.found[str(func)] += 1
        return found


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


class CountedDevice(FakeDevice):
    """Counts its own kernels as kernels, although the fake runs other code."""

    def __init__(self, fake: Fake, launches: Launches) -> None:
        super().__init__(fake)
        self.launches = launches

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        own = ("attend_newest", "rms_norm", "gqa_heads", "mla_heads", "gated", "route")
        return self.kernel(name, found) if name in own else found

    def kernel(self, name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            self.launches.found[name] += self.launches.KERNELS.get(name, 1)
            with _disable_current_modes():
                return compute(*given)

        return run

    def plain_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        linear = FakeDevice.plain_linear(weight, bias)
        return self.kernel("linear", linear)


class KernelDevice(FakeDevice):
    """Runs Triton's kernels in the interpreter between torch's products."""

    attend_newest = staticmethod(decode_attention.attend_newest)
    attend_rows = staticmethod(prefill_attention.attend_rows)
    rms_norm = staticmethod(elementwise.rms_norm)
    gqa_heads = staticmethod(elementwise.gqa_heads)
    mla_heads = staticmethod(elementwise.mla_heads)
    gated = staticmethod(elementwise.gated)
    route = staticmethod(router.route)


class TunedParts(DictParts):
    """Parts with the operations that a device substitutes for torch."""

    def __init__(self, tensors: dict[str, Tensor], device: FakeDevice) -> None:
        super().__init__(tensors)
        self._device, self.tuned = device, DevicePieces(device).tuned  # type: ignore[method-assign]

    def linear(
        self, prefix: str, out_features: int, in_features: int, bias: bool = False
    ) -> Linear:
        weight = self.tensor(f"{prefix}.weight", out_features, in_features)
        offset = self.tensor(f"{prefix}.bias", out_features) if bias else None
        return self._device.plain_linear(weight, offset)


class Echo:
    """`Experts` that return their input times a factor that depends on the routing."""

    wants_hints = False

    def begin_pass(self, *given: object) -> None:
        """Do nothing."""

    def end_pass(self, *given: object) -> None:
        """Do nothing."""

    def hint(self, *given: object) -> None:
        """Do nothing."""

    def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Done:
        with _disable_current_modes():
            places = torch.arange(ids.shape[1])
            choice = (weights * (1 + torch.sin(3.0 * ids + places))).sum(-1, keepdim=True)
            return Done((x * choice).to(x.dtype))


def dense_of(name: str, folder: Path, dtype: torch.dtype) -> tuple[Family, Any, dict[str, Tensor]]:
    """Return a tiny model's family, config and tensors."""
    save_tiny(name, folder)
    values = read_json(folder / "config.json")
    family = family_of(values)
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= {family.rename(key): x.to(dtype) for key, x in load_file(path).items()}
    return family, family.parse(values), tensors


def launched(model: Model, launches: Launches) -> list[Counter[str]]:
    """Return the launches of every block for a token after four."""
    assert isinstance(model, Decoder)
    state, found = model.new_state(16), list[Counter[str]]()
    model.extend([([1, 2, 3, 4], state)], Echo())

    def counted(block: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*given: Any) -> Tensor:
            launches.found.clear()
            with launches:
                out = block(*given)
            found.append(launches.found.copy())
            return out

        return run

    blocks = tuple(counted(block) for block in model.body.blocks)
    object.__setattr__(model.body, "blocks", blocks)
    model.extend([([5], state)], Echo())
    return found


LAYERS = {  # launches of one layer beside the products, attention and its experts
    "olmoe": {"rms_norm": 4, "gqa_heads": 1, "route": 2, "aten.add.Tensor": 2},
    "qwen3": {"rms_norm": 2, "gqa_heads": 1, "route": 2, "aten.add.Tensor": 2},
    "deepseek-groups": {
        "rms_norm": 3, "mla_heads": 1, "aten.bmm.out": 2, "gated": 1, "route": 2,
        "aten.add.Tensor": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_launches_a_few_kernels(name: str, tmp_path: Path, fake: Fake) -> None:
    family, config, tensors = dense_of(name, tmp_path, torch.bfloat16)
    launches = Launches()
    model = family.build(config, TunedParts(tensors, CountedDevice(fake, launches)))
    *_, found = launched(model, launches)
    assert found.pop("attend_newest") == 2
    del found["linear"]
    assert found == LAYERS[name]


@pytest.mark.first
@pytest.mark.parametrize(
    "name",
    [
        *("olmoe-renormalised", "glm4-head-norms", "deepseek-groups", "gpt-oss", "phimoe"),
        *("qwen3.5", "mimo", "kimi-linear", "granite-hybrid", "nemotron"),
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("gemma4", "v32-one-key", "glm5-next", "deepseek-v4", "qwen4")
        ),
    ],
)
def test_a_family_decodes_with_kernels_as_with_torch(
    name: str, tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests together, in float32: every kind of norm, RoPE, router and core."""
    monkeypatch.setattr(decode_attention, "SPLITS", 2)  # each split is slow in the interpreter
    family, config, tensors = dense_of(name, tmp_path, torch.float32)
    both = DictParts(tensors), TunedParts(tensors, KernelDevice(fake))
    found = []
    for parts in both:
        model = family.build(config, parts)
        states = [model.new_state(16) for _ in range(2)]
        prompts = [1, 2, 3, 4, 5], [6, 7]
        logits = [model.extend(list(zip(prompts, states, strict=True)), Echo())]
        for tokens in ([8], [9]), ([10], [11]):
            logits.append(model.extend(list(zip(tokens, states, strict=True)), Echo()))
        found.append(torch.stack(logits))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.first
@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "deepseek-groups"])
def test_a_family_prefills_with_kernels_as_with_torch(
    name: str, tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests in chunks, the second beside a token of the first."""
    monkeypatch.setattr(decode_attention, "SPLITS", 2)  # each split is slow in the interpreter
    family, config, tensors = dense_of(name, tmp_path, torch.float32)
    kernels, found, past = KernelDevice(fake), [], list[int]()

    def noted(q: Tensor, k: Tensor, v: Tensor, before: int, *given: Any) -> Tensor:
        past.append(before)
        return prefill_attention.attend_rows(q, k, v, before, *given)

    kernels.attend_rows = noted  # type: ignore[method-assign]
    for parts in DictParts(tensors), TunedParts(tensors, kernels):
        model = family.build(config, parts)
        one, other = model.new_state(64), model.new_state(64)
        logits = [model.extend([(list(range(1, 40)), one)], Echo())]
        logits.append(model.extend([([7, 8], one), ([3, 4, 5], other)], Echo()))
        logits.append(model.extend([([9], one), (list(range(20, 31)), other)], Echo()))
        found.append(torch.cat(logits))
    assert {0, 39, 3} <= set(past)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CORES)
def test_cores_like_torch(name: str, fake: Fake) -> None:
    """Prompts and tokens of three requests; the fake computes with torch, row by row."""
    made = CORES[name]()
    core = DevicePieces(FakeDevice(fake)).tuned(made[0])
    if "values" in name:  # of another width than keys: only attention is the device's
        assert isinstance(core, GqaCore)
        assert core is not made[0]
    else:
        assert isinstance(core, DeviceGqa | DeviceMla)
    for ours, plain in zip(play(core, made), play(made[0], made), strict=True):
        torch.testing.assert_close(ours, plain, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("kind", [RmsNorm, WideRmsNorm])
def test_a_wide_norm_of_heads_stays_wide(
    kind: type[RmsNorm] | type[WideRmsNorm], fake: Fake
) -> None:
    """After attention has summed them, the results of the two kinds hardly differ."""
    seen: list[bool] = []

    class Noted(FakeDevice):
        def gqa_heads(self, *given: Any) -> None:
            *_, wide, _clip = given
            seen.append(wide)
            super().gqa_heads(*given)

    made = with_head_norms(kind)
    play(DevicePieces(Noted(fake)).tuned(made[0]), made)
    assert set(seen) == {kind is WideRmsNorm}


def test_many_rows_and_mixed_types_are_torchs(fake: Fake) -> None:
    class Noted(FakeDevice):
        rows: ClassVar[list[int]] = []

        def rms_norm(self, x: Tensor, weight: Tensor, eps: float, wide: bool) -> Tensor:
            self.rows.append(x.numel() // len(weight))
            return super().rms_norm(x, weight, eps, wide)

        def route(self, x: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
            self.rows.append(len(x))
            return super().route(x, *given)

        def gated(self, gate: Tensor, up: Tensor) -> Tensor:
            self.rows.append(len(gate))
            return super().gated(gate, up)

    device, weight = Noted(fake), torch.ones(4, 8)
    tuned = DevicePieces(device).tuned
    norm = tuned(RmsNorm(weight[0], 1e-6))
    pieces: list[Any] = [
        norm, tuned(WideRmsNorm(weight[0], 1e-6)), tuned(SoftmaxRouter(weight, 2, False)),
        tuned(GatedMlp(lambda x: x, lambda x: x, lambda x: x)),
    ]  # fmt: skip
    for piece in pieces:
        for rows in (1, MOST_ROWS, MOST_ROWS + 1, 70):
            piece(torch.ones(rows, 8))
    assert device.rows == [1, MOST_ROWS] * 4
    device.rows.clear()
    assert norm(torch.ones(1, 8, dtype=torch.bfloat16)).dtype == torch.float32
    assert device.rows == []
