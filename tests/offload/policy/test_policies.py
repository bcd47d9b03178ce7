"""Every policy against sequences worked by hand: who leaves, who stays, what is read ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeinf.offload.policy.adaptive import Adaptive, AdaptiveKnobs
from moeinf.offload.policy.base import Policy, Prefetch, Setup
from moeinf.offload.policy.belady import Belady
from moeinf.offload.policy.eamc import EamcKnobs, EamcPolicy
from moeinf.offload.policy.lfu import Lfu
from moeinf.offload.policy.lru import Lru
from moeinf.offload.policy.table import POLICIES
from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.routing.trace import RoutingShape

ONE = RoutingShape(layers=1, experts=6, top_k=1)
ROW = np.zeros(1, np.int64)


def anyone(_cell: int) -> bool:
    return True


def ids(*experts: int) -> np.ndarray:
    return np.array([experts])


def use(policy: Policy, *cells: int) -> None:
    """Run one decode pass per cell of the only layer."""
    for cell in cells:
        policy.begin_pass(ROW, "decode")
        policy.routed(0, ids(cell))
        policy.end_pass(None)


def admit(policy: Policy, *cells: int) -> None:
    for cell in cells:
        use(policy, cell)
        policy.admitted(cell)


def leave(policy: Policy, evictable: Callable[[int], bool] = anyone) -> list[int]:
    """Evict until no cell may leave; return the victims in order."""
    gone = []
    while (victim := policy.victim(evictable)) is not None:
        gone.append(victim)
    return gone


def test_lru_evicts_by_last_use() -> None:
    policy = Lru(Setup(ONE, 3))
    admit(policy, 1, 2, 3)
    use(policy, 1)
    assert leave(policy, lambda cell: cell != 2) == [3, 1]
    assert leave(policy) == [2]
    assert policy.insertions == 3


def test_lfu_evicts_by_uses_then_age_and_remembers_the_absent() -> None:
    policy = Lfu(Setup(ONE, 3))
    use(policy, 4, 4)
    admit(policy, 1, 2, 3, 4)  # 4 has three uses, the others one
    use(policy, 1)
    assert leave(policy) == [2, 3, 1, 4]


def test_lfu_counts_no_further_than_its_keys_reach() -> None:
    policy = Lfu(Setup(ONE, 2))
    admit(policy, 1, 2)
    policy._keys[1] += (1 << 63) - (2 << 40) - (1 << 40)  # 2^23 uses, but for two
    for _ in range(4):
        use(policy, 1)
    assert policy._keys[1] > 0
    assert leave(policy) == [2, 1]


def test_belady_evicts_what_is_needed_last() -> None:
    """Future 1 2 3 1 2: with 1 and 2 resident, 3 is never needed again and leaves at once."""
    policy = Belady(Setup(ONE, 2), [(0, ids(e)) for e in (1, 2, 3, 1, 2)])
    for cell in (1, 2, 3):
        policy.routed(0, ids(cell))
        policy.admitted(cell)
    assert leave(policy) == [3, 2, 1]


# Two past requests of a model of 2 layers x 3 experts: A and B decode in different places.
TWO = RoutingShape(layers=2, experts=3, top_k=1)
NONE = np.zeros((2, 3), int)


def past() -> Eamc:
    eamc = Eamc(4, 2, 3)
    eamc.add(np.array([[4, 0, 0], [4, 0, 0]]), np.array([[4, 0, 0], [3, 1, 0]]))
    eamc.add(np.array([[0, 4, 0], [0, 4, 0]]), np.array([[0, 4, 0], [0, 1, 3]]))
    return eamc


def test_eamc_evicts_and_prefetches_what_the_match_says() -> None:
    """Compare with a count by hand.

    Layer 0 routed expert 0: entry A. P = [[1, 0, 0], [3/4, 1/4, 0]], ε = 1/8, L = 2.
    Keys (P + ε)(1 - i/L): layer 0 [9/8, 1/8, 1/8], layer 1 [7/16, 3/16, 1/16].
    Ahead: layer 1 weighs 1 - 1/2: experts 0 and 1, [3/8, 1/8]; expert 2 has nothing.
    """
    policy = EamcPolicy(Setup(TWO, 6, past()), EamcKnobs(epsilon=1 / 8))
    policy.begin_pass(ROW, "decode")
    policy.routed(0, ids(0))
    assert policy.prefetch(9) == [Prefetch(3, False), Prefetch(4, False)]
    for cell in range(6):
        policy.admitted(cell)
    assert policy.prefetch(9) == []
    assert leave(policy, lambda cell: cell != 5) == [1, 2, 4, 3, 0]
    assert leave(policy) == [5]


def test_eamc_starts_decoding_from_what_prefill_was_like() -> None:
    """Prefill like B predicts B's decode rows before any decode layer has run."""
    policy = EamcPolicy(Setup(TWO, 6, past()))
    policy.begin_pass(ROW, "prefill")
    for layer in (0, 1):
        policy.routed(layer, np.array([[1], [1]]))
    policy.end_pass(None)
    policy.begin_pass(ROW, "decode")
    assert policy.prefetch(2) == [Prefetch(1, False)]  # the last layer is L away and weighs nothing


def test_eamc_sums_over_active_requests() -> None:
    """Row 0 is like A, row 1 like B: layer 1 is the mean of [3/4, 1/4, 0] and [0, 1/4, 3/4]."""
    policy = EamcPolicy(Setup(TWO, 6, past()))
    policy.begin_pass(np.array([7, 8]), "decode")
    policy.routed(0, np.array([[0], [1]]))
    assert sorted(prefetch.cell for prefetch in policy.prefetch(9)) == [3, 4, 5]


def test_eamc_drops_encoder_rows_once_decoding() -> None:
    shape = RoutingShape(layers=2, experts=3, top_k=1, encoder_layers=1)
    policy = EamcPolicy(Setup(shape, 6, past()))
    policy.begin_pass(ROW, "decode")
    policy.routed(1, ids(2))
    for cell in (0, 3, 4, 5):
        policy.admitted(cell)
    assert leave(policy)[0] == 0


def test_adaptive_admits_only_what_is_surely_better() -> None:
    """The least kept expert leaves for one that is used more.

    4 slots, of which one is for staging. 0, 1, 2 are used often; 3 once: it stays staged and
    leaves first. Used more than the least kept one, it takes that one's place.
    """
    policy = Adaptive(Setup(ONE, 4))
    admit(policy, 0, 1, 2)
    use(policy, 0, 1, 2, 0, 1, 2)
    admit(policy, 3)
    assert policy.insertions == 3
    assert not policy.keeps(5)
    assert policy.victim(anyone) == 3
    policy.admitted(3)
    use(policy, 3, 3, 3, 3)  # settles when it is routed
    assert policy.insertions == 4
    assert policy.victim(anyone) == 0  # the loser is staged now


def test_adaptive_keeps_what_users_of_other_passes_will_use() -> None:
    """Requests 7 and 8 decode in turn, like A and like B; what A used matters until 7 has ended."""
    policy = Adaptive(Setup(TWO, 6, past()), AdaptiveKnobs(matches=1))
    for request, expert in ((7, 0), (8, 1)):
        policy.begin_pass(np.array([request, request]), "prefill")
        for layer in (0, 1):
            policy.routed(layer, np.array([[expert], [expert]]))
        policy.end_pass(None)
    policy.begin_pass(np.array([8]), "decode")
    assert policy.core.past.ravel().tolist() == [1, 1, 0, 0.75, 0.5, 0.75]
    policy.end_request(7)
    policy.begin_pass(np.array([8]), "decode")
    assert policy.core.past.ravel().tolist() == [0, 1, 0, 0, 0.25, 0.75]


def test_adaptive_protects_hints_and_asks_for_them() -> None:
    shape = RoutingShape(layers=2, experts=4, top_k=1)
    policy = Adaptive(Setup(shape, 3))
    policy.begin_pass(ROW, "decode")
    policy.routed(0, ids(0))
    policy.admitted(5)
    policy.admitted(0)
    policy.hinted(1, ids(1, 2))
    assert list(policy.prefetch(4)) == [Prefetch(6, True)]
    assert policy.victim(anyone) == 0
    assert policy.victim(anyone) == 5  # nothing else is left: a hint never blocks
    policy.routed(1, ids(2))
    assert list(policy.prefetch(4)) == []


def test_adaptive_stops_listening_to_a_gate_that_is_wrong() -> None:
    shape = RoutingShape(layers=2, experts=4, top_k=1)
    policy = Adaptive(Setup(shape, 2))
    asked = []
    for _ in range(60):
        policy.begin_pass(ROW, "decode")
        policy.routed(0, ids(0))
        policy.hinted(1, ids(2))
        asked.append(len([prefetch for prefetch in policy.prefetch(4) if prefetch.urgent]))
        policy.routed(1, ids(3))
        policy.end_pass(None)
    assert asked[0] == 1
    assert asked[-1] == 0


def events() -> st.SearchStrategy[list[tuple[int, int]]]:
    return st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7)), max_size=60)


@pytest.mark.parametrize("name", [*POLICIES, "belady"])
@settings(max_examples=40, deadline=None)
@given(events(), st.integers(1, 9))
def test_a_victim_is_resident_allowed_and_told_once(
    name: str, trace: list[tuple[int, int]], slots: int
) -> None:
    """Against a plain set, for any sequence of uses."""
    shape = RoutingShape(layers=3, experts=8, top_k=1)
    setup = Setup(shape, slots, Eamc(4, 3, 8))
    future: Iterable[tuple[int, np.ndarray]] = [(layer, ids(e)) for layer, e in trace]
    policy: Policy = Belady(setup, future) if name == "belady" else POLICIES[name](setup)
    resident: set[int] = set()
    for layer, expert in trace:
        cell = layer * 8 + expert
        policy.begin_pass(ROW, "decode")
        policy.routed(layer, ids(expert))
        policy.hinted((layer + 1) % 3, ids(expert))
        if cell not in resident:
            if len(resident) == slots:
                pinned = max(resident)
                victim = policy.victim(lambda c, p=pinned: c != p)
                assert (victim is None) == (resident == {pinned})
                victim = policy.victim(anyone) if victim is None else victim
                assert victim in resident
                resident.remove(victim)
            policy.admitted(cell)
            resident.add(cell)
        assert all(prefetch.cell not in resident for prefetch in policy.prefetch(4))
        policy.end_pass(None)
    assert sorted(leave(policy)) == sorted(resident)


@pytest.mark.parametrize("name", [*POLICIES, "belady"])
def test_a_forgotten_cell_is_no_victim_until_it_is_admitted_again(name: str) -> None:
    """Kept, staged, hinted or never admitted: the others' order does not change."""
    setup = Setup(RoutingShape(layers=2, experts=8, top_k=1), 6, Eamc(4, 2, 8))

    def filled() -> Policy:
        policy: Policy = Belady(setup, []) if name == "belady" else POLICIES[name](setup)
        policy.begin_pass(ROW, "decode")
        for cell in range(6):
            if name != "belady":
                policy.routed(0, ids(cell))
            policy.admitted(cell)
        policy.hinted(1, ids(1))
        policy.admitted(9)
        return policy

    expected = leave(filled())
    assert sorted(expected) == [*range(6), 9]
    policy = filled()
    policy.forget([2, 9, 7])
    assert leave(policy) == [cell for cell in expected if cell not in (2, 9)]
    policy.admitted(9)
    policy.forget([])
    assert leave(policy) == [9]


@pytest.mark.parametrize("name", ["eamc", "adaptive", "learned"])
def test_an_encoder_that_has_run_leaves_first(name: str) -> None:
    """The encoder's experts leave first.

    Layer 0 is the encoder's. Its expert 0 was used most, by every row of the source. After the
    decoder's prompt has begun, both of its experts leave before those of the decoder, used or not.
    For the next source their use counts again.
    """
    shape = RoutingShape(layers=2, experts=3, top_k=1, encoder_layers=1)
    policy = POLICIES[name](Setup(shape, 6))

    def read_source() -> None:
        policy.begin_pass(np.zeros(8, np.int64), "encode")
        policy.routed(0, np.array([[0]] * 7 + [[1]]))
        policy.end_pass(None)

    read_source()
    for cell in (0, 1):
        policy.admitted(cell)
    for phase, expert in (("prefill", 2), ("decode", 1)):
        policy.begin_pass(ROW, phase)  # type: ignore[arg-type]
        policy.routed(1, ids(expert))
        policy.admitted(3 + expert)
        policy.end_pass(None)
    policy.admitted(3)  # never used
    order = leave(policy)
    assert set(order[:2]) == {0, 1}
    assert set(order[2:]) == {3, 4, 5}
    for cell in (0, 3):
        policy.admitted(cell)
    read_source()
    assert leave(policy)[0] == 3
