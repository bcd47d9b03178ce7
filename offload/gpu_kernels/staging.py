"""Move few bytes between host and device through pinned memory that is used again.

A copy from pageable memory first goes through a buffer of the driver, and the host waits for it. A
layer with misses moves ids, a hint, a row of activations and some results, each a few KiB.

    up      tensors are packed into a part of the ring, which goes up in one copy
    down    tensors are copied side by side into the buffer; one wait serves all of them

The ring has two halves. A half is written again only after the copies out of it have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

_HALF_BYTES = 1 << 20
_DOWN_BYTES = 4 << 20  # logits of 500,000 tokens in bf16, or of 4 rows
_ALIGN_BYTES = 16


class Mark(Protocol):
    """A place in the stream: torch.cuda.Event."""

    def record(self) -> None:
        """Mark what is queued so far."""
        ...

    def synchronize(self) -> None:
        """Wait until the marked work has ended."""
        ...


class Staging:
    """Pinned buffers of one device."""

    def __init__(
        self, place: torch.device, pinned: Callable[[int], Tensor], mark: Callable[[], Mark]
    ) -> None:
        """Use `place`. pinned: allocates so many bytes, uint8. mark: makes a Mark."""
        self._place, self._pinned, self._mark = place, pinned, mark
        self._halves: list[Tensor] = []  # allocated on first use
        self._down: Tensor | None = None
        self._left: list[Mark] = []  # recorded when a half was left
        self._half, self._at = 0, 0

    def up(self, *xs: Tensor) -> tuple[Tensor, ...] | None:
        """Queue one copy of the tensors; return them on the device. None: they are too large."""
        spans, size = _spans(xs)
        if size > _HALF_BYTES:
            return None
        if not self._halves:
            self._halves = [self._made(_HALF_BYTES) for _ in range(2)]
            self._left = [self._mark() for _ in self._halves]
        if self._at + size > _HALF_BYTES:
            self._left[self._half].record()
            self._half, self._at = 1 - self._half, 0
            self._left[self._half].synchronize()
        host = self._halves[self._half][self._at : self._at + size]
        self._at += size
        for x, mine in zip(xs, _parts(host, xs, spans), strict=True):
            mine.copy_(x)
        return tuple(_parts(host.to(self._place, non_blocking=True), xs, spans))

    def down(self, wait: Callable[[], None], *xs: Tensor) -> tuple[Tensor, ...] | None:
        """Return the tensors in host memory. wait: until everything that is queued has run.

        None: they are too large.
        """
        spans, size = _spans(xs)
        if size > _DOWN_BYTES:
            return None
        if self._down is None:
            self._down = self._made(_DOWN_BYTES)
        mine = _parts(self._down, xs, spans)
        for x, into in zip(xs, mine, strict=True):
            into.copy_(x, non_blocking=True)
        wait()
        return tuple(into.clone() for into in mine)

    def _made(self, size_bytes: int) -> Tensor:
        with torch.inference_mode(False):  # else it could be written in inference mode only
            return self._pinned(size_bytes)


def _spans(xs: Sequence[Tensor]) -> tuple[list[slice], int]:
    """Return the bytes of each tensor in a common buffer, and the size of the buffer."""
    spans, at = list[slice](), 0
    for x in xs:
        size = x.numel() * x.element_size()
        spans.append(slice(at, at + size))
        at += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
    return spans, at


def _parts(buffer: Tensor, xs: Sequence[Tensor], spans: Sequence[slice]) -> list[Tensor]:
    """Return the parts of a buffer, uint8, in the types and shapes of the tensors."""
    return [buffer[span].view(x.dtype).view(x.shape) for x, span in zip(xs, spans, strict=True)]
