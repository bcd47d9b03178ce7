"""Test the choice of experts that prefers cheap ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moeinf.models.layers.cache_aware import CacheAwareRouter, always_kept, choose
from moeinf.models.layers.routing import SigmoidRouter, SoftmaxRouter, TopSoftmaxRouter

E, D, T = 12, 8, 5
Judging = SoftmaxRouter | TopSoftmaxRouter | SigmoidRouter


def routers(k: int, seed: int) -> list[Judging]:
    random = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(E, D, generator=random), torch.randn(E, generator=random) / 4
    return [
        SoftmaxRouter(weight, k, renormalise=False),
        SoftmaxRouter(weight, k, renormalise=True, scale=2.5, groups=(4, 2)),
        TopSoftmaxRouter(weight, bias, k),
        SigmoidRouter(weight, bias, k, renormalise=True, scale=1.5),
        SigmoidRouter(weight, bias, k, renormalise=True, groups=(4, 3)),
    ]


def aware(
    router: Judging, bonus: float, cheap: Tensor | None
) -> tuple[CacheAwareRouter, list[int]]:
    replaced: list[int] = []
    return CacheAwareRouter(router, router, bonus, lambda: cheap, replaced.append), replaced


def test_by_hand() -> None:
    """Logits 5 4 3 2 1 -3, so a range of 8, two of them cheap: 3 (logit 2) and 4 (logit 1).

    With K = 3 the first two stay. A bonus of 1/16 of the range is 0.5: 2.5 < 3, no change. 3/16 of
    it is 1.5: 3.5 > 3, so expert 3 replaces expert 2. With K = 2 only expert 0 stays, and 3.5 < 4;
    with half of the range, experts 3 and 4 have 6 and 5.
    """
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, -3.0]])
    cheap = torch.tensor([False, False, False, True, True, False])
    expected = {(3, 1 / 16): [0, 1, 2], (3, 3 / 16): [0, 1, 3], (2, 3 / 16): [0, 1]}
    for (k, bonus), ids in {**expected, (2, 0.5): [0, 3]}.items():
        router = SoftmaxRouter(torch.diag(logits[0]), k, renormalise=True)
        found, replaced = aware(router, bonus, cheap)
        chosen, weights = found(torch.ones(1, 6))
        assert chosen.tolist() == [ids]
        assert sum(replaced) == len(set(ids) - set(range(k)))
        assert torch.allclose(weights, logits[:, ids].softmax(-1))


def test_the_range_is_averaged_over_tokens_that_miss() -> None:
    """Ranges 8 and 4: the second token has a bonus of 6/4; a token without a miss has no part."""
    weight, cheap = torch.eye(4), torch.tensor([True, False, False, True])
    found, _ = aware(SoftmaxRouter(weight, 2, renormalise=False), 0.25, cheap)
    for logits, ids in (
        ([8.0, 7.0, 0.0, 4.0], [0, 1]),  # 4 + 2 < 7
        ([99.0, 1.0, 0.0, 98.0], [0, 3]),  # both cheap: 99 does not enter the average
        ([4.0, 2.4, 0.0, 1.0], [0, 3]),  # 1 + 6/4 > 2.4; its own range would give 1 + 1
    ):
        assert found(torch.tensor([logits]))[0].tolist() == [ids]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6), k=st.integers(2, 6), which=st.integers(0, 4), bonus=st.floats(0, 1)
)
def test_properties(seed: int, k: int, which: int, bonus: float) -> None:
    router = routers(k, seed)[which]
    random = torch.Generator().manual_seed(seed + 1)
    x, cheap = torch.randn(T, D, generator=random), torch.rand(E, generator=random) < 0.4
    exact_ids, exact_weights = router(x)
    for none in (None, torch.zeros(E, dtype=torch.bool), torch.ones(E, dtype=torch.bool)):
        ids, weights = aware(router, bonus, none)[0](x)
        assert torch.equal(ids, exact_ids)
        assert torch.equal(weights, exact_weights)
    ids, weights = aware(router, 0.0, cheap)[0](x)
    assert torch.equal(ids, exact_ids)
    assert torch.equal(weights, exact_weights)

    found, replaced = aware(router, bonus, cheap)
    ids, weights = found(x)
    ranks, scores = router.judge(x)
    assert sum(replaced) == sum(len(set(a) - set(b)) for a, b in _pairs(ids, exact_ids))
    for new, old in _pairs(ids, exact_ids):
        assert len(set(new)) == k
        assert set(old[: always_kept(k)]) <= set(new)
        assert all(cheap[one] for one in set(new) - set(old))
        assert not any(cheap[one] for one in set(old) - set(new))
    assert torch.allclose(weights, router.weigh(scores, ids))
    assert torch.isfinite(ranks.gather(1, ids)).all(), "an expert of an excluded group"
    before = [int(cheap[row].sum()) for row in exact_ids]
    assert all(int(cheap[row].sum()) >= old for row, old in zip(ids, before, strict=True))


def _pairs(new: Tensor, old: Tensor) -> list[tuple[list[int], list[int]]]:
    return list(zip(new.tolist(), old.tolist(), strict=True))


@pytest.mark.parametrize(("k", "kept"), [(1, 1), (2, 1), (3, 2), (8, 2)])
def test_the_best_always_stay(k: int, kept: int) -> None:
    """A bonus beyond the range fills the choice with cheap experts, all but the first."""
    ranks = torch.arange(12.0, 0.0, -1.0)[None]
    ids, cheap = torch.arange(k)[None], torch.arange(12) >= 11 - k
    found = choose(ranks, ids, cheap, 100.0)[0].tolist()
    assert always_kept(k) == kept
    assert found == [*range(kept), *range(11 - k, 11 - kept)]
