"""Keep the EAM collection (EAMC): past requests, matched by similarity to the running request.

Source: MoE-Infinity (arXiv 2401.14361 v3), sections 4 and 5. Letters: L layers, E experts, N
entries. The paper leaves three things open, defined here as follows. An entry is the pair (prefill
rEAM, decode rEAM) of one request. The distance of two entries is the mean of the cosine distances
of their parts. Among equally close entries, the newest is first.

The paper fixes a capacity; `Eamc.automatic` adapts the number of entries to the workload. A request
whose similarity to every stored one is below ALIKE is added. Any other request replaces the entries
that are that similar. Matching time and memory set a ceiling. docs/study.md has measurements.

Counts are stored twice. In [N, L, E], an entry is contiguous for summing. In [L, E, N], one routed
expert is one contiguous row of N numbers. So matching adds K rows per layer instead of reading N
whole matrices.
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

ALIKE = 0.97  # cosine from which two requests count as equal
MOST_ENTRIES = 512  # limit from the matching time per token
MOST_BYTES = 64 << 20

Floats = NDArray[np.float32]
_PARTS = ("prefill", "decode")


def ceiling(layers: int, experts: int) -> int:
    """Return the largest size of an automatic EAMC: an entry takes 16·L·E bytes of memory."""
    return max(1, min(MOST_ENTRIES, MOST_BYTES // (16 * layers * experts)))


class Eamc:
    """At most `capacity` entries of L layers x E experts; a full EAMC replaces the most similar.

    With `alike`, a new entry also replaces all entries whose cosine to it is at least `alike`.
    Adding the entries of an EAMC, oldest first, to an empty one restores it.
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
        # Σ over rows 0 … l of the squared counts: the divisor of a cosine over observed rows.
        self._squares: dict[str, Floats] = {
            part: np.zeros((layers, 0), np.float32) for part in _PARTS
        }
        self._stamps = np.zeros(0, np.int64)  # larger = newer
        self._next_stamp = 0
        self.changes = 0  # calls of `add`: running matches compare it

    @classmethod
    def automatic(cls, layers: int, experts: int) -> Eamc:
        """Make an EAMC that keeps each different request of the workload, within the ceiling."""
        return cls(ceiling(layers, experts), layers, experts, ALIKE)

    def __len__(self) -> int:
        return self._size

    def add(self, prefill: NDArray[np.integer], decode: NDArray[np.integer]) -> int:
        """Store the rEAMs [L, E] of a finished request; return their place.

        A full EAMC drops the entry with the smallest distance to the new one. With `alike`, entries
        that are that similar are always dropped.
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
        """Return the counts of one entry."""
        prefill, decode = (self._entries[p][place].astype(np.uint32) for p in _PARTS)
        return RequestEam(prefill, decode)

    def entries(self) -> list[RequestEam]:
        """Return all entries, oldest first: adding them in this order restores the EAMC."""
        return [self.entry(int(place)) for place in self.oldest_first()]

    def oldest_first(self) -> NDArray[np.intp]:
        """Return the places [N], by the age of their entries."""
        return np.argsort(self._stamps[: self._size])

    def similarity(self, prefill: NDArray[np.number], decode: NDArray[np.number]) -> Floats:
        """Return 1 - distance of a pair of EAMs [L, E] to every entry, [N].

        The distance is the mean of the parts' cosine distances. A part that is zero in both does
        not count. A part that is zero in one has cosine 0.
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
        """Return the places of the `most` most similar entries, best first; ties: newest first."""
        return best_matches(similarity, self._stamps, most)

    def sum_of(self, places: Sequence[int], phase: Phase) -> Floats:
        """Return the sum [L, E] of these entries' matrices of this phase."""
        counts = self._entries[part_of(phase)][list(places)]
        total: Floats = counts.sum(0)
        return total

    def shares_of(self, places: Sequence[int], phase: Phase) -> Floats:
        """Return `normalised(sum_of(places, phase))`, [L, E], bit for bit."""
        return sum_as_shares(self._entries[part_of(phase)], places)

    def probable_cells(self) -> list[int]:
        """Return the cells (layer · E + expert) that requests used, the most used first.

        Every request has the same weight, and so have its prefill and its decode.
        """
        total = np.zeros(self.layers * self.experts, np.float64)
        for part in _PARTS:
            flat = self._counts[part][:, :, : self._size].reshape(len(total), self._size)
            total += (flat / np.maximum(flat.sum(0), 1)).sum(1)
        return [int(cell) for cell in np.argsort(-total, kind="stable") if total[cell] > 0]

    def counts(self, phase: Phase) -> Floats:
        """Return a view [L, E, N] of the counts of this phase; do not write to it."""
        return self._counts[part_of(phase)][:, :, : self._size]

    def squares(self, phase: Phase) -> Floats:
        """Return a view [L, N] of the squared norms over layers 0 … l; do not write to it."""
        return self._squares[part_of(phase)][:, : self._size]

    def to_bytes(self) -> bytes:
        """Return a container of kind "eamc": prefill and decode [N, L, E] uint32, oldest first."""
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
        """Read the bytes of `to_bytes`. Raises BadContainer.

        A smaller `capacity` replaces entries like `add`.
        """
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
        """Drop an entry: the last entry moves to its place."""
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
    """Matches one request during the passes of one phase; native/policy/eam_match.h draws how.

    The query is the request's EAM of this phase on the observed rows, layers 0 … l of the running
    pass. Each row includes the request's earlier passes of the phase. The EAMC may change
    meanwhile.
    """

    def __init__(self, eamc: Eamc, phase: Phase) -> None:
        self._eamc, self.phase = eamc, phase
        self._match = EamMatch(eamc.layers, eamc.experts)
        self._changes = -1

    @property
    def layer(self) -> int:
        """The last observed layer of the running pass; -1 before the first."""
        return self._match.layer

    def begin_pass(self) -> None:
        """Start a pass, of which no layer is observed yet."""
        self._match.begin_pass()

    def observe(self, layer: int, ids: NDArray[np.integer[Any]]) -> None:
        """Observe the ids [T, K] of `layer` in the running pass; -1: no expert.

        Layers ascend. A layer that the pass skips counts with its earlier passes.
        """
        self._current().observe(layer, ids)

    def similarity(self) -> Floats:
        """Return the cosine over the observed rows, [N]; 0 before the first observation."""
        return self._current().similarity()

    def _current(self) -> EamMatch:
        if self._changes != self._eamc.changes:
            self._changes = self._eamc.changes
            self._match.rebuild(self._eamc.counts(self.phase), self._eamc.squares(self.phase))
        return self._match


def part_of(phase: Phase) -> str:
    """Return the part of a phase; encode passes count as prefill, in the encoder's rows."""
    return "decode" if phase == "decode" else "prefill"


def cosine(dot: Floats, square: float, squares: Floats) -> Floats:
    """Return dot ÷ (norm · norms), [N]; 0 where either side is all zero."""
    product = np.sqrt(squares * np.float32(square))
    found = np.zeros_like(dot)
    np.divide(dot, product, out=found, where=product > 0)
    return found


def normalised(matrix: NDArray[np.number]) -> Floats:
    """Divide each row [L, E] by its sum; a row of zeros becomes uniform, 1/E."""
    rows = np.asarray(matrix, np.float32)
    sums = rows.sum(1, keepdims=True)
    uniform = np.float32(1 / rows.shape[1])
    shares: Floats = np.where(sums > 0, rows / np.where(sums > 0, sums, 1), uniform)
    return shares


def distance_weights(layer: int, layers: int) -> Floats:
    """Return 1 - (i - l)/L for the later layers i > l, 0 for the others: [L]."""
    ahead = np.arange(layers) - layer
    return np.where(ahead > 0, 1 - ahead / layers, 0).astype(np.float32)


def prefetch_priorities(prediction: Floats, layer: int) -> Floats:
    """Return the pEAM [L, E] at layer l: the normalised prediction, weighted by distance.

    Source: PredictEAM of the paper.
    """
    weights = distance_weights(layer, len(prediction))
    return (prediction * weights[:, None]).astype(np.float32)


def eviction_priorities(prediction: Floats, epsilon: float) -> Floats:
    """Return (P + ε)·(1 - i/L), [L, E]; the resident expert with the smallest is evicted.

    Source: Algorithm 1 of the paper. It divides pEAM by its row's sum, which cancels the distance
    weights. So P is the row-normalised prediction without them.
    """
    layers = len(prediction)
    late = 1 - np.arange(layers, dtype=np.float32) / layers
    return ((prediction + np.float32(epsilon)) * late[:, None]).astype(np.float32)


def _positive(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 24:
        raise BadContainer(f"{value!r} is not a size")
    return value
