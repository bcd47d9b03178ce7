"""Test routing on scores computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from moeinf.models.layers.routing import SigmoidRouter, SoftmaxRouter, SparseMixer, limit_to_groups


def scores_of(*probabilities: float) -> SoftmaxRouter:
    """Return a router whose softmax is `probabilities` for the input [[1.0]]."""
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
    """Logits that are equal in bfloat16 stay different."""
    router = SoftmaxRouter(torch.tensor([[1.0], [1.001]]), 1, renormalise=False)
    ids, weights = router(torch.ones(1, 1, dtype=torch.bfloat16))
    assert (ids.item(), weights.dtype) == (1, torch.float32)


def sigmoid_router(scores: list[float], bias: list[float], **settings: Any) -> SigmoidRouter:
    """Return a router whose sigmoid is `scores` for the input [[1.0]]."""
    return SigmoidRouter(torch.tensor(scores).logit()[:, None], torch.tensor(bias), **settings)


def test_the_bias_chooses_and_does_not_weigh() -> None:
    router = sigmoid_router([0.6, 0.5, 0.2, 0.4], [0.0, 0.0, 0.5, 0.0], top_k=2, renormalise=False)
    ids, weights = router(ONE)
    assert ids.tolist() == [[2, 0]]
    torch.testing.assert_close(weights, torch.tensor([[0.2, 0.6]]))
    router = replace(router, renormalise=True, scale=2.5)
    torch.testing.assert_close(router(ONE)[1], torch.tensor([[0.625, 1.875]]))


def test_a_group_counts_as_much_as_its_best_two() -> None:
    """Group worths are .9 + .1, .6 + .5, .4 + .4: the best expert's group is not the best."""
    scores, none = [0.9, 0.1, 0.0001, 0.6, 0.5, 0.3, 0.4, 0.4, 0.2], [0.0] * 9
    router = sigmoid_router(scores, none, top_k=3, renormalise=False, groups=(3, 1))
    ids, weights = router(ONE)
    assert ids.tolist() == [[3, 4, 5]]
    torch.testing.assert_close(weights, torch.tensor([[0.6, 0.5, 0.3]]))


def mix(*logits: float) -> tuple[list[int], list[float]]:
    ids, weights = SparseMixer(torch.tensor(logits)[:, None], jitter=0.1)(ONE)
    return ids[0].tolist(), weights[0].tolist()


def test_the_sparse_mixer_weighs_against_what_comes_close() -> None:
    """At most 20 % below 2.0 is close to it, so 1.7 and not 1.5; 1.5 is close to 1.7."""
    ids, weights = mix(1.5, 2.0, -5.0, 1.7)
    assert ids == [1, 3]
    assert weights == pytest.approx([1 / (1 + math.exp(-0.3)), 1 / (1 + math.exp(-0.2))])


def test_the_sparse_mixer_alone_and_below_zero() -> None:
    assert mix(1.0, 2.0, 0.1) == ([1, 0], [1.0, 1.0])
    ids, weights = mix(-1.0, -1.1, -2.0)  # relative to 1.1 and 2.0, their own magnitudes
    assert ids == [0, 1]
    assert weights == pytest.approx([1 / (1 + math.exp(-0.1)), 1.0])
