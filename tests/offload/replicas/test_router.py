"""Test the ranks of the router."""

from __future__ import annotations

from collections import Counter

import numpy as np

from moeinf.offload.replicas.route_keys import RouteKeys, route_keys
from moeinf.offload.replicas.router import Candidate, Observed, Published, Router

LAW, CODE = np.array([[1, 1, 0, 0]]), np.array([[0, 0, 1, 1]])


def holds(number: int, *experts: int, prefixes: tuple[int, ...] = (), **rest: object) -> Published:
    resident = np.zeros(4, np.bool_)
    resident[list(experts)] = True
    return Published(number, resident, frozenset(prefixes), **rest)  # type: ignore[arg-type]


def first(router: Router, request: RouteKeys, candidates: list[Candidate]) -> tuple[str, str]:
    choice = router.choose(request, candidates)
    assert sorted(choice.order) == list(range(len(candidates)))
    return candidates[choice.order[0]].name, choice.reason


def taught() -> Router:
    """Return a router that has seen a request of each kind."""
    router = Router("experts", locality=0.02)
    law, code = route_keys(1, ["court law"]), route_keys(2, ["function code"])
    empty = [Candidate("a", 0), Candidate("b", 0)]
    for request in (law, code):
        router.choose(request, empty)
        router.sent(request, "a", "load")
    observed = (Observed(1, LAW), Observed(2, CODE))
    router.choose(
        route_keys(3, ["zebra"]), [Candidate("a", 0, holds(1, observed=observed)), empty[1]]
    )
    return router


def test_a_conversation_goes_on_where_its_prefix_is() -> None:
    router = Router("prefix")
    one = route_keys(1, ["system", "first"])
    here = [Candidate("a", 1), Candidate("b", 0)]
    router.sent(one, "a", "load")
    assert first(router, route_keys(2, ["system", "first", "second"]), here) == ("a", "prefix")
    assert first(router, route_keys(3, ["other"]), here) == ("b", "load")


def test_the_longest_prefix_wins_over_a_shared_system_prompt() -> None:
    router = Router("prefix")
    router.sent(route_keys(1, ["system", "mine"]), "b", "load")
    router.sent(route_keys(2, ["system", "yours"]), "a", "load")
    both = [Candidate("a", 0), Candidate("b", 1)]
    assert first(router, route_keys(3, ["system", "mine", "more"]), both) == ("b", "prefix")
    assert first(router, route_keys(4, ["system", "new"]), both)[1] == "load"  # both have as much


def test_an_overloaded_replica_is_passed_over() -> None:
    router = Router("prefix", band=1)
    router.sent(route_keys(1, ["first"]), "a", "load")
    again = route_keys(2, ["first", "second"])
    assert first(router, again, [Candidate("a", 1), Candidate("b", 0)]) == ("a", "prefix")
    assert first(router, again, [Candidate("a", 2), Candidate("b", 0)]) == ("b", "load")


def test_a_published_prefix_counts_and_an_old_one_is_forgotten() -> None:
    router = Router("prefix")
    one = route_keys(1, ["first"])
    again = route_keys(2, ["first", "second"])
    spare = Candidate("b", 0)
    published = holds(1, prefixes=one.prefixes)
    assert first(router, again, [Candidate("a", 1, published), spare]) == ("a", "prefix")
    assert first(router, again, [Candidate("a", 1, holds(2)), spare]) == ("b", "load")
    router.sent(one, "a", "load")  # after publication 2, so that 3 may lack it and 4 may not
    assert first(router, again, [Candidate("a", 1, holds(3)), spare]) == ("a", "prefix")
    assert first(router, again, [Candidate("a", 1, holds(4)), spare]) == ("b", "load")


def test_a_new_conversation_goes_where_its_experts_are() -> None:
    router = taught()
    both = [Candidate("a", 0, holds(2, 0, 1)), Candidate("b", 0, holds(2, 2, 3))]
    assert first(router, route_keys(4, ["a court"]), both) == ("a", "experts")
    assert first(router, route_keys(5, ["a function"]), both) == ("b", "experts")
    assert first(router, route_keys(6, ["unknown words"]), both)[1] == "load"
    assert router.decisions == Counter({"load": 2})  # those that were sent


def test_experts_do_not_win_over_the_load_band() -> None:
    router = taught()
    busy = [Candidate("a", 3, holds(2, 0, 1)), Candidate("b", 0, holds(2, 2, 3))]
    assert first(router, route_keys(4, ["a court"]), busy) == ("b", "load")


def test_of_equal_replicas_the_less_loaded_is_chosen() -> None:
    router = taught()
    three = [
        Candidate("a", 1, holds(2, 0, 1)),
        Candidate("b", 0, holds(2, 0, 1, 2)),
        Candidate("c", 0, holds(2, 3)),
    ]
    assert first(router, route_keys(4, ["a court"]), three) == ("b", "experts")


def test_the_real_eam_replaces_the_signature_of_a_conversation() -> None:
    router = taught()
    misleading = route_keys(4, ["a court"])
    both = [Candidate("a", 2, holds(2, 0, 1)), Candidate("b", 0, holds(2, 2, 3))]
    router.sent(misleading, "a", "load")
    after_prefill = holds(3, 0, 1, observed=(Observed(4, CODE, ended=False),))
    both = [Candidate("a", 2, after_prefill), Candidate("b", 0, holds(3, 2, 3)), Candidate("c", 0)]
    more = route_keys(5, ["a court", "more"])
    assert first(router, more, both) == ("b", "experts")
    signature = router.signature(more)
    assert signature is not None
    np.testing.assert_allclose(signature, [0, 0, 0.5, 0.5])


def test_a_replica_that_has_the_model_is_preferred() -> None:
    router = Router("experts")
    both = [Candidate("a", 0, loaded=False), Candidate("b", 1)]
    assert first(router, route_keys(1, ["x"]), both) == ("b", "load")
    both = [Candidate("a", 0, loaded=False), Candidate("b", 2)]
    assert first(router, route_keys(1, ["x"]), both) == ("a", "load")


def test_a_session_stays_when_another_replica_leaves() -> None:
    router = Router("session")
    four = [Candidate(name, 0) for name in "abcd"]
    places = {n: first(router, route_keys(n, ["x"], str(n)), four)[0] for n in range(200)}
    assert min(Counter(places.values()).values()) > 30
    left = [one for one in four if one.name != "c"]
    for n, name in places.items():
        assert name == "c" or first(router, route_keys(n, ["x"], str(n)), left)[0] == name


def test_random_spreads_and_is_reproducible() -> None:
    four = [Candidate(name, 0) for name in "abcd"]
    runs = []
    for router in (Router("random", 1), Router("random", 1), Router("random", 2)):
        runs.append([first(router, route_keys(n, []), four)[0] for n in range(200)])
    assert runs[0] == runs[1] != runs[2]
    assert min(Counter(runs[0]).values()) > 30


def test_two_choices_take_the_less_loaded() -> None:
    router = Router("prefix", band=5)
    loads = [Candidate(name, load) for name, load in zip("abc", (0, 3, 5), strict=True)]
    found = Counter(first(router, route_keys(n, [str(n)]), loads)[0] for n in range(90))
    assert found["c"] == 0  # it is the more loaded one of every pair
    assert found["a"] > found["b"] > 0
