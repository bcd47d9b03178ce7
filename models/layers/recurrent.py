"""What recurrent layers remember of one request: a few tensors per layer, however long the text.

Does not know what the tensors mean, nor attention.

A recurrent state cannot forget its last tokens. So a pass reads one slot and writes another, which
takes its place only when the whole pass has succeeded, and a few earlier states are kept as marks
that a truncated request goes back to:

    slot      0      1      2      3      4          marks + 2 of them, each of all layers
            [now ][next ][mark ][mark ][mark ]       which is which changes with every pass

A pass of several tokens leaves a mark behind, some tokens before its end: where the next turn of a
conversation parts from this one (a template closes an answer otherwise than it opened it). A pass
of one token leaves none, so that a long answer does not push out the mark before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64  # tokens that a layer may take at once; marks lie so many after the start of a pass
_MARGIN = 16  # tokens of a pass after its mark, at least


@dataclass(frozen=True)
class RecurrentLayout:
    """layers, each with one float32 tensor of every shape."""

    layers: int
    shapes: tuple[tuple[int, ...], ...]
    marks: int = 3

    @property
    def slots(self) -> int:
        return self.marks + 2

    @property
    def bytes(self) -> int:
        """Of one request."""
        return self.slots * self.layers * 4 * sum(math.prod(shape) for shape in self.shapes)


class RecurrentMemory:
    """The slots of one request. Memory is touched only as states are written."""

    def __init__(self, layout: RecurrentLayout, device: torch.device) -> None:
        self._layout = layout
        shapes = [(layout.slots, *shape) for shape in layout.shapes]
        self._tensors = tensors_of_layers(layout.layers, shapes, torch.float32, device)
        self._now: int | None = None  # None: nothing read yet
        self._marks: list[tuple[int, int]] = []  # (tokens, slot), ascending
        self._next = 0
        self._new_mark: tuple[int, int] | None = None

    def begin(self, past: int, count: int) -> None:
        """Opens a pass of `count` tokens after `past`; an earlier one without a commit is void.

        May give up the oldest mark.
        """
        self._new_mark = None
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

    @property
    def mark_at(self) -> int | None:
        """How many tokens the request has where this pass is to leave a mark behind."""
        return None if self._new_mark is None else self._new_mark[0]

    def read(self, layer: int) -> tuple[Tensor, ...]:
        """The layer's tensors as the last pass left them; not to be written."""
        assert self._now is not None
        return tuple(tensor[self._now] for tensor in self._tensors[layer])

    def next(self, layer: int) -> tuple[Tensor, ...]:
        """Where this pass writes the layer's tensors."""
        return tuple(tensor[self._next] for tensor in self._tensors[layer])

    def mark(self, layer: int, values: Sequence[Tensor]) -> None:
        """Keeps the layer's tensors as they are after `mark_at` tokens."""
        assert self._new_mark is not None
        for tensor, value in zip(self._tensors[layer], values, strict=True):
            tensor[self._new_mark[1]] = value

    def commit(self) -> None:
        """The pass has succeeded: what it wrote is what the request remembers."""
        if self._new_mark is not None:
            self._marks.append(self._new_mark)
            del self._marks[: -self._layout.marks]
        self._now, self._new_mark = self._next, None

    def rewind(self, tokens: int) -> int:
        """Goes back to the last mark of at most `tokens` tokens; returns how many it has."""
        self._marks = [mark for mark in self._marks if mark[0] <= tokens]
        if not self._marks:
            self._now = None
            return 0
        length, self._now = self._marks[-1]
        return length

    def copy(self) -> RecurrentMemory:
        """An independent one."""
        copy = RecurrentMemory(self._layout, self._tensors[0][0].device)
        copy._now, copy._marks = self._now, list(self._marks)
        used = {slot for _, slot in self._marks} | ({self._now} if self._now is not None else set())
        for mine, its in zip(self._tensors, copy._tensors, strict=True):
            for source, target in zip(mine, its, strict=True):
                for slot in used:
                    target[slot] = source[slot]
        return copy

    def _free_slot(self, *taken: int) -> int:
        """A slot that holds nothing of use; the oldest mark goes when there is none."""
        while True:
            used = {slot for _, slot in self._marks}.union(taken)
            free = [slot for slot in range(self._layout.slots) if slot not in used]
            if free:
                return free[0]
            self._marks.pop(0)


def tensors_of_layers(
    layers: int, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> list[tuple[Tensor, ...]]:
    """One tensor of every shape for each layer, unspecified. On a GPU all are one piece: torch
    rounds pieces of 1 to 10 MiB, as single ones often are, up by as much as a quarter."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    if device.type == "cpu":
        return [tuple(empty(*shape) for shape in shapes) for _ in range(layers)]
    sizes = [math.prod(shape) for shape in shapes] * layers
    parts = iter(torch.split(empty(sum(sizes)), sizes))
    return [tuple(next(parts).view(shape) for shape in shapes) for _ in range(layers)]
