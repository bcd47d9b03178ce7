"""Compare attention with the textbook formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moeinf.models.layers import attention
from moeinf.models.layers.attention import (
    SCRATCH_BYTES,
    attend,
    attend_one,
    causal_mask,
    head_blocks,
)
from tests.models.conftest import LargestStorage


def textbook(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Compute attention in float64, one head and one query at a time."""
    new, heads, total = len(q), q.shape[1], k.shape[1]
    out = torch.zeros(new, heads, v.shape[2], dtype=torch.float64)
    for t in range(new):
        at = total - new + t
        first = 0 if window is None else max(0, at - window + 1)
        for h in range(heads):
            g = h * len(k) // heads
            scores = k[g, first : at + 1].double() @ q[t, h].double() * scale
            out[t, h] = scores.softmax(0) @ v[g, first : at + 1].double()
    return out.flatten(1)


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize(("new", "total"), [(1, 1), (1, 9), (5, 5), (3, 9), (8, 9)])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (3, 1)])
def test_attend(new: int, total: int, heads: int, groups: int, window: int | None) -> None:
    torch.manual_seed(0)
    q = torch.randn(new, heads, 6)
    k, v = torch.randn(groups, 12, 6)[:, :total], torch.randn(groups, 12, 6)[:, :total]
    expected = textbook(q, k, v, 0.7, window)
    torch.testing.assert_close(attend(q, k, v, 0.7, window).double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("width", [3, 8])
@pytest.mark.parametrize(("new", "window"), [(1, None), (5, None), (5, 4)])
def test_values_of_another_width(new: int, window: int | None, width: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(new, 4, 6), torch.randn(2, 9, 6), torch.randn(2, 9, width)
    expected = textbook(q, k, v, 0.7, window)
    torch.testing.assert_close(attend(q, k, v, 0.7, window).double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_row_in_pieces(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cutting the keys changes only the last bits."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 8), torch.randn(2, 50, 8), torch.randn(2, 50, 5)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    whole = attend_one(q, k, v, 0.4)
    monkeypatch.setattr(attention, "_WIDENED_ITEMS", 2 * 8 * 7)
    torch.testing.assert_close(attend_one(q, k, v, 0.4), whole)
    exact = torch.softmax(q.double() @ k.double().mT * 0.4, -1) @ v.double()
    torch.testing.assert_close(whole.double(), exact, rtol=1e-2, atol=1e-2)


def test_mask() -> None:
    assert causal_mask(2, 4, None).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert causal_mask(2, 4, 2).int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]


def test_head_blocks() -> None:
    cut = list(head_blocks(5, SCRATCH_BYTES // 2))
    assert [(b.start, b.stop) for b in cut] == [(0, 2), (2, 4), (4, 5)]
    assert len(list(head_blocks(3, SCRATCH_BYTES * 4))) == 3  # one head each
    assert len(list(head_blocks(128, 1))) == 1


def test_prefill_never_holds_all_scores() -> None:
    new, total, heads = 64, 512, 16
    q, k, v = torch.randn(new, heads, 32), torch.randn(4, total, 32), torch.randn(4, total, 32)
    with LargestStorage() as largest:
        attend(q, k, v, 0.2)
    assert largest.bytes <= k.nbytes  # scores would be 8 times that, the mask is half
