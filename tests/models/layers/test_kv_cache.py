"""Test the KV cache as a value: lengths, copies, memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moeinf.models.layers.kv_cache import CacheLayout, KvCache

LAYOUT = CacheLayout(2, ((3, 4), (1, 5)), torch.float32, torch.device("cpu"))


def filled(tokens: int, capacity: int = 9) -> KvCache:
    cache = KvCache(LAYOUT, capacity)
    for layer in range(2):
        cache.write(layer, 0, torch.rand(tokens, 3, 4), torch.rand(tokens, 1, 5))
    cache.advance(tokens)
    return cache


def test_bytes_per_token() -> None:
    assert LAYOUT.bytes_per_token == 2 * (3 * 4 + 5) * 4


def test_write_returns_everything_so_far() -> None:
    cache = filled(2)
    new = torch.rand(3, 3, 4)
    heads, latent = cache.write(1, 2, new, torch.rand(3, 1, 5))
    assert heads.shape == (3, 5, 4)
    assert latent.shape == (1, 5, 5)
    assert torch.equal(heads[:, 2:], new.transpose(0, 1))
    assert cache.length == 2  # until advance


def test_truncate() -> None:
    cache = filled(5)
    cache.truncate(3)
    assert cache.length == 3
    for wrong in (4, -1):
        with pytest.raises(ValueError, match=f"cannot keep {wrong} of 3"):
            cache.truncate(wrong)


def test_snapshot_is_independent() -> None:
    cache = filled(4)
    copy = cache.snapshot()
    kept = copy.write(0, 4, torch.rand(1, 3, 4), torch.rand(1, 1, 5))[0][:, :4].clone()
    cache.write(0, 2, torch.zeros(2, 3, 4), torch.zeros(2, 1, 5))
    cache.truncate(1)
    assert (copy.length, copy.capacity) == (4, 9)
    now = copy.write(0, 4, torch.rand(1, 3, 4), torch.rand(1, 1, 5))[0][:, :4]
    assert torch.equal(now, kept)


def test_no_capacity() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        KvCache(LAYOUT, 0)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.linux("reads /proc")
def test_untouched_pages_cost_nothing() -> None:
    layout = CacheLayout(4, ((8, 128), (8, 128)), torch.float32, torch.device("cpu"))
    before = resident_bytes()
    cache = KvCache(layout, 8192)  # 256 MiB
    copy = cache.snapshot()
    assert resident_bytes() - before < 16 << 20
    assert copy.capacity == 8192
