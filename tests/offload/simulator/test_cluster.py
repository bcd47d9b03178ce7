"""Test the replay of many users on several replicas."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from moeinf.offload.replicas.route_keys import route_keys
from moeinf.offload.replicas.router import Router
from moeinf.offload.routing.requests_file import RecordedRequest, RecordedRequests
from moeinf.offload.routing.trace import RoutingShape
from moeinf.offload.simulator.clock import TimeModel
from moeinf.offload.simulator.cluster import Machine, Sums, run_cluster, service_seconds
from moeinf.offload.simulator.workload import BadWorkload, Conversation, Habits, Turn, draw

LAYERS, EXPERTS, TOP_K, BYTES = 2, 8, 2, 1 << 20
PROMPT, ANSWER = 4, 10
SECOND = TimeModel(ram_over_link=4.0, ram_bytes_per_s=4.0 * BYTES)  # an expert is read in a second
MACHINE = Machine("lru", 0.5, SECOND)


def two_kinds(count: int = 8) -> RecordedRequests:
    """Return requests of two kinds, which use different halves of the experts."""
    random, found = np.random.default_rng(0), []
    for number in range(count):
        first = 4 * (number % 2)
        ids = np.array(
            [
                [first + random.permutation(4)[:TOP_K] for _ in range(LAYERS)]
                for _ in range(PROMPT + ANSWER)
            ],
            np.uint8,
        )
        found.append(RecordedRequest("ab"[number % 2], PROMPT, ids, None))
    return RecordedRequests("two", RoutingShape(LAYERS, EXPERTS, TOP_K, 0, BYTES), found)


def talk(arrives_s: float, *recorded: int, name: str = "x", first: int = 0) -> Conversation:
    """Return a conversation whose turns have no pauses."""
    pieces, turns = list[str](), []
    for n, place in enumerate(recorded):
        pieces.append(f"{name} {n}")
        one = route_keys(first + n, pieces, name)
        turns.append(Turn(one, place, recorded[:n], 0.0))
    return Conversation(arrives_s, 0, tuple(turns))


def run(
    kind: str, conversations: list[Conversation], replicas: int, machine: Machine = MACHINE
) -> Sums:
    return run_cluster(two_kinds(), conversations, machine, Router(kind), replicas, 1.0)


def drawn(**habits: float) -> list[Conversation]:
    chosen = {"conversations": 120, "users": 40, **habits}
    return draw(two_kinds(), Habits(**chosen), 4, 10.0)  # type: ignore[arg-type]


def test_one_request_has_the_times_of_the_model() -> None:
    found = run("random", [talk(5.0, 0)], 1, replace(MACHINE, share=1.0))
    assert found.reads == found.replicas * 8  # of its kind's 8 experts, each once
    assert (found.tokens, found.events) == (ANSWER, ANSWER * LAYERS * TOP_K)
    assert found.waits_s == [0.0]
    # Computing an expert takes 1/4 s, 40 in decode; a prompt reads all 8 that are used.
    prompt = two_kinds().requests[0].prompt_ids
    used = sum(len(set(prompt[:, layer].ravel().tolist())) for layer in range(LAYERS))
    late = 8 - used  # reads during the answer
    assert found.hits == found.events - late
    assert found.busy_s[0] == pytest.approx(found.ended_s - 5.0)
    assert used + late + 40 / 4 <= found.busy_s[0] <= used + late + (40 + used) / 4


def test_a_queue_makes_requests_wait() -> None:
    both = [talk(0.0, 0, name="x"), talk(1.0, 2, name="y", first=10)]
    alone, together = run("prefix", both, 2), run("prefix", both, 1)
    assert alone.waits_s == [0.0, 0.0]
    assert together.waits_s[0] == 0.0
    assert together.waits_s[1] == pytest.approx(alone.busy_s[0] - 1.0)
    assert together.wait_s(1.0) == together.waits_s[1]


def test_a_turn_waits_for_the_answer_before_it() -> None:
    found = run("random", [talk(0.0, 0, 2, 4)], 1)
    assert found.waits_s == [0.0, 0.0, 0.0]
    assert found.busy_s[0] == pytest.approx(found.ended_s)


def test_history_is_computed_again_where_its_kv_is_not() -> None:
    conversations = [talk(1000.0 * n, 0, 2, name=str(n), first=10 * n) for n in range(20)]
    assert run("session", conversations, 4).recomputed == 0
    assert run("prefix", conversations, 4).recomputed == 0
    moved = run("random", conversations, 4).recomputed / (PROMPT + ANSWER)
    assert 10 <= moved <= 20  # of 20 second turns, three of four go elsewhere
    assert moved == int(moved)


def test_experts_send_each_kind_to_its_replica() -> None:
    """A cache that fits one kind hits all of it, if the other kind is sent elsewhere."""
    conversations = [
        Conversation(
            500.0 * n,
            0,
            (Turn(route_keys(n, [f"{n}", f"word{'ab'[n % 3 == 0]}"]), int(n % 3 == 0), (), 0.0),),
        )
        for n in range(60)
    ]
    hits = {kind: run(kind, conversations, 2) for kind in ("random", "experts")}
    decisions = hits["experts"].decisions
    assert decisions["experts"] > 40
    assert hits["experts"].reads < 0.6 * hits["random"].reads
    assert hits["experts"].hit_rate > hits["random"].hit_rate


def test_one_kind_of_request_loses_nothing() -> None:
    conversations = [talk(4.0 * n, 0, name=str(n), first=n) for n in range(60)]
    prefix, experts = (run(kind, conversations, 4) for kind in ("prefix", "experts"))
    assert experts.tokens_per_s >= 0.97 * prefix.tokens_per_s
    assert experts.imbalance < 1.5


def test_a_run_is_reproducible() -> None:
    one, two = (run("experts", drawn(), 3) for _ in range(2))
    assert one == two
    assert sum(one.decisions.values()) == len(one.waits_s) == sum(len(c.turns) for c in drawn())


def test_users_follow_zipf_and_prefer_their_kind() -> None:
    found = drawn(conversations=2000, zipf=1.0)
    users = Counter(one.user for one in found)
    assert users.most_common(1)[0][0] == 0
    expected = 2000 / sum(1 / n for n in range(1, 41))
    assert users[0] == pytest.approx(expected, rel=0.15)
    assert users[9] == pytest.approx(expected / 10, rel=0.4)
    kinds = [
        Counter(t.recorded % 2 for c in found if c.user == u for t in c.turns) for u in range(3)
    ]
    assert all(max(kind.values()) / sum(kind.values()) > 0.85 for kind in kinds)
    turns = [len(one.turns) for one in found]
    assert sum(turns) / len(turns) == pytest.approx(2.0, rel=0.1)


def test_arrivals_have_the_asked_rate_and_bursts() -> None:
    times = np.array([one.arrives_s for one in drawn(conversations=4000, load=0.5, burst=8)])
    assert len(times) / times[-1] == pytest.approx(0.5 * 4 / (10.0 * 2.0), rel=0.1)
    bursts = (times % 200.0 < 40.0).mean()  # a fifth of the time
    assert bursts == pytest.approx(8 / (8 + 4), abs=0.03)
    even = np.array([one.arrives_s for one in drawn(conversations=4000, burst=1)])
    assert (even % 200.0 < 40.0).mean() == pytest.approx(0.2, abs=0.03)


def test_words_tell_the_kind_as_much_as_asked() -> None:
    def shared(telling: float) -> float:
        turns = [turn for one in drawn(telling=telling, faithful=1.0) for turn in one.turns]
        kinds = [set[int](), set[int]()]
        for turn in turns:
            kinds[turn.recorded % 2].update(turn.keys.grams.tolist())
        return len(kinds[0] & kinds[1]) / len(kinds[0] | kinds[1])

    assert shared(1.0) == 0.0
    assert shared(0.0) > 0.1


def test_service_is_the_mean_time_of_a_turn() -> None:
    found = service_seconds(two_kinds(), MACHINE, [talk(0.0, 0, name=str(n)) for n in range(30)])
    prompt_and_answer = (ANSWER * LAYERS * TOP_K + 8) / 4
    assert prompt_and_answer - 2 < found < prompt_and_answer + 2


@pytest.mark.parametrize(
    "habits", [{"load": 0}, {"users": 0}, {"turns": 0.5}, {"telling": 1.5}, {"burst": 0.5}]
)
def test_a_figure_out_of_range_is_refused(habits: dict[str, float]) -> None:
    with pytest.raises(BadWorkload) as refused:
        drawn(**habits)
    assert refused.value.code == "bad_workload"
