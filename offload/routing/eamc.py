"""The EAM collection: a fixed number of past requests, and which of them the running one is like.

Does not know caches, policies, files or clocks.

Source: MoE-Infinity (arXiv 2401.14361 v3), sections 4 and 5. Letters: L layers, E experts, N
entries. What the paper leaves open: an entry is the pair (prefill rEAM, decode rEAM) of one
request; the distance of two entries is the mean of the cosine distances of their parts; equally
close entries rank by age, the newest first.

How many entries: the paper fixes a capacity. `Eamc.automatic` chooses it by the workload: a
request that is less than ALIKE like every stored one is added, any other takes the place of those
that it is so like, up to a ceiling that matching and memory set. docs/study.md has measurements.

Counts lie twice: as [N, L, E], an entry in one piece to be summed, and as [L, E, N], so that one
routed expert is one contiguous row of N numbers: matching adds K of them per layer instead of
reading N whole matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.native import EamMatch, best_matches, sum_as_shares
from moeinf.offload.format.array_file import BadContainer, pack, unpack
from moeinf.offload.routing.trace import Phase, RequestEam

KIND = "eamc"
VERSION = 1

ALIKE = 0.97  # cosine from which two requests say the same
MOST_ENTRIES = 512  # what a token can afford to be matched with
MOST_BYTES = 64 << 20

Floats = NDArray[np.float32]
_PARTS = ("prefill", "decode")


def ceiling(layers: int, experts: int) -> int:
    """Entries that an automatic EAMC has at most: each takes 16·L·E bytes of memory."""
    return max(1, min(MOST_ENTRIES, MOST_BYTES // (16 * layers * experts)))


class Eamc:
    """At most `capacity` entries of L layers x E experts; a full one replaces the most similar.

    With `alike`, a new entry also replaces all those whose cosine to it is at least that. Adding
    the entries of such a collection, oldest first, to an empty one restores it just the same.
    """

    def __init__(
        self, capacity: int, layers: int, experts: int, alike: float | None = None
    ) -> None:
        assert capacity > 0, "an EAMC holds at least one entry"
        self.capacity, self.layers, self.experts = capacity, layers, experts
        self._alike = alike
        self._size = 0
        self._room = 0
        self._entries: dict[str, Floats] = {
            part: np.zeros((0, layers, experts), np.float32) for part in _PARTS
        }
        self._counts: dict[str, Floats] = {
            part: np.zeros((layers, experts, 0), np.float32) for part in _PARTS
        }
        # Σ over rows 0 … l of the squared counts: what a cosine over observed rows divides by.
        self._squares: dict[str, Floats] = {
            part: np.zeros((layers, 0), np.float32) for part in _PARTS
        }
        self._stamps = np.zeros(0, np.int64)  # grows with every entry: larger = newer
        self._next_stamp = 0
        self.changes = 0  # entries that came or were replaced, ever: running matches check it

    @classmethod
    def automatic(cls, layers: int, experts: int) -> Eamc:
        """As many entries as the workload has different requests, within the ceiling."""
        return cls(ceiling(layers, experts), layers, experts, ALIKE)

    def __len__(self) -> int:
        return self._size

    def add(self, prefill: NDArray[np.integer], decode: NDArray[np.integer]) -> int:
        """Stores the rEAMs [L, E] of a finished request; returns the place that they took.

        When full, the stored entry with the smallest distance to the new one goes; with `alike`,
        those that it is so like go in any case.
        """
        new = {"prefill": prefill.astype(np.float32), "decode": decode.astype(np.float32)}
        place = self._place_for(new)
        if place == self._room:
            self._grow(min(self.capacity, max(16, 2 * self._room)))
        self._size = max(self._size, place + 1)
        for part, counts in new.items():
            self._entries[part][place] = counts
            self._counts[part][:, :, place] = counts
            self._squares[part][:, place] = np.cumsum((counts.astype(np.float64) ** 2).sum(1))
        self._stamps[place] = self._next_stamp
        self._next_stamp += 1
        self.changes += 1
        return place

    def entry(self, place: int) -> RequestEam:
        """The counts of one entry."""
        prefill, decode = (self._entries[p][place].astype(np.uint32) for p in _PARTS)
        return RequestEam(prefill, decode)

    def entries(self) -> list[RequestEam]:
        """All entries, oldest first: adding them to an empty EAMC in this order restores it."""
        return [self.entry(int(place)) for place in self.oldest_first()]

    def oldest_first(self) -> NDArray[np.intp]:
        """The places [N] in the order in which their entries came."""
        return np.argsort(self._stamps[: self._size])

    def similarity(self, prefill: NDArray[np.number], decode: NDArray[np.number]) -> Floats:
        """[N]: 1 - distance of a pair of EAMs [L, E] to every entry.

        The distance is the mean of the parts' cosine distances; a part that both lack does not
        count, a part that one lacks has cosine 0.
        """
        total = np.zeros(self._size, np.float32)
        parts = np.zeros(self._size, np.float32)
        for part, query in (("prefill", prefill), ("decode", decode)):
            flat = query.astype(np.float32).ravel()
            counts = self._counts[part][:, :, : self._size].reshape(flat.size, self._size)
            squares = self._squares[part][-1, : self._size]
            square = float(flat @ flat)
            total += cosine(flat @ counts, square, squares)
            parts += (squares > 0) | (square > 0)
        return (total / np.maximum(parts, 1)).astype(np.float32)

    def best(self, similarity: Floats, most: int = 1) -> list[int]:
        """The places of the `most` most similar entries, best first; ties: the newest first."""
        return best_matches(similarity, self._stamps, most)

    def sum_of(self, places: Sequence[int], phase: Phase) -> Floats:
        """[L, E]: the matched matrices of this phase, summed cell by cell."""
        counts = self._entries[part_of(phase)][list(places)]
        total: Floats = counts.sum(0)
        return total

    def shares_of(self, places: Sequence[int], phase: Phase) -> Floats:
        """[L, E]: `normalised(sum_of(places, phase))`, bit for bit."""
        return sum_as_shares(self._entries[part_of(phase)], places)

    def probable_cells(self) -> list[int]:
        """The cells layer · E + expert that requests used, the most used first.

        Every request counts alike, and its prefill as much as its decode.
        """
        total = np.zeros(self.layers * self.experts, np.float64)
        for part in _PARTS:
            flat = self._counts[part][:, :, : self._size].reshape(len(total), self._size)
            total += (flat / np.maximum(flat.sum(0), 1)).sum(1)
        return [int(cell) for cell in np.argsort(-total, kind="stable") if total[cell] > 0]

    def counts(self, phase: Phase) -> Floats:
        """[L, E, N]: a view of the stored counts of this phase. Not to be written."""
        return self._counts[part_of(phase)][:, :, : self._size]

    def squares(self, phase: Phase) -> Floats:
        """[L, N]: a view of each entry's squared norm over layers 0 … l. Not to be written."""
        return self._squares[part_of(phase)][:, : self._size]

    def to_bytes(self) -> bytes:
        """A container of kind "eamc": prefill and decode [N, L, E] uint32, oldest first."""
        entries = self.entries()
        none = np.zeros((0, self.layers, self.experts), np.uint32)
        arrays = {
            "prefill": np.stack([e.prefill for e in entries]) if entries else none,
            "decode": np.stack([e.decode for e in entries]) if entries else none,
        }
        meta = {"capacity": self.capacity, "layers": self.layers, "experts": self.experts}
        return pack(KIND, VERSION, meta, arrays)

    @classmethod
    def from_bytes(
        cls, data: bytes, capacity: int | None = None, most_bytes: int = 1 << 30
    ) -> Eamc:
        """What `to_bytes` wrote; a smaller `capacity` replaces as `add` does. BadContainer."""
        meta, arrays = unpack(data, KIND, VERSION, most_bytes)
        try:
            most, layers, experts = (_positive(meta[k]) for k in ("capacity", "layers", "experts"))
            prefill, decode = arrays["prefill"], arrays["decode"]
        except KeyError as error:
            raise BadContainer(f"an EAMC without {error}") from error
        for eams in (prefill, decode):
            if eams.dtype.str != "<u4" or eams.shape != (*prefill.shape[:1], layers, experts):
                words = f"{eams.dtype.str} {eams.shape}, not <u4 (N, {layers}, {experts})"
                raise BadContainer(f"EAMs of {words}")
        found = cls(capacity or most, layers, experts)
        for pair in zip(prefill, decode, strict=True):
            found.add(*pair)
        return found

    def _place_for(self, new: dict[str, Floats]) -> int:
        full = self._size == self.capacity
        if not full and self._alike is None:
            return self._size
        similarity = self.similarity(new["prefill"], new["decode"])
        if self._alike is not None:
            places = np.flatnonzero(similarity >= self._alike).tolist()
            for place in reversed(places[1:]):
                self._fill(place)
            if places:
                return int(places[0])
        return self.best(similarity)[0] if full else self._size

    def _fill(self, place: int) -> None:
        """Forgets an entry: the last one moves to its place."""
        last = self._size - 1
        for part in _PARTS:
            self._entries[part][place] = self._entries[part][last]
            self._counts[part][:, :, place] = self._counts[part][:, :, last]
            self._squares[part][:, place] = self._squares[part][:, last]
        self._stamps[place] = self._stamps[last]
        self._size = last

    def _grow(self, room: int) -> None:
        more = room - self._room
        for part in _PARTS:
            pad = np.zeros((more, self.layers, self.experts), np.float32)
            self._entries[part] = np.concatenate([self._entries[part], pad])
            turned = np.moveaxis(pad, 0, 2)
            self._counts[part] = np.concatenate([self._counts[part], turned], 2)
            flat = np.zeros((self.layers, more), np.float32)
            self._squares[part] = np.concatenate([self._squares[part], flat], 1)
        self._stamps = np.concatenate([self._stamps, np.zeros(more, np.int64)])
        self._room = room


class Matcher:
    """Follows one request through the passes of one phase; native/policy/eam_match.h draws how.

    The query is the request's EAM of this phase on the observed rows: layers 0 … l of the running
    pass, each with the request's earlier passes of the phase added. Entries may come and go
    meanwhile.
    """

    def __init__(self, eamc: Eamc, phase: Phase) -> None:
        self._eamc, self.phase = eamc, phase
        self._match = EamMatch(eamc.layers, eamc.experts)
        self._changes = -1

    @property
    def layer(self) -> int:
        """The last observed one of the running pass; -1: none."""
        return self._match.layer

    def begin_pass(self) -> None:
        """Nothing of this pass is observed yet."""
        self._match.begin_pass()

    def observe(self, layer: int, ids: NDArray[np.integer[Any]]) -> None:
        """`layer` of the running pass routed ids [T, K]; -1 = none. Layers ascend; one that the
        pass skipped counts with its history."""
        self._current().observe(layer, ids)

    def similarity(self) -> Floats:
        """[N]: the cosine over the observed rows; 0 before anything is observed."""
        return self._current().similarity()

    def _current(self) -> EamMatch:
        if self._changes != self._eamc.changes:
            self._changes = self._eamc.changes
            self._match.rebuild(self._eamc.counts(self.phase), self._eamc.squares(self.phase))
        return self._match


def part_of(phase: Phase) -> str:
    """Encode passes count as prefill: they fill the encoder's rows."""
    return "decode" if phase == "decode" else "prefill"


def cosine(dot: Floats, square: float, squares: Floats) -> Floats:
    """dot ÷ (norm · norms), [N]; 0 where either side is all zero."""
    product = np.sqrt(squares * np.float32(square))
    found = np.zeros_like(dot)
    np.divide(dot, product, out=found, where=product > 0)
    return found


def normalised(matrix: NDArray[np.number]) -> Floats:
    """[L, E]: each row divided by its sum; a row that nothing predicts is uniform, 1/E."""
    rows = np.asarray(matrix, np.float32)
    sums = rows.sum(1, keepdims=True)
    uniform = np.float32(1 / rows.shape[1])
    shares: Floats = np.where(sums > 0, rows / np.where(sums > 0, sums, 1), uniform)
    return shares


def distance_weights(layer: int, layers: int) -> Floats:
    """[L]: 1 - (i - l)/L for the layers i > l that are still to come, 0 for the others."""
    ahead = np.arange(layers) - layer
    return np.where(ahead > 0, 1 - ahead / layers, 0).astype(np.float32)


def prefetch_priorities(prediction: Floats, layer: int) -> Floats:
    """pEAM [L, E] at layer l: the normalised prediction, weighted by distance (PredictEAM)."""
    weights = distance_weights(layer, len(prediction))
    return (prediction * weights[:, None]).astype(np.float32)


def eviction_priorities(prediction: Floats, epsilon: float) -> Floats:
    """[L, E]: (P + ε)·(1 - i/L); the resident expert with the smallest leaves (Algorithm 1).

    The paper divides pEAM by its row's sum, which cancels the distance weights: P is the
    row-normalised prediction without them.
    """
    layers = len(prediction)
    late = 1 - np.arange(layers, dtype=np.float32) / layers
    return ((prediction + np.float32(epsilon)) * late[:, None]).astype(np.float32)


def _positive(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 24:
        raise BadContainer(f"{value!r} is not a size")
    return value
