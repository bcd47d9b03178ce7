"""Choose the replica that answers a request, in ranks.

    (a) prefix    the replica that holds the longest prefix of the prompt
    (b) experts   else the replica with the largest expected hit rate for the prompt's signature
    (c) load      else the less loaded of two replicas drawn at random (power of two choices)

Ranks (a) and (b) choose only within the load band: among replicas that have at most `band` requests
more than the least loaded one. `session` and `random` ignore the load.

Does not know the time, or how a request reaches a replica. A signature comes from n-grams
(signatures.py). After a replica has published the EAM of a request, later turns of its conversation
use that EAM.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.replicas.names import RouterName
from moeinf.offload.replicas.route_keys import RouteKeys
from moeinf.offload.replicas.signatures import Signatures
from moeinf.offload.routing.eamc import normalised
from moeinf.offload.routing.trace import Eam

BAND = 1  # requests
LOCALITY = 0.02  # expected hit rates that are this close count as equal
LEAST_SHARE = 0.1  # of the prompt's prefixes that rank (a) has to find
MOST_PREFIXES = 1 << 14  # remembered per replica
MOST_REQUESTS = 1 << 12  # whose EAM is awaited
MOST_CONVERSATIONS = 1 << 12  # whose EAM is kept

Reason = Literal["random", "session", "prefix", "experts", "load"]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Observed:
    """The EAM [L, E] of the request with this RouteKeys.number, so far or at its end."""

    number: int
    eam: Eam
    ended: bool = True


@dataclass(frozen=True)
class Published:
    """A publication of one replica about one model.

    number: grows with each publication. resident [L·E]: the experts that are in memory. prefixes:
    digests of the prompts whose KV it holds. observed: requests since the last publication, after
    their prefill or at their end.
    """

    number: int
    resident: NDArray[np.bool_]
    prefixes: frozenset[int] = frozenset()
    observed: tuple[Observed, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """A replica that may answer. load: its requests, running and waiting. loaded: the model is."""

    name: str
    load: int
    published: Published | None = None
    loaded: bool = True


@dataclass(frozen=True)
class Choice:
    """The places of the candidates, best first, and the rank that decided the first one."""

    order: tuple[int, ...]
    reason: Reason


class _Held:
    """The prefixes of one replica: those published, and those sent there since."""

    def __init__(self) -> None:
        self.number = -1
        self._published: frozenset[int] = frozenset()
        self._sent: OrderedDict[int, int] = OrderedDict()  # digest -> publication at that time

    def update(self, published: Published) -> None:
        """Replace what was published; forget what was sent before the publication before."""
        if published.number == self.number:
            return
        self.number, self._published = published.number, published.prefixes
        while self._sent and next(iter(self._sent.values())) < published.number - 1:
            self._sent.popitem(last=False)

    def sent(self, prefixes: Sequence[int]) -> None:
        """Remember the prefixes of a request that goes there."""
        for digest in prefixes:
            self._sent[digest] = self.number
            self._sent.move_to_end(digest)
        while len(self._sent) > MOST_PREFIXES:
            self._sent.popitem(last=False)

    def longest(self, prefixes: Sequence[int]) -> int:
        """Return the number of leading prefixes up to the longest that is held; 0: none."""
        for count in range(len(prefixes), 0, -1):
            if prefixes[count - 1] in self._published or prefixes[count - 1] in self._sent:
                return count
        return 0


class Router:
    """Routes the requests for one model. Seeded, so reproducible."""

    def __init__(
        self,
        kind: RouterName = "experts",
        seed: int = 0,
        band: int = BAND,
        locality: float = LOCALITY,
    ) -> None:
        self.kind, self._band, self._locality = kind, band, locality
        self._draw = Random(seed)
        self._held: dict[str, _Held] = {}
        self._waiting: OrderedDict[int, RouteKeys] = OrderedDict()  # for their EAM
        self._eams: OrderedDict[int, Floats] = OrderedDict()  # of conversations, by prefix
        self.signatures: Signatures | None = None
        self.decisions: Counter[str] = Counter()

    def choose(self, keys: RouteKeys, candidates: Sequence[Candidate]) -> Choice:
        """Return the candidates in order, best first. The caller tells `sent` which one took it."""
        assert candidates, "a request needs a replica"
        self._take_in(candidates)
        return self._chosen(keys, candidates)

    def sent(self, keys: RouteKeys, name: str, reason: Reason) -> None:
        """Note that a replica has taken a request, and count what decided it."""
        self.decisions[reason] += 1
        if self.kind in ("prefix", "experts"):
            self._held.setdefault(name, _Held()).sent(keys.prefixes)
        if self.kind == "experts":
            self._waiting[keys.number] = keys
            if len(self._waiting) > MOST_REQUESTS:
                self._waiting.popitem(last=False)

    def signature(self, keys: RouteKeys) -> Floats | None:
        """Return the expected share of each expert in its layer's uses, [L·E]; None: unknown."""
        for digest in reversed(keys.prefixes):
            if digest in self._eams:
                return self._eams[digest]
        return None if self.signatures is None else self.signatures.predict(keys.grams)

    def _take_in(self, candidates: Sequence[Candidate]) -> None:
        """Learn from new publications, and forget replicas that are no longer there."""
        names = {one.name for one in candidates}
        if len(self._held) > 4 * len(names):
            self._held = {name: held for name, held in self._held.items() if name in names}
        for one in candidates:
            published = one.published
            held = self._held.setdefault(one.name, _Held())
            if published is None or published.number == held.number:
                continue
            held.update(published)
            for observed in published.observed:
                self._learn(observed.number, observed.eam, observed.ended)

    def _learn(self, number: int, eam: Eam, ended: bool) -> None:
        keys = self._waiting.pop(number, None) if ended else self._waiting.get(number)
        if keys is None or not eam.any():
            return
        if self.signatures is None or self.signatures.shape != eam.shape:
            self.signatures = Signatures(*eam.shape)
            self._eams.clear()
        if ended:
            self.signatures.learn(keys.grams, eam)
        if keys.prefixes:
            self._eams[keys.prefixes[-1]] = normalised(eam).ravel()
            self._eams.move_to_end(keys.prefixes[-1])
        if len(self._eams) > MOST_CONVERSATIONS:
            self._eams.popitem(last=False)

    def _chosen(self, keys: RouteKeys, candidates: Sequence[Candidate]) -> Choice:
        places = list(range(len(candidates)))
        if self.kind == "random":
            return Choice(_first(self._draw.choice(places), places), "random")
        if self.kind == "session":
            names = {place: candidates[place].name for place in places}
            order = sorted(places, key=lambda place: _weight(keys, names[place]), reverse=True)
            return Choice(tuple(order), "session")
        order = sorted(places, key=lambda p: (not candidates[p].loaded, candidates[p].load))
        least = min(one.load for one in candidates)
        band = [p for p in places if candidates[p].load <= least + self._band]
        band = [p for p in band if candidates[p].loaded] or band
        found = self._by_prefix(keys, candidates, band)
        if found is not None:
            return Choice(_first(found, order), "prefix")
        if self.kind == "experts":
            found = self._by_experts(keys, candidates, band)
            if found is not None:
                return Choice(_first(found, order), "experts")
        two = self._draw.sample(band, 2) if len(band) > 1 else band
        return Choice(_first(min(two, key=lambda p: candidates[p].load), order), "load")

    def _by_prefix(
        self, keys: RouteKeys, candidates: Sequence[Candidate], band: Sequence[int]
    ) -> int | None:
        """Return the place of the longest prefix; None if it is short, or tells nothing apart."""
        found = {p: self._held[candidates[p].name].longest(keys.prefixes) for p in band}
        longest = max(found.values())
        if longest < max(1, LEAST_SHARE * len(keys.prefixes)) or (
            len(band) > 1 and min(found.values()) == longest
        ):
            return None
        return min((p for p in band if found[p] == longest), key=lambda p: candidates[p].load)

    def _by_experts(
        self, keys: RouteKeys, candidates: Sequence[Candidate], band: Sequence[int]
    ) -> int | None:
        """Return the least loaded place of those with about the largest expected hit rate."""
        signature = self.signature(keys)
        known = [p for p in band if candidates[p].published is not None]
        if signature is None or not known:
            return None
        rates = {p: self._rate(signature, candidates[p]) for p in known}
        best = max(rates.values())
        if best - min(rates.values()) <= self._locality and len(known) == len(band):
            return None  # all are as good
        close = [p for p in known if rates[p] >= best - self._locality]
        return min(close, key=lambda p: (candidates[p].load, -rates[p], p))

    def _rate(self, signature: Floats, candidate: Candidate) -> float:
        """Return the share of a signature's uses whose expert is resident."""
        published = candidate.published
        if published is None or published.resident.size != signature.size:
            return 0.0
        return float(signature[published.resident].sum() / signature.sum())


def _first(place: int, order: Sequence[int]) -> tuple[int, ...]:
    return (place, *(other for other in order if other != place))


def _weight(keys: RouteKeys, name: str) -> bytes:
    """Return the weight of a replica for a session: the largest one wins (rendezvous hashing)."""
    key = keys.session or (str(keys.prefixes[0]) if keys.prefixes else "")
    return blake2b(f"{key}\0{name}".encode(), digest_size=8).digest()
