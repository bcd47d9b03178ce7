"""Routing on scores computed by hand."""

from __future__ import annotations

import torch

from moeinf.models.routing import SoftmaxRouter, limit_to_groups


def scores_of(*probabilities: float) -> SoftmaxRouter:
    """A router whose softmax is `probabilities` for the input [[1.0]]."""
    return SoftmaxRouter(torch.tensor(probabilities).log()[:, None], top_k=2, renormalise=False)


ONE = torch.ones(1, 1)


def test_top_k_of_the_softmax() -> None:
    ids, weights = scores_of(0.1, 0.5, 0.1, 0.3)(ONE)
    assert ids.tolist() == [[1, 3]]
    assert ids.dtype == torch.int64
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.3]]))


def test_renormalised_and_scaled() -> None:
    logits = torch.tensor([0.1, 0.5, 0.1, 0.3]).log()[:, None]
    _, weights = SoftmaxRouter(logits, 2, renormalise=True, scale=16.0)(ONE)
    torch.testing.assert_close(weights, torch.tensor([[10.0, 6.0]]))


def test_only_the_best_groups_count() -> None:
    """Group bests are .30, .25, .24: the last group is out although its .24 is third of all."""
    scores = torch.tensor([[0.30, 0.00, 0.25, 0.01, 0.20, 0.24]])
    limited = limit_to_groups(scores, groups=3, kept=2)
    torch.testing.assert_close(limited, torch.tensor([[0.30, 0.00, 0.25, 0.01, 0.0, 0.0]]))
    logits = scores.log()[0, :, None]
    ids, weights = SoftmaxRouter(logits, 3, renormalise=False, groups=(3, 2))(ONE)
    assert ids.tolist() == [[0, 2, 3]]
    torch.testing.assert_close(weights, torch.tensor([[0.30, 0.25, 0.01]]))


def test_float32_whatever_the_input() -> None:
    """Logits that bfloat16 cannot tell apart are told apart."""
    router = SoftmaxRouter(torch.tensor([[1.0], [1.001]]), 1, renormalise=False)
    ids, weights = router(torch.ones(1, 1, dtype=torch.bfloat16))
    assert (ids.item(), weights.dtype) == (1, torch.float32)
