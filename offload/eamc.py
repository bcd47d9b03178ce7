"""The EAM collection: a fixed number of past requests, and which of them the running one is like.

Does not know caches, policies, files or clocks.

Source: MoE-Infinity (arXiv 2401.14361 v3), sections 4 and 5. Letters: L layers, E experts, N
entries. What the paper leaves open: an entry is the pair (prefill rEAM, decode rEAM) of one
request; the distance of two entries is the mean of the cosine distances of their parts; equally
close entries rank by age, the newest first.

Counts lie as [L, E, N], so that one routed expert is one contiguous row of N numbers: matching
adds K of them per layer instead of reading N whole matrices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.container import BadContainer, pack, unpack
from moeinf.offload.trace import Phase, RequestEam

KIND = "eamc"
VERSION = 1
TIE = 1e-6  # cosines that differ by less are equal: rounding of float32 sums

Floats = NDArray[np.float32]
_PARTS = ("prefill", "decode")


class Eamc:
    """At most `capacity` entries of L layers x E experts; a full one replaces the most similar."""

    def __init__(self, capacity: int, layers: int, experts: int) -> None:
        assert capacity > 0, "an EAMC holds at least one entry"
        self.capacity, self.layers, self.experts = capacity, layers, experts
        self._size = 0
        self._room = 0
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

    def __len__(self) -> int:
        return self._size

    def add(self, prefill: NDArray[np.integer], decode: NDArray[np.integer]) -> int:
        """Stores the rEAMs [L, E] of a finished request; returns the place that they took.

        When full, the stored entry with the smallest distance to the new one goes.
        """
        new = {"prefill": prefill.astype(np.float32), "decode": decode.astype(np.float32)}
        place = self._size if self._size < self.capacity else self._closest(new)
        if place == self._room:
            self._grow(min(self.capacity, max(16, 2 * self._room)))
        self._size = max(self._size, place + 1)
        for part, counts in new.items():
            self._counts[part][:, :, place] = counts
            self._squares[part][:, place] = np.cumsum((counts.astype(np.float64) ** 2).sum(1))
        self._stamps[place] = self._next_stamp
        self._next_stamp += 1
        self.changes += 1
        return place

    def entry(self, place: int) -> RequestEam:
        """The counts of one entry."""
        prefill, decode = (self._counts[p][:, :, place].astype(np.uint32) for p in _PARTS)
        return RequestEam(prefill, decode)

    def entries(self) -> list[RequestEam]:
        """All entries, oldest first: adding them to an empty EAMC in this order restores it."""
        return [self.entry(int(place)) for place in np.argsort(self._stamps[: self._size])]

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
        order = np.lexsort((-self._stamps[: self._size], -_rounded(similarity)))
        return [int(place) for place in order[:most]]

    def newest_of_best(self, similarity: Floats) -> int:
        """best(similarity, 1)[0], without sorting."""
        (ties,) = np.nonzero(similarity >= similarity.max() - TIE)
        return int(ties[0] if len(ties) == 1 else ties[self._stamps[ties].argmax()])

    def sum_of(self, places: Sequence[int], phase: Phase) -> Floats:
        """[L, E]: the matched matrices of this phase, summed cell by cell."""
        counts = self._counts[part_of(phase)]
        if len(places) == 1:
            return counts[:, :, places[0]]
        total: Floats = counts[:, :, list(places)].sum(2)
        return total

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
            found = cls(
                capacity or _positive(meta["capacity"]), *(_positive(meta[k]) for k in _SIZE)
            )
            prefill, decode = arrays["prefill"], arrays["decode"]
        except KeyError as error:
            raise BadContainer(f"an EAMC without {error}") from error
        size = (len(prefill), found.layers, found.experts)
        if prefill.shape != size or decode.shape != size:
            raise BadContainer(f"EAMs of {prefill.shape} and {decode.shape}, not {size}")
        for pair in zip(prefill, decode, strict=True):
            found.add(*pair)
        return found

    def _closest(self, new: dict[str, Floats]) -> int:
        return self.newest_of_best(self.similarity(new["prefill"], new["decode"]))

    def _grow(self, room: int) -> None:
        more = room - self._room
        for part in _PARTS:
            pad = np.zeros((self.layers, self.experts, more), np.float32)
            self._counts[part] = np.concatenate([self._counts[part], pad], 2)
            flat = np.zeros((self.layers, more), np.float32)
            self._squares[part] = np.concatenate([self._squares[part], flat], 1)
        self._stamps = np.concatenate([self._stamps, np.zeros(more, np.int64)])
        self._room = room


_SIZE = ("layers", "experts")


class Matcher:
    """Follows one request through the passes of one phase and keeps its cosine to every entry.

    The query is the request's EAM of this phase on the observed rows: layers 0 … l of the running
    pass, each with the request's earlier passes of the phase added. Per layer it costs K rows of N
    numbers: the dot product of every layer is kept and only grows by what was routed, and the sum
    over observed layers is a running prefix.
    """

    def __init__(self, eamc: Eamc, phase: Phase) -> None:
        self._eamc, self.phase = eamc, phase
        self.query = np.zeros((eamc.layers, eamc.experts), np.float32)
        self._layer_squares = [0.0] * eamc.layers  # of the query
        self._rebuild()
        self.begin_pass()

    def begin_pass(self) -> None:
        """Nothing of this pass is observed yet."""
        self.layer = -1  # the last observed one
        self._square = 0.0
        if self._changes != self._eamc.changes:
            self._rebuild()
        self._dot = np.zeros(len(self._eamc), np.float32)

    def observe(self, layer: int, counts: NDArray[np.number]) -> None:
        """`layer` of the running pass routed counts [E] of this request's rows."""
        experts = np.flatnonzero(counts)
        self.observe_ids(layer, np.repeat(experts, counts[experts].astype(np.int64)))

    def observe_ids(self, layer: int, experts: NDArray[np.integer]) -> None:
        """The same, as the chosen experts [n], once per row that chose them; layers ascend."""
        if self._changes != self._eamc.changes:
            self._restart()
        while self.layer < layer:  # a layer that this pass skipped counts with its history
            if self.layer >= 0:
                self._close(self.layer)
            self.layer += 1
        row, kept = self.query[layer], self._dots[layer]
        if len(set(experts.tolist())) < len(experts):
            added = np.bincount(experts, minlength=len(row)).astype(np.float32)
            row += added
            (which,) = np.nonzero(added)
            kept += added[which] @ self._counts[layer, which]
        else:
            row[experts] += 1
            kept += self._counts[layer, experts].sum(0)
        self._layer_squares[layer] = float(row @ row)

    def similarity(self) -> Floats:
        """[N]: the cosine over the observed rows; 0 before anything is observed."""
        if self._changes != self._eamc.changes:
            self._restart()
        if self.layer < 0:
            return np.zeros(len(self._eamc), np.float32)
        dot = self._dot + self._dots[self.layer]
        square = self._square + self._layer_squares[self.layer]
        return cosine(dot, square, self._squares[self.layer])

    def _close(self, layer: int) -> None:
        self._dot += self._dots[layer]
        self._square += self._layer_squares[layer]

    def _rebuild(self) -> None:
        """All dot products anew, after entries came or went."""
        self._changes = self._eamc.changes
        self._counts = self._eamc.counts(self.phase)
        self._squares = self._eamc.squares(self.phase)
        self._dots: Floats = np.einsum("len,le->ln", self._counts, self.query)

    def _restart(self) -> None:
        """A rebuild in the middle of a pass."""
        self._rebuild()
        self._dot = self._dots[: max(self.layer, 0)].sum(0)


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


def _rounded(similarity: Floats) -> NDArray[np.int64]:
    return np.round(similarity / TIE).astype(np.int64)


def _positive(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 24:
        raise BadContainer(f"{value!r} is not a size")
    return value
