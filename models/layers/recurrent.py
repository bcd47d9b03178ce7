"""The memory of recurrent layers for one request: a few tensors per layer, for any text length.

A recurrent state cannot drop its last tokens. So a pass reads one slot and writes another. The
written slot becomes the current one only when the whole pass has succeeded. A few earlier states
are kept as marks, and a truncated request goes back to one of them:

    slot      0      1      2      3      4          marks + 2 of them, each of all layers
            [now ][next ][mark ][mark ][mark ]       which is which changes with every pass

A pass of several tokens leaves a mark some tokens before its end. A template closes an answer in
another way than it opened it. So the next turn of a conversation differs from this one after that
point. A pass of one token leaves no mark, so a long answer does not evict the mark before it.

A pass that checks drafted tokens may keep only the first of them. It keeps every layer's steps,
with their inputs, and repeats those of the accepted tokens from the slot that it read. The result
has the bits of tokens that came alone, and no slot per token is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64  # tokens a layer takes at once; a mark is a multiple of it after a pass's start
_MARGIN = 16  # tokens of a pass after its mark, at least


@dataclass(frozen=True)
class RecurrentLayout:
    """A number of layers, each with one float32 tensor of every shape, then those of `more`."""

    layers: int
    shapes: tuple[tuple[int, ...], ...]  # of a layer, unless `each` has its own
    marks: int = 3
    each: tuple[tuple[tuple[int, ...], ...], ...] = ()  # of every layer, where layers differ
    more: tuple[tuple[tuple[int, ...], ...], ...] = ()  # of each further memory

    @property
    def stored(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The shapes of every layer, then of every further memory."""
        return (self.each or (self.shapes,) * self.layers) + self.more

    @property
    def slots(self) -> int:
        return self.marks + 2

    @property
    def slot_bytes(self) -> int:
        """Bytes of the memory after one token."""
        return 4 * sum(math.prod(shape) for shapes in self.stored for shape in shapes)

    @property
    def bytes(self) -> int:
        """Bytes of one request."""
        return self.slots * self.slot_bytes


class RecurrentMemory:
    """The slots of one request. Memory is touched only as states are written."""

    def __init__(self, layout: RecurrentLayout, device: torch.device) -> None:
        self._layout = layout
        shapes = [[(layout.slots, *shape) for shape in layer] for layer in layout.stored]
        self._tensors = tensors_of_layers(shapes, torch.float32, device)
        self._now: int | None = None  # None: nothing read yet
        self._marks: list[tuple[int, int]] = []  # (tokens, slot), ascending
        self._next = 0
        self._past = 0  # tokens before the open pass
        self._new_mark: tuple[int, int] | None = None
        self._steps: list[tuple[int, Callable[[], None]]] | None = None  # (tokens before, step)

    def begin(self, past: int, count: int) -> None:
        """Open a pass of `count` tokens after `past`; an earlier pass without a commit is void.

        May evict the oldest mark.
        """
        self._new_mark, self._past, self._steps = None, past, None
        if self._now is None:
            assert past == 0, past
            self._now = self._free_slot()
            for tensors in self._tensors:
                for tensor in tensors:
                    tensor[self._now] = 0.0
        self._next = self._free_slot(self._now)
        if count == 1:
            return
        at = past + max(0, count - _MARGIN) // CHUNK * CHUNK
        if at == past:
            if past > 0 and all(tokens != past for tokens, _ in self._marks):
                self._new_mark = past, self._now
        else:
            self._new_mark = at, self._free_slot(self._now, self._next)

    @property
    def places(self) -> tuple[int | None, int]:
        """The slots that the open pass reads and writes."""
        return self._now, self._next

    def is_mark(self, tokens: int) -> bool:
        """Return whether a layer must call `mark` after that many tokens of the request."""
        return self._new_mark is not None and self._new_mark[0] == tokens > self._past

    def mark_within(self, past: int, stop: int) -> int | None:
        """Return the number of tokens for which `is_mark`, if it is among past … stop - 1."""
        at = 0 if self._new_mark is None else self._new_mark[0]
        return at if past <= at < stop and self.is_mark(at) else None

    def read(self, layer: int, past: int) -> tuple[Tensor, ...]:
        """Return the layer's tensors after `past` tokens: the last pass's, or this one's so far.

        The caller must not write the last pass's.
        """
        assert self._now is not None
        slot = self._now if past == self._past else self._next
        return tuple(tensor[slot] for tensor in self._tensors[layer])

    def next(self, layer: int) -> tuple[Tensor, ...]:
        """Return the layer's tensors that this pass writes."""
        return tuple(tensor[self._next] for tensor in self._tensors[layer])

    def mark(self, layer: int, values: Sequence[Tensor]) -> None:
        """Keep the layer's tensors as they are now, where `is_mark`."""
        assert self._new_mark is not None
        for tensor, value in zip(self._tensors[layer], values, strict=True):
            tensor[self._new_mark[1]] = value

    def keep_steps(self) -> None:
        """Keep the steps of the open pass, so that `repeat` can leave out its last tokens."""
        self._steps = []

    def run(self, past: int, step: Callable[[], None]) -> None:
        """Run a layer's step, which reads its memory after `past` tokens and writes the next."""
        if self._steps is not None:
            self._steps.append((past, step))
        step()

    def repeat(self, count: int) -> None:
        """Write the memory after the first `count` tokens of the pass, whose steps were kept."""
        assert self._steps is not None
        kept = [step for past, step in self._steps if past < self._past + count]
        assert len(kept) == count * len(self._layout.stored), "a layer does not use `run`"
        for step in kept:
            step()

    def commit(self) -> None:
        """Make the slot that this pass wrote the current one, after the pass has succeeded."""
        self._steps = None
        if self._new_mark is not None:
            self._marks.append(self._new_mark)
            del self._marks[: -self._layout.marks]
        self._now, self._new_mark = self._next, None

    def keep_mark(self, tokens: int) -> None:
        """Make the state after the last pass, of `tokens` tokens, a mark."""
        assert self._now is not None
        if all(known != tokens for known, _ in self._marks):
            self._marks.append((tokens, self._now))
            del self._marks[: -self._layout.marks]

    def rewind(self, tokens: int) -> int:
        """Go back to the last mark of at most `tokens` tokens; return its number of tokens."""
        self._marks = [mark for mark in self._marks if mark[0] <= tokens]
        if not self._marks:
            self._now = None
            return 0
        length, self._now = self._marks[-1]
        return length

    @property
    def marks(self) -> list[int]:
        """The numbers of tokens that `rewind` can go back to."""
        return [tokens for tokens, _ in self._marks]

    def at(self, tokens: int | None) -> list[Tensor]:
        """Return views of all layers' tensors at a mark; None: after the last pass."""
        slot = self._now if tokens is None else dict(self._marks)[tokens]
        assert slot is not None
        return [tensor[slot] for tensors in self._tensors for tensor in tensors]

    def resume(self, tokens: int) -> list[Tensor]:
        """Forget all but one mark after `tokens`; return its views, which the caller must write."""
        self._now = self._next = 0
        self._marks, self._new_mark = [(tokens, 0)], None
        return self.at(None)

    def copy(self) -> RecurrentMemory:
        """Return an independent copy."""
        copy = RecurrentMemory(self._layout, self._tensors[0][0].device)
        copy._now, copy._marks = self._now, list(self._marks)
        used = {slot for _, slot in self._marks} | ({self._now} if self._now is not None else set())
        for mine, its in zip(self._tensors, copy._tensors, strict=True):
            for source, target in zip(mine, its, strict=True):
                for slot in used:
                    target[slot] = source[slot]
        return copy

    def _free_slot(self, *taken: int) -> int:
        """Return a free slot; evict the oldest mark if no slot is free."""
        while True:
            used = {slot for _, slot in self._marks}.union(taken)
            free = [slot for slot in range(self._layout.slots) if slot not in used]
            if free:
                return free[0]
            self._marks.pop(0)


def tensors_of_layers(
    shapes: Sequence[Sequence[tuple[int, ...]]], dtype: torch.dtype, device: torch.device
) -> list[tuple[Tensor, ...]]:
    """Return one uninitialised tensor for every shape of each layer.

    On a GPU all are views of one allocation. Single ones often have 1 to 10 MiB, which torch rounds
    up by as much as a quarter.
    """

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    if device.type == "cpu":
        return [tuple(empty(*shape) for shape in layer) for layer in shapes]
    sizes = [math.prod(shape) for layer in shapes for shape in layer]
    parts = iter(torch.split(empty(sum(sizes)), sizes))
    return [tuple(next(parts).view(shape) for shape in layer) for layer in shapes]
