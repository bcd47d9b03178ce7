"""Compare attention of the newest token on the device with float64.

Without a GPU, Triton's interpreter runs the kernels (tests/conftest.py).
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")

from moeinf.offload.gpu_kernels.decode_attention import attend_newest
from tests.offload.device import DEVICE

pytestmark = pytest.mark.kernel("small")

SHAPES = {  # heads, key heads, width, value width
    "grouped": (8, 2, 64, 64),
    "many": (3, 3, 40, 24),
    "latent": (20, 1, 72, 64),
    "wide": (2, 1, 576, 512),
}


def drawn(shape, position, capacity, dtype=torch.bfloat16, seed=0):
    """Return q, k and v; places that no token has written are NaN."""
    heads, groups, width, values = SHAPES[shape]
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(heads, width, generator=draw).to(dtype)
    memory = torch.full((groups, capacity, width + values), torch.nan)
    filled = torch.randn(groups, position + 1, width + values, generator=draw)
    memory[:, : position + 1] = filled
    memory = memory.to(dtype).to(DEVICE)
    k, v = memory[..., :width], memory[..., width:]
    return q.to(DEVICE), k, k[..., :values] if shape in ("latent", "wide") else v


def wanted(q, k, v, position, scale, window=None, sinks=None):
    first = 0 if window is None else max(0, position + 1 - window)
    k, v = (x[:, first : position + 1].double().cpu() for x in (k, v))
    heads = q.double().cpu().unflatten(0, (len(k), -1))
    scores = heads @ k.mT * scale
    if sinks is not None:
        logits = sinks.double().cpu().unflatten(0, (len(k), -1))[..., None]
        scores = torch.cat((scores, logits), -1)
    return (scores.softmax(-1)[..., : k.shape[1]] @ v).flatten(0, 1)


def attended(q, k, v, position, *given):
    at = torch.tensor([position], device=DEVICE)
    found = attend_newest(q, k, v, at, *given).cpu()
    assert found.dtype == q.dtype
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("position", [0, 62, 64, 300])
def test_every_shape_and_length(shape, position):
    q, k, v = drawn(shape, position, 310)
    scale = SHAPES[shape][2] ** -0.5
    found = attended(q, k, v, position, scale)
    torch.testing.assert_close(
        found.double(), wanted(q, k, v, position, scale), rtol=2**-8, atol=1e-4
    )


@pytest.mark.parametrize("shape", ["grouped", "latent"])
def test_float32(shape):
    q, k, v = drawn(shape, 130, 140, torch.float32)
    found = attended(q, k, v, 130, 0.3)
    torch.testing.assert_close(found.double(), wanted(q, k, v, 130, 0.3), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("position", "window"), [(5, 8), (8, 8), (9, 8), (5000, 4097), (99, 1)])
def test_windows_and_sinks(position, window):
    """With 4,097 keys every part has two blocks, and some parts have no keys."""
    q, k, v = drawn("grouped", position, position + 3)
    sinks = torch.linspace(-2.0, 6.0, 8).bfloat16()
    found = attended(q, k, v, position, 0.2, window, sinks.to(DEVICE))
    torch.testing.assert_close(
        found.double(), wanted(q, k, v, position, 0.2, window, sinks), rtol=2**-8, atol=1e-4
    )


def test_large_scores_do_not_overflow():
    q, k, v = drawn("grouped", 70, 80)
    found = attended(q * 100, k, v, 70, 5.0)
    torch.testing.assert_close(
        found.double(), wanted(q * 100, k, v, 70, 5.0), rtol=2**-7, atol=1e-2
    )


def test_room_for_more_tokens_changes_no_bit():
    q, k, v = drawn("grouped", 200, 5000)
    few = attended(q, k[:, :201].clone(), v[:, :201].clone(), 200, 0.2)
    assert torch.equal(attended(q, k, v, 200, 0.2), few)
