"""The KV cache of one request, and how the rows of a pass map onto it.

A cache holds planes of vectors per layer, with one vector per token.

One layer of a cache, with `capacity` columns of which the first `length` hold tokens:

    grouped-query attention   keys   [kv_heads, capacity, head_dim]
                              values [kv_heads, capacity, value_dim]
    latent attention (MLA)    latent [1, capacity, kv_lora_rank + rope_dim]: compressed key-value,
                              then the rotated key that all heads share

After all layers comes a plane for each indexer (indexer.py): keys [1, capacity, index_head_dim].
Then come coarse planes, with one row for several tokens (compressor.py): [1, capacity / n, width].

A cache in q8 holds rows of kv_q8.py, as bytes, in place of [head_dim] values and so on.
The memory of recurrent layers does not grow with the text: see recurrent.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from moeinf.models.base import KvForm
from moeinf.models.layers.kv_q8 import quantised, row_bytes, widened
from moeinf.models.layers.recurrent import RecurrentLayout, RecurrentMemory, tensors_of_layers

Planes = tuple[tuple[int, int], ...]  # of a layer: heads and width of each


@dataclass(frozen=True)
class CacheLayout:
    """The planes of every layer with attention, as (heads, width) each.

    dtype: of the values that attention gets, whatever the form in which they are stored.
    """

    layers: int
    planes: Planes  # of a layer, unless `each` has its own
    dtype: torch.dtype
    device: torch.device
    recurrent: RecurrentLayout | None = None  # of the other layers
    form: KvForm = "full"
    each: tuple[Planes, ...] = ()  # the planes of every layer, where layers differ
    indexers: tuple[int, ...] = ()  # the width of each indexer's keys
    coarse: tuple[tuple[int, int], ...] = ()  # width and tokens per row of each coarse plane

    @property
    def stored(self) -> tuple[Planes, ...]:
        """The planes of each layer, indexer and coarse row, as stored: (heads, items of a row)."""
        each = self.each or (self.planes,) * self.layers
        each += tuple(((1, width),) for width in self.indexers)
        each += tuple(((1, width),) for width, _ in self.coarse)
        if self.form == "full":
            return each
        return tuple(tuple((heads, row_bytes(width)) for heads, width in p) for p in each)

    @property
    def stored_dtype(self) -> torch.dtype:
        """The type of the stored items."""
        return self.dtype if self.form == "full" else torch.uint8

    @property
    def tokens_per_row(self) -> tuple[int, ...]:
        """How many tokens share a row of the planes, for each item of `stored`."""
        single = (1,) * (self.layers + len(self.indexers))
        return single + tuple(tokens for _, tokens in self.coarse)

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token of all layers together, rounded up to whole items."""
        rates = Fraction(0)
        for planes, tokens in zip(self.stored, self.tokens_per_row, strict=True):
            rates += Fraction(sum(heads * width for heads, width in planes), tokens)
        return math.ceil(rates) * self.stored_dtype.itemsize

    def rows_of(self, start: int, stop: int) -> list[int]:
        """Return the rows of each plane in `KvCache.columns`."""
        return [
            stop // tokens - start // tokens
            for planes, tokens in zip(self.stored, self.tokens_per_row, strict=True)
            for _ in planes
        ]

    def bytes_of(self, start: int, stop: int) -> int:
        """Return the bytes of `KvCache.columns`."""
        sizes = [heads * width for planes in self.stored for heads, width in planes]
        rows = self.rows_of(start, stop)
        items = sum(size * count for size, count in zip(sizes, rows, strict=True))
        return items * self.stored_dtype.itemsize

    @property
    def fixed_bytes(self) -> int:
        """Bytes of a request that do not grow with its tokens."""
        return 0 if self.recurrent is None else self.recurrent.bytes


class KvCache:
    """A `State`. Memory is reserved at once; its pages are touched only as tokens arrive."""

    def __init__(self, layout: CacheLayout, capacity: int) -> None:
        """Reserve memory for `capacity` tokens; raise ValueError if it is below 1."""
        if capacity < 1:
            raise ValueError(f"the context must be at least 1, got {capacity}")
        self.layout = layout
        self.request = 0
        self._capacity = capacity
        self._length = 0
        self.recurrent: RecurrentMemory | None = None
        if layout.recurrent is not None:
            self.recurrent = RecurrentMemory(layout.recurrent, layout.device)
        shapes = [
            [(heads, capacity // tokens, width) for heads, width in planes]
            for planes, tokens in zip(layout.stored, layout.tokens_per_row, strict=True)
        ]
        self._layers = tensors_of_layers(shapes, layout.stored_dtype, layout.device)

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._length

    @property
    def capacity(self) -> int:
        """Tokens it can hold."""
        return self._capacity

    def truncate(self, length: int) -> None:
        """See base.State. Raises ValueError when it holds fewer than `length` tokens."""
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot keep {length} of {self._length} tokens")
        if self.recurrent is not None and length < self._length:
            length = self.recurrent.rewind(length)
        self._length = length

    def snapshot(self) -> KvCache:
        """Return an independent copy of the same capacity; only the tokens held are copied."""
        copy = KvCache(self.layout, self._capacity)
        copy.request, copy._length = self.request, self._length
        if self.recurrent is not None:
            copy.recurrent = self.recurrent.copy()
        held = 0, self._length
        for source, target in zip(self.columns(*held), copy.columns(*held), strict=True):
            target.copy_(source)
        return copy

    def write(self, layer: int, start: int, *rows: Tensor) -> tuple[Tensor, ...]:
        """Store rows [T, heads, width], one tensor per plane, as the tokens from `start` on.

        Returns views [heads, start + T, stored width] of each plane, which `values` reads. The
        length does not change, so a failed pass leaves the state unchanged. A pass may write its
        tokens in several pieces.
        """
        stop = start + len(rows[0])
        assert self._length <= stop <= self._capacity, (start, stop)
        for plane, new in zip(self._layers[layer], rows, strict=True):
            stored = new if self.layout.form == "full" else quantised(new)
            plane[:, start:stop] = stored.transpose(0, 1)
        return tuple(plane[:, :stop] for plane in self._layers[layer])

    def write_coarse(self, plane: int, first: int, rows: Tensor) -> None:
        """Store rows [n, width] of a coarse plane, from its row `first` on; see `planes`.

        A row belongs to the text once all its tokens do.
        """
        stored = rows if self.layout.form == "full" else quantised(rows)
        self._layers[plane][0][0, first : first + len(rows)] = stored

    def values(self, stored: Tensor, width: int) -> Tensor:
        """Return the values [..., width] of stored rows; a copy in q8, else the rows."""
        return stored if self.layout.form == "full" else widened(stored, width, self.layout.dtype)

    def planes(self, layer: int) -> tuple[Tensor, ...]:
        """Return the layer's planes [heads, capacity, stored width].

        They are for code that accesses them itself and does not use `write`.
        """
        return self._layers[layer]

    def columns(self, start: int, stop: int) -> list[Tensor]:
        """Return views [heads, rows, stored width] of all planes, layer by layer.

        They have stop - start rows. Coarse planes have those whose last token is among these.
        """
        assert 0 <= start <= stop <= self._capacity, (start, stop)
        return [
            plane[:, start // tokens : stop // tokens]
            for planes, tokens in zip(self._layers, self.layout.tokens_per_row, strict=True)
            for plane in planes
        ]

    @property
    def cuts(self) -> tuple[int, ...] | None:
        """The lengths at which recurrent layers have their memory; None: they do not exist."""
        if self.recurrent is None:
            return None
        return tuple(sorted({*self.recurrent.marks, self._length} - {0}))

    def memory_at(self, tokens: int) -> list[Tensor]:
        """Return views of the recurrent layers' memory after `tokens`, which is one of the cuts."""
        assert self.recurrent is not None
        return self.recurrent.at(None if tokens == self._length else tokens)

    def resume(self, length: int) -> list[Tensor]:
        """Take over `length` tokens, whose columns the caller has written.

        Returns views of the recurrent layers' memory, which the caller must write now; [] without
        such layers.
        """
        assert 0 < length <= self._capacity, length
        self._length = length
        return [] if self.recurrent is None else self.recurrent.resume(length)

    @property
    def places(self) -> tuple[int | None, ...]:
        """The recurrent slots that the open pass reads and writes; () without such layers.

        In the planes a pass of one token always writes the next column.
        """
        return () if self.recurrent is None else self.recurrent.places

    def begin(self, tokens: int) -> None:
        """Open a pass of `tokens` tokens; it has no effect until `advance`."""
        if self.recurrent is not None:
            self.recurrent.begin(self._length, tokens)

    def mark(self) -> None:
        """Make `truncate` able to come back to this length exactly, until later marks evict it."""
        if self.recurrent is not None and self._length:
            self.recurrent.keep_mark(self._length)

    def keep_steps(self) -> None:
        """Make `repeat` possible in the open pass."""
        if self.recurrent is not None:
            self.recurrent.keep_steps()

    def repeat(self, tokens: int) -> None:
        """Forget the tokens of the open pass after its first `tokens`, before `advance`."""
        if self.recurrent is not None:
            self.recurrent.repeat(tokens)

    def advance(self, tokens: int) -> None:
        """Close the pass: count tokens that every layer has written."""
        assert self._length + tokens <= self._capacity
        if self.recurrent is not None:
            self.recurrent.commit()
        self._length += tokens


@dataclass(frozen=True)
class Span:
    """The rows of one request in a pass; they become its tokens from `past` on."""

    cache: KvCache
    rows: slice
    past: int

    @property
    def count(self) -> int:
        """Rows, at least one."""
        return int(self.rows.stop - self.rows.start)

    def one_by_one(self) -> tuple[Span, ...]:
        """Return a span for each row: a decoded token, which sees the rows before it."""
        return tuple(
            Span(self.cache, slice(row, row + 1), self.past + row - self.rows.start)
            for row in range(self.rows.start, self.rows.stop)
        )


@dataclass(frozen=True)
class PassRows:
    """All rows of a pass, with their requests, positions and rope angles.

    positions [T] int64: the place of each row in its text. cos and sin: [T, rope_dim/2].
    """

    spans: tuple[Span, ...]
    positions: Tensor
    cos: Tensor
    sin: Tensor
    others: tuple[tuple[Tensor, Tensor], ...] = ()  # cos and sin of a decoder's further ropes
    chosen: list[Tensor] = field(default_factory=list)  # by an earlier layer: see sparse_mla.py
    token_ids: Tensor | None = None  # [T] int64, for routers that choose by them

    @property
    def ids(self) -> Tensor:
        """The rows' token ids [T] int64."""
        assert self.token_ids is not None
        return self.token_ids

    def turned_by(self, rope: int) -> PassRows:
        """Return the same rows with the angles of another rope; 0 is the first one."""
        if rope == 0:
            return self
        cos, sin = self.others[rope - 1]
        return replace(self, cos=cos, sin=sin)

    def pieces(self, tokens: int) -> list[Piece]:
        """Divide the pass: see `divided`."""
        return [
            Piece(
                at,
                PassRows(
                    (span,),
                    self.positions[at],
                    self.cos[at],
                    self.sin[at],
                    tuple((cos[at], sin[at]) for cos, sin in self.others),
                    token_ids=None if self.token_ids is None else self.token_ids[at],
                ),
            )
            for at, span in divided(self.spans, tokens)
        ]


class Piece(NamedTuple):
    """Rows of a pass that are computed together, and the same rows as a pass of their own."""

    at: slice
    rows: PassRows


def divided(spans: Sequence[Span], tokens: int) -> list[tuple[slice, Span]]:
    """Divide a pass: up to `tokens` tokens of one request each, from its first one on.

    Returns the rows in the pass, and the span that they are in a pass of their own.
    """
    found: list[tuple[slice, Span]] = []
    for span in spans:
        for start in range(span.rows.start, span.rows.stop, tokens):
            at = slice(start, min(start + tokens, span.rows.stop))
            past = span.past + start - span.rows.start
            found.append((at, Span(span.cache, slice(0, at.stop - start), past)))
    return found
