"""Rows of the KV cache in q8: bounds of the error, independence, and sizes."""

from __future__ import annotations

import pytest
import torch

from moeinf.models.layers.kv_cache import CacheLayout, KvCache
from moeinf.models.layers.kv_q8 import VALUES, quantised, row_bytes, widened


def draw(*shape: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(3)
    return torch.randn(*shape, generator=made) * 10 ** torch.randn(*shape[:-1], 1, generator=made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 31, 32, 80, 128, 576])
def test_the_error_is_half_a_step(width: int, dtype: torch.dtype) -> None:
    x = draw(40, 3, width).to(dtype)
    rows = quantised(x)
    assert rows.shape == (40, 3, row_bytes(width))
    wrong = (widened(rows, width, torch.float32) - x.float()).abs()
    for start in range(0, width, VALUES):
        block = slice(start, start + VALUES)
        most = x[..., block].float().abs().amax(-1, keepdim=True)
        assert bool((wrong[..., block] <= most / 127 / 2 * (1 + 2**-8)).all())
    assert torch.equal(widened(rows, width, dtype), widened(rows, width, torch.float32).to(dtype))


def test_a_block_depends_on_its_values_alone() -> None:
    x = draw(5, 2, 96)
    together = quantised(x)
    assert torch.equal(quantised(x[3:4]), together[3:4])
    x[:, :, 32:64] = 1e9
    assert torch.equal(quantised(x)[..., :34], together[..., :34])
    assert torch.equal(quantised(x)[..., 68:], together[..., 68:])


def test_special_values() -> None:
    x = torch.zeros(4, 32)
    x[0, 7], x[1, 7], x[2] = torch.nan, torch.inf, 1e-35
    found = widened(quantised(x), 32, torch.float32)
    assert not found[:2].isfinite().any()
    assert torch.equal(found[2:], torch.zeros(2, 32))


def test_a_cache_holds_rows() -> None:
    """Tokens written in pieces, cut, copied and read: what one write gives."""
    place = torch.device("cpu")
    layout = CacheLayout(2, ((3, 64), (1, 40)), torch.bfloat16, place, form="q8")
    assert layout.bytes_per_token == 2 * (3 * 68 + 44)
    cache, k, v = KvCache(layout, 9), draw(7, 3, 64).bfloat16(), draw(7, 1, 40).bfloat16()
    cache.write(1, 0, k[:4], v[:4])
    cache.advance(4)
    cache.truncate(2)
    cache = cache.snapshot()
    keys, values = cache.write(1, 2, k[2:], v[2:])
    assert (keys.shape, values.shape) == ((3, 7, 68), (1, 7, 44))
    assert torch.equal(keys, quantised(k).transpose(0, 1))
    wanted = widened(quantised(v), 40, torch.bfloat16).transpose(0, 1)
    assert torch.equal(cache.values(values, 40), wanted)
