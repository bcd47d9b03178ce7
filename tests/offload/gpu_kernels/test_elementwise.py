"""Compare norms, rope, the cache's rows and SwiGLU on the device with torch's roundings.

Without a GPU, Triton's interpreter runs the kernels (tests/conftest.py). The order of sums of
squares differs: a result is seldom a neighbour of torch's, and else equal.
"""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton", reason="Triton is built for Linux only")

from moeinf.models.layers.attention import GqaCore, GqaShape
from moeinf.models.layers.kv_cache import PassRows
from moeinf.models.layers.mla import MlaCore, MlaShape
from moeinf.models.layers.norms import HeadNorm, RmsNorm, WideRmsNorm
from moeinf.models.layers.rope import rotate_pairs
from moeinf.offload.gpu_kernels import elementwise
from moeinf.offload.gpu_kernels.elementwise import gated, gqa_heads, mla_heads, rms_norm
from tests.offload.device import DEVICE

pytestmark = pytest.mark.kernel("small")

BF16, F32 = torch.bfloat16, torch.float32


class Draw:
    def __init__(self, dtype, seed=0):
        self.dtype, self._generator = dtype, torch.Generator().manual_seed(seed)

    def __call__(self, *shape, about=0.0, dtype=None):
        found = about + torch.randn(*shape, generator=self._generator)
        return found.to(dtype or self.dtype)


def agree(found, wanted, apart=1, seldom=0.01):
    """Check numbers by units in the last place: at most `apart`, in at most a share of `seldom`.

    Near 0, the unit is that of the row.
    """
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    found = found.cpu()
    eps, near = (2.0**-7, 2.0**-6) if found.dtype == BF16 else (2.0**-21, 1.0)
    error = (found.double() - wanted.double()).abs()
    least = wanted.double().abs().amax(-1, keepdim=True) * near
    assert bool((error <= apart * eps * torch.maximum(wanted.double().abs(), least)).all())
    if found.dtype == BF16:
        assert float((found != wanted).double().mean()) <= seldom


def angles_of(positions, count):
    angles = positions[:, None] / 10 ** torch.linspace(0, 3, count)
    return angles.cos() * 1.1, angles.sin() * 1.1  # as with longrope and yarn, not of length 1


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("width", [7, 64, 300])
def test_norms_round_as_torch_does(dtype, wide, width, monkeypatch):
    monkeypatch.setattr(elementwise, "_PIECE", 128)  # 300 are three pieces
    draw = Draw(dtype)
    x = draw(3, 2, width) * torch.tensor([1e-4, 1.0, 100.0]).to(dtype)[:, None, None]
    weight = draw(width, about=1.0, dtype=F32 if wide else dtype)
    norm = (WideRmsNorm if wide else RmsNorm)(weight, 1e-5)
    agree(rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-5, wide), norm(x))


def test_both_orders_of_a_norm_differ():
    """The test above needs this difference."""
    x, weight = Draw(BF16)(4, 64), Draw(BF16, 1)(64, about=1.0)
    plain, wide = (rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-6, w) for w in (False, True))
    assert float((plain != wide).double().mean()) > 0.1


GQA = {  # heads, key heads, width, angles, other settings
    "plain": (4, 2, 16, 8, {}),
    "odd": (3, 1, 10, 5, {}),
    "partial": (3, 3, 24, 4, {}),
    "clipped": (4, 1, 16, 8, {"clip": 0.7}),
    "normed": (4, 2, 24, 12, {"norm": RmsNorm}),
    "wide, partial, clipped": (2, 1, 40, 6, {"norm": WideRmsNorm, "clip": 1.3}),
}


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("name", GQA)
def test_heads_of_grouped_queries(name, dtype):
    """Two requests at different places: only those rows of their caches are written."""
    heads, groups, width, count, more = GQA[name]
    draw, kind = Draw(dtype), more.get("norm")
    q, k, v = (draw(3, n * width) for n in (heads, groups, groups))
    core = GqaCore(0, GqaShape(heads, groups, width, clip=more.get("clip")))
    norms = None
    if kind is not None:
        weights = [
            draw(width, about=1.0, dtype=F32 if kind is WideRmsNorm else dtype) for _ in "qk"
        ]
        inner = [kind(weight, eps) for weight, eps in zip(weights, (1e-5, 0.1), strict=True)]
        core = replace(core, q_norm=HeadNorm(inner[0]), k_norm=HeadNorm(inner[1]))
        norms = tuple((norm.weight.to(DEVICE), norm.eps) for norm in inner)
    positions = torch.tensor([9, 0, 5])
    cos, sin = angles_of(positions, count)
    wanted = core.heads(q, k, v, PassRows((), positions, cos, sin))
    out = torch.full((3, heads, width), torch.nan, dtype=dtype, device=DEVICE)
    for row in (2, 0):
        memory = torch.full((groups, 11, 2 * width), torch.nan, dtype=dtype, device=DEVICE)
        planes = memory[..., :width], memory[..., width:]
        gqa_heads(
            q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), row, (cos.to(DEVICE), sin.to(DEVICE)),
            positions.to(DEVICE), planes, out, norms, kind is WideRmsNorm, more.get("clip"),
        )  # fmt: skip
        place = int(positions[row])
        for plane, theirs in zip(planes, wanted[1:], strict=True):
            agree(plane[:, place], theirs[row])
            assert int(plane.isnan().any(-1).sum()) == groups * 10
    agree(out[[0, 2]], wanted[0][[0, 2]])
    assert bool(out[1].isnan().all())


def test_a_clip_keeps_nan_and_signs():
    q = torch.tensor([[torch.nan, -9.0, 9.0, 0.5] * 4])
    planes = tuple(torch.zeros(1, 2, 16, device=DEVICE) for _ in range(2))
    out, given = torch.zeros(1, 1, 16, device=DEVICE), q.to(DEVICE)
    still = torch.ones(1, 8, device=DEVICE), torch.zeros(1, 8, device=DEVICE)
    place = torch.tensor([1], device=DEVICE)
    gqa_heads(given, given, given, 0, still, place, planes, out, clip=2.0)
    wanted = torch.tensor([torch.nan, -2.0, 2.0, 0.5] * 4)
    for found in (out[0, 0], planes[1][0, 1]):
        torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("sizes", [(3, 24, 8, 40), (2, 5, 6, 17)], ids=str)
def test_heads_of_latent_attention(sizes, dtype):
    """The first columns of the output, for the absorbed query, are not written."""
    heads, nope, rope, kv_lora = sizes
    draw, shape = Draw(dtype), MlaShape(heads, nope, rope, 4, kv_lora, None, 0.2)
    q, latent = draw(2, heads * (nope + rope)), draw(2, kv_lora + rope) * 3
    norm = RmsNorm(draw(kv_lora, about=1.0), 1e-6)
    core = MlaCore(0, shape, norm, draw(heads, nope + 4, kv_lora))
    positions = torch.tensor([3, 8])
    cos, sin = angles_of(positions, rope // 2)
    _, turned, wanted = core.heads(q, latent, PassRows((), positions, cos, sin))
    out = torch.full((2, heads, kv_lora + rope), torch.nan, dtype=dtype, device=DEVICE)
    for row in range(2):
        memory = torch.full((1, 9, kv_lora + rope), torch.nan, dtype=dtype, device=DEVICE)
        mla_heads(
            q.to(DEVICE), latent.to(DEVICE), row, (cos.to(DEVICE), sin.to(DEVICE)),
            positions.to(DEVICE), memory, out, (norm.weight.to(DEVICE), norm.eps),
        )  # fmt: skip
        agree(memory[:, positions[row]], wanted[row])
        assert int(memory.isnan().any(-1).sum()) == 8
    agree(out[..., kv_lora:], turned)
    assert bool(out[..., :kv_lora].isnan().all())


def test_pairs_are_neighbours():
    """A rotation by 90 degrees, computed by hand."""
    q = torch.arange(1.0, 5.0)[None].repeat(1, 5).to(DEVICE)  # a head: one column, four that rotate
    given = torch.cat((torch.zeros(1, 1, device=DEVICE), q[:, :4]), 1)
    quarter = torch.zeros(1, 2, device=DEVICE), torch.ones(1, 2, device=DEVICE)
    memory, out = torch.zeros(1, 1, 7, device=DEVICE), torch.zeros(1, 1, 7, device=DEVICE)
    weight, latent = torch.ones(3, device=DEVICE), torch.ones(1, 7, device=DEVICE)
    at = torch.tensor([0], device=DEVICE)
    mla_heads(given, latent, 0, quarter, at, memory, out, (weight, 0.0))
    assert out[0, 0, 3:].tolist() == [-2.0, 1.0, -4.0, 3.0]
    assert memory[0, 0].tolist() == [1.0, 1.0, 1.0, -1.0, 1.0, -1.0, 1.0]
    assert rotate_pairs(q[:, None, :4].cpu(), *(x.cpu() for x in quarter)).flatten().tolist() == [
        -2.0, 1.0, -4.0, 3.0,
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_swiglu(dtype):
    gate, up = Draw(dtype)(3, 700) * 4, Draw(dtype, 1)(3, 700)
    gate[0, :3] = torch.tensor([torch.nan, -200.0, 200.0])
    found = gated(gate.to(DEVICE), up.to(DEVICE)).cpu()
    assert bool(found[0, 0].isnan())
    assert float(found[0, 1]) == 0.0
    agree(found[:, 1:], (functional.silu(gate) * up)[:, 1:])
