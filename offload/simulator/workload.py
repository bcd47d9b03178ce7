"""Draw the requests of many users from a file of recorded requests, with times of arrival.

A user prefers one kind of request (its label). The users' activity follows Zipf's law. A
conversation has one turn or more; a turn is sent when the one before has been answered and read.
Conversations arrive in bursts: a fifth of the time has `burst` times the rate of the rest.

The recordings have no texts. A prompt's words are drawn: a share `telling` from the vocabulary of
its kind, the others from one that all kinds share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moeinf.errors import InvalidInput
from moeinf.offload.replicas.route_keys import RouteKeys, grams, prefixes
from moeinf.offload.routing.requests_file import RecordedRequests

_BURST_SHARE = 0.2  # of the time
_PERIOD = 20  # service times from one burst to the next
_OWN_WORDS, _COMMON_WORDS = 200, 5000  # sizes of the vocabularies
_WORDS = 60  # of a turn
_MOST_TURNS = 8


class BadWorkload(InvalidInput, ValueError):
    """A figure of a workload is out of range."""

    code = "bad_workload"
    hint = "`moeinf simulate --help`"


@dataclass(frozen=True)
class Habits:
    """How users ask. load: offered work ÷ capacity. faithful: a user's share of its own kind."""

    conversations: int = 200
    users: int = 40
    zipf: float = 1.0
    turns: float = 2.0  # mean of a conversation
    burst: float = 4.0  # rate in a burst ÷ rate between bursts; 1: none
    load: float = 0.6
    faithful: float = 0.9
    telling: float = 0.3
    think: float = 2.0  # mean time between an answer and the next turn, in service times
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("conversations", self.conversations, 1, 1 << 20),
            ("users", self.users, 1, 1 << 20),
            ("zipf", self.zipf, 0, 10),
            ("turns", self.turns, 1, _MOST_TURNS),
            ("burst", self.burst, 1, 1000),
            ("load", self.load, 0.01, 100),
            ("faithful", self.faithful, 0, 1),
            ("telling", self.telling, 0, 1),
            ("think", self.think, 0, 1e6),
        ):
            if not least <= value <= most:
                raise BadWorkload(f"{name} must be from {least} to {most}, got {value}")


@dataclass(frozen=True)
class Turn:
    """One request. recorded: its place in the file. history: those of the turns before it.

    think_s: the time after the answer before it, or after its conversation's arrival.
    """

    keys: RouteKeys
    recorded: int
    history: tuple[int, ...]
    think_s: float


@dataclass(frozen=True)
class Conversation:
    """The turns of one conversation, and when its first one arrives, in seconds."""

    arrives_s: float
    user: int
    turns: tuple[Turn, ...]


def draw(
    requests: RecordedRequests, habits: Habits, replicas: int, service_s: float
) -> list[Conversation]:
    """Draw conversations for so many replicas that take `service_s` for a mean turn."""
    rng = np.random.default_rng(habits.seed)
    kinds = sorted({one.label.partition(":")[0] for one in requests.requests})
    of_kind = {
        kind: [n for n, one in enumerate(requests.requests) if one.label.partition(":")[0] == kind]
        for kind in kinds
    }
    own = rng.integers(len(kinds), size=habits.users)
    share = np.arange(1, habits.users + 1, dtype=np.float64) ** -habits.zipf
    rate = habits.load * replicas / (service_s * habits.turns)
    times = _arrivals(rng, habits, rate, service_s * _PERIOD)
    found, number = list[Conversation](), 0
    for place in range(habits.conversations):
        user = int(rng.choice(habits.users, p=share / share.sum()))
        turns, pieces, history = list[Turn](), list[str](), list[int]()
        for turn in range(min(_MOST_TURNS, int(rng.geometric(1 / habits.turns)))):
            alien = rng.random() >= habits.faithful
            kind = kinds[int(rng.integers(len(kinds)) if alien else own[user])]
            recorded = of_kind[kind][int(rng.integers(len(of_kind[kind])))]
            words = _words(rng, kind, habits.telling)
            pieces.append(f"{place} {' '.join(words)}")
            keys = RouteKeys(number, prefixes(pieces), grams(words), str(place))
            think_s = float(rng.exponential(habits.think)) * service_s if turn else 0.0
            turns.append(Turn(keys, recorded, tuple(history), think_s))
            history.append(recorded)
            number += 1
        found.append(Conversation(next(times), user, tuple(turns)))
    return found


def _arrivals(
    rng: np.random.Generator, habits: Habits, rate: float, period_s: float
) -> Iterator[float]:
    """Yield times of a Poisson process whose mean rate is `rate`, and that has bursts."""
    quiet = rate / (_BURST_SHARE * habits.burst + 1 - _BURST_SHARE)
    now = 0.0
    while True:  # thinning: draw at the highest rate, keep what the rate of the moment has
        now += float(rng.exponential(1 / (quiet * habits.burst)))
        bursts = now % period_s < _BURST_SHARE * period_s
        if bursts or rng.random() < 1 / habits.burst:
            yield now


def _words(rng: np.random.Generator, kind: str, telling: float) -> list[str]:
    own = rng.random(_WORDS) < telling
    numbers = np.where(
        own, rng.integers(_OWN_WORDS, size=_WORDS), rng.integers(_COMMON_WORDS, size=_WORDS)
    )
    return [f"{kind}{n}" if mine else f"w{n}" for mine, n in zip(own, numbers, strict=True)]
