"""Test groups, neighbours and shares of an EAMC, on collections with a known answer."""

from __future__ import annotations

import numpy as np
import pytest

from moeinf.offload.routing.clustering import nearest, silhouette, summarise
from moeinf.offload.routing.eamc import Eamc

LAYERS, EXPERTS = 3, 16


def planted(groups: int, each: int, seed: int = 0) -> Eamc:
    """Make requests of `groups` kinds, each kind with four different experts per layer."""
    draw = np.random.default_rng(seed)
    eamc = Eamc(groups * each, LAYERS, EXPERTS)
    for number in range(groups * each):
        kind = number % groups
        odds = np.full(EXPERTS, 0.2)
        odds[4 * kind : 4 * kind + 4] = 4
        parts = [draw.poisson(odds, (LAYERS, EXPERTS)) for _ in range(2)]
        eamc.add(*parts)
    return eamc


@pytest.mark.parametrize(("groups", "each"), [(2, 9), (3, 12), (4, 7)])
def test_finds_the_groups_that_were_planted(groups: int, each: int) -> None:
    found = summarise(planted(groups, each)).groups
    assert found.sizes == [each] * groups
    assert sorted(found.of.reshape(each, groups)[0].tolist()) == list(range(groups))
    assert (found.of.reshape(each, groups) == found.of[:groups]).all()
    assert found.silhouette > 0.3
    assert all(0.8 < cohesion < 1 for cohesion in found.cohesion)


def test_no_groups_where_all_are_alike() -> None:
    found = summarise(planted(1, 20)).groups
    assert (found.sizes, found.silhouette) == ([20], 0.0)
    same = Eamc(5, LAYERS, EXPERTS)
    for _ in range(5):
        same.add(np.ones((LAYERS, EXPERTS), int), np.ones((LAYERS, EXPERTS), int))
    assert summarise(same).groups.sizes == [5]


def test_figures_by_hand() -> None:
    """Two requests: experts 0 and 1 of layer 0; one of them 1 of layer 1."""
    eamc = Eamc(4, 2, 4)
    zero = np.zeros((2, 4), int)
    eamc.add(np.array([[3, 1, 0, 0], [0, 4, 0, 0]]), zero)
    eamc.add(np.array([[0, 4, 0, 0], [0, 0, 0, 4]]), np.array([[0, 2, 0, 0], [0, 0, 0, 2]]))
    about = summarise(eamc)
    assert (about.entries, about.prompt_events, about.decode_events) == (2, 16, 4)
    assert about.used_by_one == pytest.approx((3 / 8 + 2 / 8) / 2)
    assert about.used_by_all == pytest.approx(4 / 8)
    np.testing.assert_allclose(about.heat[0], [0.3, 0.7, 0, 0])
    np.testing.assert_allclose(about.heat[1], [0, 0.4, 0, 0.6])
    # prefill: 4 / (√26 · √32) = 0.1387; one entry has no decode part, so half of that mass counts
    assert about.similarity[0, 1] == pytest.approx(0.1387 / 2**0.5, abs=1e-3)
    np.testing.assert_allclose(np.diag(about.similarity), 1, atol=1e-6)


def test_nearest_leaves_out_the_entry_itself() -> None:
    similarity = np.array([[1, 0.2, 0.7], [0.2, 1, 0.5], [0.7, 0.5, 1]], np.float32)
    np.testing.assert_allclose(nearest(similarity), [0.7, 0.5, 0.7])


def test_silhouette_by_hand() -> None:
    """For the first two a = 1, b = 4; the third is alone. (0.75 + 0.75 + 0) / 3."""
    distance = np.array([[0, 1, 4], [1, 0, 4], [4, 4, 0]], np.float32)
    assert silhouette(np.array([0, 0, 1]), distance) == pytest.approx(0.5)
    assert silhouette(np.array([0, 0, 0]), distance) == 0


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_entries(count: int) -> None:
    eamc = Eamc(4, LAYERS, EXPERTS)
    for _ in range(count):
        eamc.add(np.eye(LAYERS, EXPERTS, dtype=int), np.zeros((LAYERS, EXPERTS), int))
    about = summarise(eamc)
    assert (about.entries, sum(about.groups.sizes)) == (count, count)
    assert about.similarity.shape == (count, count)
