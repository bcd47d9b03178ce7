"""Compare attention of many rows on the device with float64.

Without a GPU, Triton's interpreter runs the kernels (tests/conftest.py).
"""

from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")

from moeinf.offload.gpu_kernels.decode_attention import attend_newest
from moeinf.offload.gpu_kernels.prefill_attention import attend_rows
from tests.offload.device import DEVICE

pytestmark = pytest.mark.kernel("small")

SHAPES = {  # heads, key heads, width, value width
    "grouped": (8, 2, 64, 64),
    "three of a key head": (6, 2, 40, 40),
    "many": (3, 3, 40, 24),
    "latent": (4, 4, 72, 48),
    "wide": (2, 1, 256, 256),
}


def drawn(shape, past, rows, capacity, dtype=torch.bfloat16):
    """Return q, k and v, where k and v share memory; unwritten places are NaN."""
    heads, groups, width, values = SHAPES[shape]
    draw = torch.Generator().manual_seed(past + rows)
    q = torch.randn(rows, heads, width, generator=draw)
    memory = torch.full((groups, capacity, width + values), torch.nan)
    memory[:, : past + rows] = torch.randn(groups, past + rows, width + values, generator=draw)
    q, memory = q.to(DEVICE, dtype), memory.to(DEVICE, dtype)
    return q, memory[..., :width], memory[..., width:]


def same_rows(found, expected):
    """Compare bits on a GPU. In the interpreter numpy's products depend on a row's place."""
    if DEVICE.type == "cuda":
        assert torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-9)


def wanted(q, k, v, past, scale, window=None, sinks=None):
    """Return the result [T, H, V] in float64, a row at a time."""
    found = []
    for row, heads in enumerate(q.double().cpu()):
        last = past + row + 1
        first = 0 if window is None else max(0, last - window)
        keys, values = (x[:, first:last].double().cpu() for x in (k, v))
        scores = heads.unflatten(0, (len(k), -1)) @ keys.mT * scale  # [G, P, S]
        if sinks is not None:
            logits = sinks.double().cpu().unflatten(0, (len(k), -1))[..., None]
            scores = torch.cat((scores, logits), -1)
        shares = scores.softmax(-1)[..., : last - first]
        found.append((shares @ values).flatten(0, 1))
    return torch.stack(found)


def close(q, k, v, *given, rtol=2**-8, atol=1e-4):
    found = attend_rows(q, k, v, *given).cpu()
    assert found.dtype == q.dtype
    torch.testing.assert_close(found.double(), wanted(q, k, v, *given), rtol=rtol, atol=atol)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("past", "rows"), [(0, 17), (31, 2), (63, 65)])
def test_every_shape(shape, past, rows):
    close(*drawn(shape, past, rows, 140), past, SHAPES[shape][2] ** -0.5)


@pytest.mark.parametrize("total", [256, 257, 287, 2049])
def test_every_length(total):
    """Test whole blocks of keys, one token more, one less."""
    close(*drawn("grouped", total - 5, 5, total + 3), total - 5, 0.3)


@pytest.mark.parametrize("shape", ["grouped", "latent", "wide"])
def test_float32(shape):
    given = drawn(shape, 45, 33, 80, torch.float32)
    close(*given, 45, 0.2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("past", "rows", "window"),
    [(0, 65, 1), (50, 17, 8), (64, 17, 64), (130, 65, 70), (3, 9, 12), (1000, 2, 129)],
)
def test_windows_and_sinks(past, rows, window):
    given = drawn("grouped", past, rows, past + rows + 1, torch.float32)
    sinks = torch.linspace(-2.0, 6.0, 8).to(DEVICE)
    close(*given, past, 0.2, window, rtol=1e-5, atol=1e-6)
    close(*given, past, 0.2, window, sinks, rtol=1e-5, atol=1e-6)


def test_sinks_of_a_bf16_model():
    sinks = torch.linspace(-2.0, 6.0, 6).to(DEVICE, torch.bfloat16)
    close(*drawn("three of a key head", 3, 30, 40), 3, 0.2, None, sinks)


def test_large_scores_do_not_overflow():
    q, k, v = drawn("grouped", 70, 9, 80)
    close(q * 100, k, v, 70, 5.0, rtol=2**-7, atol=1e-2)
    close(q * 100, k, v, 70, 5.0, 3, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("window", [None, 40])
def test_how_a_text_is_cut_and_stored_changes_nothing(window):
    q, k, v = drawn("grouped", 0, 150, 5000)
    whole = attend_rows(q, k, v, 0, 0.2, window)
    k, v = k[:, :150].clone(), v[:, :150].clone()
    cuts = [0, 1, 18, 83, 150]
    parts = [attend_rows(q[start:stop], k, v, start, 0.2, window) for start, stop in pairwise(cuts)]
    same_rows(torch.cat(parts), whole)


@pytest.mark.parametrize("shape", ["grouped", "latent"])
def test_the_newest_token_alone(shape):
    """The result agrees with that of the decode kernel."""
    q, k, v = drawn(shape, 99, 1, 110, torch.float32)
    sinks = torch.linspace(-1.0, 2.0, q.shape[1]).to(DEVICE)
    alone = attend_newest(q[0], k, v, torch.tensor([99], device=DEVICE), 0.2, 30, sinks)
    torch.testing.assert_close(
        attend_rows(q, k, v, 99, 0.2, 30, sinks)[0], alone, rtol=1e-5, atol=1e-6
    )


def test_strides_and_a_place_for_the_result():
    """Values in the layout of a product, [S, G, …], separate keys, rows of a larger result."""
    q, k, v = drawn("grouped", 150, 7, 157)
    values = v.transpose(0, 1).contiguous().transpose(0, 1)
    assert values.stride(0) < values.stride(1)
    out = torch.full((9, *q.shape[1:]), 7.0, dtype=q.dtype, device=DEVICE)
    found = attend_rows(q, k.contiguous(), values, 150, 0.2, 20, out=out[1:8])
    assert found.data_ptr() == out[1].data_ptr()
    assert torch.equal(found, attend_rows(q, k, v, 150, 0.2, 20))
    assert bool((out[[0, 8]] == 7.0).all())
