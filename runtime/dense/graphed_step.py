"""Capture a decode step as graphs, from one call of its experts to the next, and replay them.

Where a token's dense part is some hundreds of small kernels, most of its time goes into launching
them (PyGraph, arXiv 2503.19779, section 1). So the kernels that a step queues between two calls of
the `Experts` interface are captured as one graph. The model's own code runs once, for the capture.
Then a tape replays it:

    model    embed … router │submit│ shared experts │result│ attention … router │submit│ …
    tape     graph            call   graph            call   graph                call

The interface is called for every token, because the host, the drive and the policy have work there.
Between the calls no Python of the model runs. The result of a layer whose experts all stay on the
device is one more graph.

A trial comes first: the step runs with experts that answer at once, without and with graphs.
Logits must agree bit for bit, and the graphs must be faster. Otherwise the machine does not use
graphs. A note gives the measurement, or `--verbose` where graphs pay.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from moeinf.models.base import Experts, Pending, Phase
from moeinf.models.layers.decoder import DecodeStep
from moeinf.models.layers.kv_cache import KvCache, Span
from moeinf.models.layers.moe import Done
from moeinf.offload.gpu_tier.layer_runner import ByTable

_BEFORE = 2  # tokens of a text decoded without graphs: a short answer does not pay for a trial
_ROUNDS = 5  # with and without graphs, alternating
_MOST = 4  # tapes that are kept
_IDLE = 64  # tokens without a replay after which a tape may be dropped

_Key = tuple[int, bool, tuple[int | None, ...]]  # a cache's id, hints or not, its places


class Graphs(Protocol):
    """Capture and replay of a device's work: see offload/gpu_kernels/cuda_graphs.py."""

    @property
    def can_begin(self) -> bool:
        """True if capture can start now, which other work may prevent."""
        ...

    def aside(self, warm_up: Callable[[], object]) -> AbstractContextManager[None]:
        """Open a context in which `begin` and `end` may be called, after warm_up().

        warm_up does the work itself. An error within ends the capture.
        """
        ...

    def begin(self, apart: bool = False) -> None:
        """Start capture: work is recorded and does not run.

        apart: the graph has its own pool. It is replayed between others, and passes on only memory
        from outside the pool.
        """
        ...

    def end(self) -> Callable[[], None] | None:
        """End capture and return a function that queues the graph; None: the graph is empty."""
        ...

    def forget(self) -> None:
        """Free the memory of graphs that are gone. No others may follow."""
        ...


class GraphedStep:
    """A DecodeStep. It replays a tape for the tokens of a single request, once there is one."""

    def __init__(self, step: DecodeStep, graphs: Graphs, tell: Callable[[str, bool], None]) -> None:
        """Wrap `step`. tell: receives the outcome of the trial, and whether graphs are used."""
        self._step, self._graphs, self._tell = step, graphs, tell
        self._tapes: dict[_Key, _Tape] = {}
        self._seen: WeakKeyDictionary[KvCache, int] = WeakKeyDictionary()  # without a tape
        self._tokens = 0  # of single requests
        self.pays: bool | None = None  # None: not tried yet
        self._forgotten = False

    def __call__(
        self, ids: Tensor, positions: Tensor, spans: tuple[Span, ...], experts: Experts
    ) -> Tensor:
        """Run a step, see DecodeStep. The next token overwrites the result."""
        if len(spans) > 1 or self.pays is False:
            if self.pays is False and not self._forgotten:  # no tape is left here
                self._graphs.forget()
                self._forgotten = True
            return self._step(ids, positions, spans, experts)
        cache, hints = spans[0].cache, experts.wants_hints
        key = id(cache), hints, cache.places
        self._tokens += 1
        tape = self._tapes.get(key)
        if tape is None or tape.cache() is not cache:
            self._seen[cache] = seen = self._seen.get(cache, 0) + 1
            worth = seen > _BEFORE and self._graphs.can_begin and self._make_room()
            tape = self._rehearsed(ids, positions, spans, hints) if worth else None
            if tape is None:
                return self._step(ids, positions, spans, experts)
            self._tapes[key] = tape
        tape.played_at = self._tokens
        logits = tape.play(ids, positions, experts)
        if tape.unwritten and self._graphs.can_begin:
            self._write_results(tape)
        return logits

    def _write_results(self, tape: _Tape) -> None:
        """Capture the results of layers that did not need the host, for the first time."""
        try:
            with self._graphs.aside(lambda: None):  # they have just run
                tape.write_results(self._graphs)
        except RuntimeError as error:
            self._give_up(error)

    def _give_up(self, error: RuntimeError) -> None:
        """Stop using graphs after an error of torch or the driver, out of memory among them."""
        self.pays = False
        self._tapes.clear()
        self._tell(str(error).splitlines()[0], False)

    def _make_room(self) -> bool:
        """Drop tapes of texts that are gone or long idle; return whether one more tape fits.

        Texts that alternate do not displace one another.
        """
        for key, tape in list(self._tapes.items()):
            idle = self._tokens - tape.played_at > _IDLE and len(self._tapes) >= _MOST
            if tape.cache() is None or idle:
                del self._tapes[key]
        return len(self._tapes) < _MOST

    def _rehearsed(
        self, ids: Tensor, positions: Tensor, spans: tuple[Span, ...], hints: bool
    ) -> _Tape | None:
        """Return a tape for this text; None where it does not pay, or cannot be made.

        It writes invalid values into the caches, at this token's place; the pass overwrites them.
        """
        echo = _Echo(hints)
        try:
            with self._graphs.aside(lambda: self._step(ids, positions, spans, echo)):
                tape = _Tape(self._step, self._graphs, ids, positions, spans, hints)
            if self.pays is None:
                self._judge(tape, ids, positions, spans, echo)
        except RuntimeError as error:
            self._give_up(error)
        return tape if self.pays else None

    def _judge(
        self, tape: _Tape, ids: Tensor, positions: Tensor, spans: tuple[Span, ...], echo: _Echo
    ) -> None:
        times: tuple[list[float], list[float]] = ([], [])
        found: list[Tensor] = []
        for _ in range(_ROUNDS):
            for way, spent in enumerate(times):
                start = perf_counter()
                if way == 0:
                    logits = self._step(ids, positions, spans, echo)
                else:
                    logits = tape.play(ids, positions, echo)
                found.append(logits.cpu().view(torch.uint8))  # waits; bits: NaN equals nothing
                spent.append(perf_counter() - start)
        alone, graphed = (statistics.median(spent) * 1e3 for spent in times)
        same = all(torch.equal(found[0], other) for other in found[1:])
        self.pays = same and graphed < alone
        words = (
            f"the dense part of a token takes {graphed:.2f} ms with them, {alone:.2f} ms without"
        )
        if not same:
            words = "their results differ from those without them; please report this"
        self._tell(words, self.pays)


class _Tape:
    """The graphs of one text's step, and the calls between them.

    A text whose memory is recurrent has two tapes, because its places alternate.
    """

    def __init__(
        self, step: DecodeStep, graphs: Graphs, ids: Tensor, positions: Tensor,
        spans: tuple[Span, ...], hints: bool,
    ) -> None:  # fmt: skip
        self.cache = ref(spans[0].cache)  # the graphs have only its planes' addresses
        self.played_at = 0
        self._ids, self._positions = ids.clone(), positions.clone()
        seam = _Seam(graphs, hints)
        graphs.begin()
        self._logits = step(self._ids, self._positions, spans, seam)
        seam.play(graphs.end())
        self._moves, self._results = tuple(seam.moves), tuple(seam.results)
        seam.moves.clear()  # results refer to the seam: free them without a garbage collection
        seam.results.clear()

    def play(self, ids: Tensor, positions: Tensor, experts: Experts) -> Tensor:
        """Replay: ids and positions [1] -> logits [1, vocab], in the same memory every time."""
        self._ids.copy_(ids)
        self._positions.copy_(positions)
        for move in self._moves:
            move(experts)
        return self._logits

    @property
    def unwritten(self) -> bool:
        """True if no result of the last token needed the host, but not all are graphs yet.

        All are captured at once then, because that takes a while.
        """
        free = all(result.repeats or result.fresh is not None for result in self._results)
        return free and not all(result.repeats for result in self._results)

    def write_results(self, graphs: Graphs) -> None:
        """Capture the results as graphs."""
        for result in self._results:
            result.write(graphs)


@dataclass
class _Seam:
    """`Experts` of a step under capture: every call ends a graph and begins another."""

    graphs: Graphs
    wants_hints: bool
    moves: list[Callable[[Experts], None]] = field(default_factory=list)
    results: list[_Result] = field(default_factory=list)

    def play(self, graph: Callable[[], None] | None) -> None:
        if graph is not None:
            self.moves.append(lambda _: graph())

    def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> _Result:
        self.play(self.graphs.end())
        result = _Result(self, torch.empty_like(x))
        self.results.append(result)
        self.moves.append(lambda experts: result.start(experts, layer, x, ids, weights))
        self.graphs.begin()
        return result

    def hint(self, layer: int, ids: Tensor, scores: Tensor) -> None:
        self.play(self.graphs.end())
        self.moves.append(lambda experts: _hint(experts, layer, ids, scores))
        self.graphs.begin()

    def begin_pass(self, rows: Tensor, phase: Phase, pieces: Sequence[slice] = ()) -> None:
        """Do nothing: the caller of the step has opened the pass."""

    def end_pass(self, accepted_rows: Tensor | None = None) -> None:
        """Do nothing: the caller closes the pass."""


def _hint(experts: Experts, layer: int, ids: Tensor, scores: Tensor) -> None:
    if experts.wants_hints:
        experts.hint(layer, ids, scores)


class _Result:
    """A layer's routed sum, in the memory where the graphs after it read it."""

    def __init__(self, seam: _Seam, place: Tensor) -> None:
        self._seam, self._place = seam, place
        self._pending: Pending | None = None
        self._graph: Callable[[], None] | None = None
        self._table: Tensor | None = None  # the table with which the graph was captured
        self.repeats = False  # whether the last result was that graph
        self.fresh: ByTable | None = None  # a result that can be captured, and is not yet

    def start(self, experts: Experts, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        self._pending = experts.submit(layer, x, ids, weights)

    def result(self) -> Tensor:
        """Return the tensor that will hold the result."""
        seam = self._seam
        seam.play(seam.graphs.end())
        seam.moves.append(lambda _: self._finish())
        seam.graphs.begin()
        return self._place

    def _finish(self) -> None:
        pending, self._pending = self._pending, None
        assert pending is not None
        by_table = pending if isinstance(pending, ByTable) else None
        self.repeats = by_table is not None and by_table.table is self._table
        if self.repeats and self._graph is not None:
            self._graph()
            return
        self._place.copy_(pending.result())
        self.fresh = by_table

    def write(self, graphs: Graphs) -> None:
        """Capture the kernels of the last token's result, if possible."""
        pending, self.fresh = self.fresh, None
        if pending is not None:
            graphs.begin(apart=True)
            self._place.copy_(pending.result())
            self._graph, self._table = graphs.end(), pending.table


@dataclass(frozen=True)
class _Echo:
    """`Experts` that return their input."""

    wants_hints: bool

    def begin_pass(self, rows: Tensor, phase: Phase, pieces: Sequence[slice] = ()) -> None:
        """Do nothing."""

    def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Done:
        return Done(x)

    def hint(self, layer: int, ids: Tensor, scores: Tensor) -> None:
        """Do nothing."""

    def end_pass(self, accepted_rows: Tensor | None = None) -> None:
        """Do nothing."""
