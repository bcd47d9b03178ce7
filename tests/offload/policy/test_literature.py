"""Policies of the literature against short sequences worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from moeinf.offload.policy.base import Passive, Prefetch, Setup
from moeinf.offload.policy.literature.arc import Arc
from moeinf.offload.policy.literature.eamc_v1 import EamcV1
from moeinf.offload.policy.literature.fmoe import Fmoe
from moeinf.offload.policy.literature.foresight import Foresight
from moeinf.offload.policy.literature.lrfu import HALF_LIFE, Lrfu
from moeinf.offload.policy.literature.markov import Markov
from moeinf.offload.policy.literature.promoe import ProMoe
from moeinf.offload.policy.literature.s3_fifo import S3Fifo
from moeinf.offload.policy.literature.sieve import Sieve
from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.routing.trace import RoutingShape
from tests.offload.policy.test_policies import ONE, ROW, admit, anyone, ids, leave, use


def test_lrfu_weighs_age_against_uses() -> None:
    """Cell 1: two uses at time 0. Cell 2: one use. Equal once 1's uses are a half life older."""
    for wait, first in ((HALF_LIFE - 2, 2), (HALF_LIFE + 2, 1)):
        policy = Lrfu(Setup(ONE, 2))
        admit(policy, 1)
        use(policy, 1, *[5] * wait)
        admit(policy, 2)
        assert leave(policy) == [first, 3 - first]


def test_arc_adapts_to_the_list_whose_ghosts_return() -> None:
    """Four slots hold 0 (used again), 1, 2, 3 (used once). The target is 0, so 1 leaves first.

    1 returns: it counts as used again, and the target becomes 1. 2 leaves, because 2 and 3 are more
    than one. 4 arrives, used once: 3 and 4 are more than one. With 3 gone only 4 is used once, so
    the oldest of the other list leaves.
    """
    policy = Arc(Setup(ONE, 4))
    admit(policy, 0, 1, 2, 3)
    use(policy, 0)
    assert policy.victim(anyone) == 1
    admit(policy, 1)
    assert policy.victim(anyone) == 2
    admit(policy, 4)
    assert [policy.victim(anyone), policy.victim(anyone)] == [3, 0]
    assert leave(policy) == [1, 4]


def test_s3_fifo_filters_cells_used_once() -> None:
    """0 is used twice in the small queue and moves on; 1 leaves, returns, and enters the main one.

    2 and 3 leave the small queue before anything leaves the main queue.
    """
    policy = S3Fifo(Setup(ONE, 4))
    admit(policy, 0, 1)
    use(policy, 0, 0)
    assert policy.victim(anyone) == 1
    admit(policy, 1, 2, 3)
    use(policy, 1)
    assert leave(policy) == [2, 3, 0, 1]


def test_sieve_moves_its_hand_over_marked_cells() -> None:
    """0 is marked: the hand clears it and evicts 1, then goes on to 2, not back to 0."""
    policy = Sieve(Setup(ONE, 3))
    admit(policy, 0, 1, 2)
    use(policy, 0)
    assert policy.victim(anyone) == 1
    admit(policy, 3)
    assert policy.victim(anyone) == 2
    assert policy.victim(lambda cell: cell != 3) == 0


TWO = RoutingShape(layers=2, experts=3, top_k=1)


def test_eamc_v1_evicts_by_the_sequence_and_prefetches_by_the_closest() -> None:
    """Two past sequences: A uses expert 0 in both layers, B expert 1 and then 2.

    The sequence has used expert 1 in layer 0: B is closest, and cell 3 + 2 is read ahead. The
    sequence has no tokens in layer 1, whose shares are then 1/3 each, times 1/2. Keys: layer 0
    [0, 1, 0] + ε, layer 1 [1/6, 1/6, 1/6] + ε/2.
    """
    past, none = Eamc(4, 2, 3), np.zeros((2, 3), int)
    past.add(none, np.array([[4, 0, 0], [4, 0, 0]]))
    past.add(none, np.array([[0, 4, 0], [0, 0, 4]]))
    policy = EamcV1(Setup(TWO, 6, past))
    policy.begin_pass(ROW, "decode")
    policy.routed(0, ids(1))
    assert policy.prefetch(9) == [Prefetch(5, False)]
    for cell in (0, 1, 4):
        policy.admitted(cell)
    assert leave(policy) == [0, 4, 1]


CHAIN = RoutingShape(layers=6, experts=4, top_k=1)


def run_chain(policy: Passive, tokens: int, last_layer: int = 6, hints: bool = False) -> int:
    """Decode tokens whose expert is the same in all layers, and drawn per token; return the last.

    The last token stops before `last_layer`.
    """
    random = np.random.default_rng(3)
    weights = np.ones((1, 1), np.float32)
    for token in range(tokens):
        expert = int(random.integers(4))
        policy.begin_pass(ROW, "decode")
        for layer in range(last_layer if token == tokens - 1 else 6):
            policy.routed(layer, ids(expert), weights)
            if hints and layer < 5:
                policy.hinted(layer + 1, ids(expert))
        if token < tokens - 1:
            policy.end_pass(None)
    return expert


@pytest.mark.parametrize(("kind", "ahead"), [(Markov, (1, 2)), (ProMoe, (2,)), (Fmoe, (3,))])
def test_a_predictor_learns_a_chain(kind: type[Passive], ahead: tuple[int, ...]) -> None:
    """After 200 tokens it knows which expert comes, in the layers that it looks at."""
    policy = kind(Setup(CHAIN, 24))
    expert = run_chain(policy, 200, last_layer=2)
    wanted = {(1 + far) * 4 + expert for far in ahead}
    assert {prefetch.cell for prefetch in policy.prefetch(9)} >= wanted
    for cell in range(24):
        policy.admitted(cell)
    order = leave(policy)
    others = [cell for cell in order if cell // 4 in {1 + far for far in ahead}]
    assert set(others[-len(wanted) :]) == wanted  # they leave after all others of their layers
    assert not isinstance(policy, Foresight) or policy.prefetch(1)


def test_promoe_trusts_a_gate_that_is_right() -> None:
    """A hint for layer 3 follows the prediction that layer 1 gave, and raises its chance."""
    policy = ProMoe(Setup(CHAIN, 24))
    expert = run_chain(policy, 40, last_layer=2)
    before = policy.keys[3 * 4 + expert]
    policy.hinted(3, ids(expert))
    assert policy.keys[3 * 4 + expert] > before
