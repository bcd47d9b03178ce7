"""Replay the requests of many users on several replicas behind a router.

A replica is a Replay, with slots and a policy of its own, that answers one request at a time. The
router is the one that a cluster uses (offload/replicas/router.py). It sees the load at once, and
the rest as it was at the last publication. A turn whose conversation's KV is elsewhere computes
the history again, with the routing that was recorded for it.

No number here is measured on a machine: clock.py has the model of time.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from moeinf.offload.policy.table import POLICIES
from moeinf.offload.replicas.router import Candidate, Observed, Published, Router
from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.routing.requests_file import RecordedRequests
from moeinf.offload.routing.trace import Pass, Phase, Recording
from moeinf.offload.simulator.clock import TimeModel
from moeinf.offload.simulator.replay import Conditions, Replay
from moeinf.offload.simulator.workload import Conversation, Turn

_CALIBRATION_TURNS = 30


@dataclass(frozen=True)
class Machine:
    """One replica: the policy of its cache, the share of all experts that fit, its times.

    kept: the conversations whose KV it holds.
    """

    policy: str
    share: float
    time: TimeModel = field(default_factory=TimeModel)
    kept: int = 64


@dataclass
class Sums:
    """The sums of one run of the cluster. waits_s: of each turn, from its arrival to its start."""

    replicas: int
    expert_bytes: int
    waits_s: list[float] = field(default_factory=list)
    events: int = 0  # of decode passes
    hits: int = 0
    asked: int = 0  # experts by the layers of each pass, prompts included
    tokens: int = 0  # decoded
    reads: int = 0  # experts, prompts included
    recomputed: int = 0  # tokens of history whose KV was elsewhere
    busy_s: list[float] = field(default_factory=list)  # of each replica
    ended_s: float = 0.0
    decisions: dict[str, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.events)

    @property
    def bytes_read_per_token(self) -> float:
        """Bytes of experts read, for prompts and answers, per decoded token."""
        return self.reads * self.expert_bytes / max(1, self.tokens)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(1e-9, self.ended_s)

    @property
    def imbalance(self) -> float:
        """The busiest replica's time ÷ the mean of all; 1: equal."""
        return max(self.busy_s) / max(1e-9, sum(self.busy_s) / len(self.busy_s))

    def wait_s(self, share: float) -> float:
        """Return the quantile of the waiting times."""
        return float(np.quantile(self.waits_s, share)) if self.waits_s else 0.0


class _Replica(Replay):
    """A Replay that takes turns from a queue, and counts every read."""

    def __init__(self, name: str, machine: Machine, requests: RecordedRequests) -> None:
        shape = machine.time.sized(requests.shape)
        slots = max(1, round(machine.share * shape.layers * shape.experts))
        super().__init__(
            Recording(name, shape),
            POLICIES[machine.policy],
            Conditions(slots, machine.time),
            Eamc.automatic(shape.layers, shape.experts),
        )
        self.name, self.reads, self.recomputed, self.busy_s = name, 0, 0, 0.0
        self.asked, self._kept = 0, machine.kept
        self.queue: deque[tuple[Turn, float, Conversation, int]] = deque()  # with its arrival
        self._requests = requests
        self._passes: Iterator[Pass] | None = None
        self._held: OrderedDict[int, None] = OrderedDict()  # prefixes whose KV is here
        self._observed: list[Observed] = []
        self._published = 0

    @property
    def now(self) -> float:
        return self._now

    @property
    def load(self) -> int:
        return len(self.queue)

    def wait_until(self, now: float) -> None:
        """Be idle until `now`, unless it is past."""
        self._now = max(self._now, now)

    def publish(self) -> Published:
        """Return the state of now, and what was observed since the last publication."""
        resident = np.zeros(self._shape.layers * self._shape.experts, np.bool_)
        resident[list(self._resident)] = True
        observed, self._observed = tuple(self._observed), []
        self._published += 1
        return Published(self._published, resident, frozenset(self._held), observed)

    def advance(self) -> float | None:
        """Run the next pass of the first turn; return its waiting time if it begins now."""
        turn, arrived_s, _, _ = self.queue[0]
        waited = None
        if self._passes is None:
            self._passes, waited = self._passes_of(turn), self._now - arrived_s
        running = next(self._passes, None)
        if running is None:
            self._passes = None
            return waited
        before = self._now
        self.step(running)
        self.busy_s += self._now - before
        if running.phase == "prefill":
            observed = running.eam(self._shape.experts, running.accepted)
            self._observed.append(Observed(turn.keys.number, observed, ended=False))
        return waited

    @property
    def between(self) -> bool:
        """True while no turn is being answered."""
        return self._passes is None

    def end_turn(self) -> tuple[Conversation, int]:
        """Take the first turn, which has ended, from the queue; return where it belongs."""
        turn, _, conversation, place = self.queue.popleft()
        eam = self.end_request(turn.keys.number)
        if eam is not None:
            both = eam.prefill + eam.decode
            self._observed.append(Observed(turn.keys.number, both))
        for digest in turn.keys.prefixes:
            self._held[digest] = None
            self._held.move_to_end(digest)
        while len(self._held) > self._kept:
            self._held.popitem(last=False)
        return conversation, place

    def _passes_of(self, turn: Turn) -> Iterator[Pass]:
        """Yield the passes of a turn: what its KV lacks in one, then token by token."""
        requests, number = self._requests.requests, turn.keys.number
        wanted = requests[turn.recorded]
        held = 0  # turns of the history whose KV is here
        for count, digest in enumerate(turn.keys.prefixes[:-1], 1):
            held = count if digest in self._held else held
        lacking = [requests[place].ids for place in turn.history[held:]]
        self.recomputed += sum(len(ids) for ids in lacking)
        prompt = np.concatenate([*lacking, wanted.prompt_ids])
        if len(prompt):
            yield _pass(prompt, number, "prefill")
        for token in wanted.decode_ids:
            yield _pass(token[None], number, "decode")

    def _layer(self, layer: int, cells: list[int]) -> None:
        self.asked += len(cells)
        super()._layer(layer, cells)

    def _read(self) -> None:
        super()._read()
        self.reads += 1


def _pass(ids: np.ndarray, number: int, phase: Phase) -> Pass:
    """Return tokens [T, L, K] as one pass."""
    rows = np.full(len(ids), number, np.int64)
    return Pass(phase, rows, ids.transpose(1, 0, 2).astype(np.int16), np.ones(len(ids), np.bool_))


def service_seconds(
    requests: RecordedRequests, machine: Machine, conversations: list[Conversation]
) -> float:
    """Return the mean time of a turn on one replica, one after the other, in a random order."""
    replica = _Replica("calibration", machine, requests)
    turns = [(turn, one, n) for one in conversations for n, turn in enumerate(one.turns)]
    rng = np.random.default_rng(0)
    chosen = rng.permutation(len(turns))[:_CALIBRATION_TURNS]
    for place in chosen:
        turn, conversation, n = turns[place]
        replica.queue.append((turn, 0.0, conversation, n))
        replica.advance()
        while not replica.between:
            replica.advance()
        replica.end_turn()
    return replica.busy_s / max(1, len(chosen))


def run_cluster(
    requests: RecordedRequests,
    conversations: list[Conversation],
    machine: Machine,
    router: Router,
    replicas: int,
    publish_s: float,
    progress: Callable[[int], None] = lambda _turns: None,
) -> Sums:
    """Serve all conversations; return the sums. publish_s: between publications, model time."""
    cluster = [_Replica(f"replica-{n}", machine, requests) for n in range(replicas)]
    published: dict[str, Published] = {}
    publish_at = 0.0
    sums = Sums(replicas, cluster[0].outcome.expert_bytes)
    arrivals = [(one.arrives_s, place, 0) for place, one in enumerate(conversations)]
    heapq.heapify(arrivals)
    busy: list[tuple[float, int]] = []  # the clock of each replica that has turns, and its place
    while arrivals or busy:
        if busy and (not arrivals or busy[0][0] < arrivals[0][0]):
            place = heapq.heappop(busy)[1]
            replica = cluster[place]
            waited = replica.advance()
            if waited is not None:
                sums.waits_s.append(waited)
            if replica.between:
                conversation, turn = replica.end_turn()
                progress(1)
                if turn + 1 < len(conversation.turns):
                    at = replica.now + conversation.turns[turn + 1].think_s
                    heapq.heappush(arrivals, (at, conversations.index(conversation), turn + 1))
            if replica.queue:
                heapq.heappush(busy, (replica.now, place))
            continue
        now, number, turn = heapq.heappop(arrivals)
        if now >= publish_at:
            published = {replica.name: replica.publish() for replica in cluster}
            publish_at = now + publish_s
        conversation = conversations[number]
        keys = conversation.turns[turn].keys
        candidates = [Candidate(r.name, r.load, published.get(r.name)) for r in cluster]
        choice = router.choose(keys, candidates)
        place = choice.order[0]
        replica = cluster[place]
        router.sent(keys, replica.name, choice.reason)
        if not replica.queue:
            replica.wait_until(now)
            heapq.heappush(busy, (replica.now, place))
        replica.queue.append((conversation.turns[turn], now, conversation, turn))
    for replica in cluster:
        tokens = replica.outcome.tokens
        sums.events += sum(token.events for token in tokens)
        sums.hits += sum(token.hits for token in tokens)
        sums.tokens += replica.outcome.rows
        sums.reads += replica.reads
        sums.asked += replica.asked
        sums.recomputed += replica.recomputed
        sums.busy_s.append(replica.busy_s)
        sums.ended_s = max(sums.ended_s, replica.now)
    sums.decisions = dict(router.decisions)
    return sums
