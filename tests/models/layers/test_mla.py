"""Test the two ways to compute latent attention, and their memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moeinf.models.layers import attention
from moeinf.models.layers.kv_cache import CacheLayout, KvCache, PassRows, Span
from moeinf.models.layers.mla import MlaAttention, MlaShape
from tests.fakes import DictParts
from tests.models.conftest import LargestStorage

SHAPE = MlaShape(heads=8, nope=16, rope=4, value=12, kv_lora=10, q_lora=None, scale=0.2)
LAYOUT = CacheLayout(1, ((1, 14),), torch.float32, torch.device("cpu"))
SIZES = {
    "q_proj": (8 * 20, 6),
    "kv_a_proj_with_mqa": (14, 6),
    "kv_a_layernorm": (10,),
    "kv_b_proj": (8 * 28, 10),
    "o_proj": (6, 8 * 12),
}


@pytest.fixture
def layer() -> MlaAttention:
    draw = torch.Generator().manual_seed(0)
    weights = {f"a.{name}.weight": torch.randn(s, generator=draw) for name, s in SIZES.items()}
    return MlaAttention(0, SHAPE, 6, DictParts(weights), "a")


def rows_of(*spans: Span) -> PassRows:
    positions = torch.cat([torch.arange(s.past, s.past + s.count) for s in spans])
    angles = (positions[:, None] * 0.1).expand(-1, SHAPE.rope // 2)
    return PassRows(spans, positions, angles.cos(), angles.sin())


def run(layer: MlaAttention, x: Tensor, cuts: list[int]) -> Tensor:
    """Return the output for all of x, given in pieces."""
    cache, out = KvCache(LAYOUT, len(x)), []
    for start, stop in zip([0, *cuts], [*cuts, len(x)], strict=True):
        out.append(layer(x[start:stop], rows_of(Span(cache, slice(0, stop - start), start))))
        cache.advance(stop - start)
    return torch.cat(out)


def test_absorbed_equals_expanded(layer: MlaAttention) -> None:
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
    one_by_one, at_once = run(layer, x, list(range(1, 12))), run(layer, x, [])
    torch.testing.assert_close(one_by_one, at_once, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("new", [1, 20])
def test_a_block_of_heads_at_a_time(
    layer: MlaAttention, new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of one head gives the same result with less memory."""
    x = torch.randn(300, 6, generator=torch.Generator().manual_seed(1))

    def last() -> tuple[Tensor, int]:
        cache = KvCache(LAYOUT, 300)
        layer(x[:-new], rows_of(Span(cache, slice(0, 300 - new), 0)))
        cache.advance(300 - new)
        with LargestStorage() as largest:
            out = layer(x[-new:], rows_of(Span(cache, slice(0, new), 300 - new)))
        return out, largest.bytes

    whole, much = last()
    monkeypatch.setattr(attention, "SCRATCH_BYTES", 1)
    split, little = last()
    torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-4)
    if new > 1:
        assert little < much / 4
