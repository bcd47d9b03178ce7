"""Simulate CUDA graphs without CUDA: record torch operations and replay them on demand.

A capture leaves no result, like a real graph: new tensors become invalid (NaN or -1), and changed
tensors get their old values back. A replay runs each operation on the same tensors and writes its
result to the same addresses. A number from the host stays constant. Graphs in a pool that were
captured at different times may share memory, so a replay of one invalidates the results of the
others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.strict_device import Strict

Made = TypeVar("Made", bound=Tensor | tuple[Tensor, ...])


class WrittenDown(TorchDispatchMode):
    """One graph during capture."""

    def __init__(self) -> None:
        super().__init__()
        self._work: list[Callable[[], object]] = []
        self._made: dict[int, Tensor] = {}  # by address, of storages
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # changed tensors with their old values

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        given = [x for x in tree_leaves((args, named)) if isinstance(x, Tensor)]
        if func._schema.is_mutable:
            self.remember(given)
            found = func(*args, **named)
            self._work.append(lambda: func(*args, **named))
            return found
        found = func(*args, **named)
        self.does(lambda: func(*args, **named), found, given)
        return found

    def does(self, compute: Callable[[], Any], found: Any, given: list[Tensor]) -> None:
        """Record the computation of `found` from `given`."""
        places = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
        theirs = {_storage(x) for x in given}
        if all(_storage(x) in theirs for x in places):
            return  # views
        for x in places:
            self._made[_storage(x)] = x

        def again() -> None:
            made = [x for x in tree_leaves(compute()) if isinstance(x, Tensor)]
            for place, x in zip(places, made, strict=True):
                place.copy_(x)

        self._work.append(again)

    def remember(self, changed: Iterable[Tensor]) -> None:
        """Save the values of tensors, to restore them after capture."""
        for x in changed:
            if _storage(x) not in self._made:
                self._before.setdefault(_storage(x), (x, x.clone()))

    def also(self, work: Callable[[], object]) -> None:
        """Record work that makes no new tensor."""
        self._work.append(work)

    def done(self) -> Callable[[], None] | None:
        """End the capture, restore the old state and return the replay; None for an empty graph."""
        for x, before in self._before.values():
            x.copy_(before)
        self.spoil()
        work = tuple(self._work)

        def play() -> None:
            with torch._C.DisableTorchFunction(), torch.inference_mode():
                for one in work:
                    one()

        return play if work else None

    def spoil(self) -> None:
        """Overwrite the results with NaN, -1 or False."""
        with torch._C.DisableTorchFunction(), torch.inference_mode():
            for x in self._made.values():
                x.fill_(torch.nan if x.is_floating_point() else -1 if x.dtype != torch.bool else 0)


class WritingGraphs:
    """A runtime.graphs.Graphs that records torch operations.

    played: number of replays; failing: the error that the next captures end with.
    """

    def __init__(self) -> None:
        self.current: WrittenDown | None = None
        self.inside = False
        self.written = self.played = 0
        self.failing: Exception | None = None
        self.can_begin = True
        self.forgotten = 0
        self._pool = False
        self._times: dict[bool, list[list[WrittenDown]]] = {False: [], True: []}  # by pool

    @contextmanager
    def aside(self, warm_up: Callable[[], object]) -> Iterator[None]:
        warm_up()
        self.inside = True
        for times in self._times.values():
            times.append([])
        try:
            yield
        finally:
            self.inside = False
            if self.current is not None:
                self._stop().__exit__(None, None, None)

    def begin(self, apart: bool = False) -> None:
        assert self.inside
        assert self.current is None
        self._pool, self.current, Strict.writing = apart, WrittenDown(), True
        self._times[apart][-1].append(self.current)
        self.current.__enter__()

    def end(self) -> Callable[[], None] | None:
        current, mine = self._stop(), self._times[self._pool][-1]
        current.__exit__(None, None, None)
        if self.failing is not None:
            raise self.failing
        play = current.done()
        if play is None:
            return None
        self.written += 1
        pool = self._times[self._pool]

        def played() -> None:
            assert self.current is None, "a graph is played into another"
            self.played += 1
            for graphs in pool:
                if graphs is not mine:
                    for graph in graphs:
                        graph.spoil()
            play()

        return played

    def forget(self) -> None:
        assert not self.inside
        self.forgotten += 1

    def _stop(self) -> WrittenDown:
        assert self.current is not None
        current, self.current, Strict.writing = self.current, None, False
        return current

    def queued(self, queue: Callable[[], None]) -> None:
        """Record queue(), which writes to tensors made in this graph."""
        if self.current is None:
            queue()
        else:
            self.current.also(queue)

    def opaque(self, compute: Callable[[], Made], *given: Tensor) -> Made:
        """Record compute(), which does not run through torch, as one operation."""
        if self.current is None:
            return compute()
        with _on_rubbish():
            found = compute()
        self.current.does(compute, found, list(given))
        return found

    def changing(self, compute: Callable[[], object], *places: Tensor) -> None:
        """Record compute(), which changes `places`."""
        if self.current is None:
            compute()
            return
        with _on_rubbish():
            self.current.remember(places)
            compute()
        self.current.also(compute)


@contextmanager
def _on_rubbish() -> Iterator[None]:
    """Compute without recording; the inputs may be NaN."""
    with _disable_current_modes(), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)
        yield


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
