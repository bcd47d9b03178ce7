"""Read a few rows of a tensor by ranges, and compare the rows of two checkpoints.

A quantised row is close to its original: the cosine of their angle is above 0.99 for types of at
least 4.5 bits per weight. A row from another place has a cosine near 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moeinf.runtime.checkpoints.checkpoint import TORCH_DTYPE, SourceTensor
from moeinf.runtime.checkpoints.quantised import fp8
from moeinf.runtime.checkpoints.quantised.fused_experts import MXFP4, widen_blocks
from moeinf.runtime.checkpoints.quantised.ggml import bits_of, is_ggml
from moeinf.runtime.checkpoints.quantised.ggml_rows import widen

Read = Callable[[str, int, int], bytes]  # (file name, offset, count) -> the bytes of the file

_ROWS = 4  # at each place
_PLACES = (1 / 3, 3 / 4)  # not the start: several wrong orders keep the first rows
_MOST_BYTES = 1 << 20  # of one range
_MOST_LENGTHS = 1.25  # ratio of the lengths of rows that are alike
_GAP = 64  # rows this close are read in one range


def cosine_limit(tensor: SourceTensor) -> float:
    """Return the cosine that the rows of a tensor of a GGUF file exceed, by its type."""
    stored = tensor if tensor.recipe is None else tensor.recipe.stored[0]
    bits = bits_of(stored.dtype)
    return 0.99 if bits >= 4.5 else 0.9 if bits >= 2 else 0.7


class CosineSimilarity:
    """The cosine of the angle between two sequences of numbers, added block by block."""

    def __init__(self) -> None:
        self._products, self._ours, self._theirs = 0.0, 0.0, 0.0
        self.unlike = False  # of another shape

    def add(self, ours: Tensor, theirs: Tensor) -> None:
        a, b = ours.double().flatten(), theirs.double().flatten()
        self._products += float(a @ b)
        self._ours += float(a @ a)
        self._theirs += float(b @ b)

    @property
    def cosine(self) -> float:
        """The cosine, or 0 for other shapes, other lengths and numbers that are not finite."""
        if self._ours == self._theirs == 0 and not self.unlike:
            return 1.0
        lengths = math.sqrt(self._ours * self._theirs)
        alike = math.isfinite(lengths) and lengths > 0 and not self.unlike
        ratio = math.sqrt(self._ours / self._theirs) if alike else 0.0
        if not 1 / _MOST_LENGTHS < ratio < _MOST_LENGTHS:
            return 0.0
        return self._products / lengths


def compare(
    ours: SourceTensor,
    our_read: Read,
    theirs: SourceTensor,
    their_read: Read,
    found: CosineSimilarity,
) -> bool:
    """Add the similarity of some rows of two tensors; return False if they cannot be read by rows.

    An embedding may have more rows than the other.
    """
    if len(ours.shape) != len(theirs.shape) or ours.shape[1:] != theirs.shape[1:]:
        found.unlike = True
        return True
    if len(ours.shape) == 1 and ours.shape != theirs.shape:
        found.unlike = True
        return True
    high = 1 if theirs.scales is None or theirs.dtype == MXFP4 else theirs.block[0]
    done = False
    for first, count in _places(min(_count(ours), _count(theirs)), high):
        a, b = rows_of(ours, first, count, our_read), rows_of(theirs, first, count, their_read)
        if a is not None and b is not None:
            found.add(a, b)
            done = True
    return done


def _places(rows: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield (first row, number of rows). The first row is a multiple of `high`."""
    if rows <= 2 * _ROWS:
        yield 0, rows
        return
    for part in _PLACES:
        first = int(rows * part) // high * high
        yield first, min(_ROWS, rows - first)


def _count(tensor: SourceTensor) -> int:
    return 1 if len(tensor.shape) == 1 else math.prod(tensor.shape[:-1])


def rows_of(tensor: SourceTensor, first: int, count: int, read: Read) -> Tensor | None:
    """Return `count` rows of a tensor as float32 [count, C]; a vector is one row.

    None if they need more than some ranges of 1 MiB, or for a format that is not read by rows.
    `read` raises its own errors.
    """
    if tensor.recipe is None:
        return _stored_rows(tensor, first, count, read)
    recipe, stored = tensor.recipe, tensor.recipe.stored
    small = sum(part.size_bytes for part in stored) <= _MOST_BYTES
    if small:
        parts = [_whole(part, read) for part in stored]
        made = recipe.make(*parts).reshape(_count(tensor), -1)
        return made[first : first + count]
    if recipe.moves_rows and len(stored) == 1:
        return _moved_rows(tensor, first, count, read)
    if not recipe.sliced:
        return None
    run = _count(tensor) // stored[0].shape[0]  # rows that a slice makes
    begin, end = first // run, -(-(first + count) // run)
    slices = [_slices(part, begin, end, read) for part in stored]
    if any(piece is None for piece in slices):
        return None
    made = recipe.make(*slices).reshape(-1, tensor.shape[-1])
    return made[first - begin * run :][:count]


def _moved_rows(tensor: SourceTensor, first: int, count: int, read: Read) -> Tensor | None:
    """Return rows of a tensor whose recipe reorders them. Only these rows are read."""
    assert tensor.recipe is not None
    stored = tensor.recipe.stored[0]
    places = tensor.recipe.make(torch.arange(_count(tensor)))[first : first + count].tolist()
    low, high = min(places), max(places)
    if high - low < _GAP:
        span = _stored_rows(stored, low, high - low + 1, read)
        return None if span is None else span[[place - low for place in places]]
    rows = [_stored_rows(stored, place, 1, read) for place in places]
    return torch.cat([row for row in rows if row is not None])


def _whole(tensor: SourceTensor, read: Read) -> Tensor:
    found = _stored_rows(tensor, 0, _count(tensor), read)
    assert found is not None  # it is small
    return found.reshape(tensor.shape)


def _slices(tensor: SourceTensor, begin: int, end: int, read: Read) -> Tensor | None:
    """Return the slices begin … end-1 along the outermost side, as float32."""
    rows = _count(tensor) // tensor.shape[0]
    found = _stored_rows(tensor, begin * rows, (end - begin) * rows, read)
    return None if found is None else found.reshape(end - begin, *tensor.shape[1:])


def _stored_rows(tensor: SourceTensor, first: int, count: int, read: Read) -> Tensor | None:
    """Return rows as they lie in a file, widened to float32, or None."""
    total, step = _count(tensor), 1
    if tensor.pick is not None:
        if tensor.pick.transposed or len(tensor.shape) == 1:
            return None
        total, step = tensor.pick.shape[0], tensor.pick.step
        first = tensor.pick.first + first * step
    span = (count - 1) * step + 1
    size = tensor.size_bytes // total
    if size * span > _MOST_BYTES:
        return None
    data = bytearray(read(tensor.path.name, tensor.offset + first * size, span * size))
    raw = torch.frombuffer(data, dtype=torch.uint8).view(span, size)
    wide = _widened(tensor, raw, first, span, total, read)
    return None if wide is None else wide[::step]


def _widened(
    tensor: SourceTensor, raw: Tensor, first: int, count: int, total: int, read: Read
) -> Tensor | None:
    """Widen stored rows, uint8 [count, bytes of a row]; None for other formats."""
    if tensor.scales is None:
        known = is_ggml(tensor.dtype) or tensor.dtype in TORCH_DTYPE
        return widen(raw, tensor.dtype, _factors(tensor, count, read)) if known else None
    scales = tensor.scales
    if tensor.dtype == MXFP4:
        size = scales.size_bytes // total
        data = read(scales.path.name, scales.offset + first * size, count * size)
        codes = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(count, size)
        return widen_blocks(raw.view(count, size, -1), codes)
    if tensor.dtype != "F8_E4M3" or scales.dtype not in TORCH_DTYPE or len(scales.shape) != 2:
        return None
    high = tensor.block[0]
    size = scales.size_bytes // scales.shape[0]
    begin, end = first // high, -(-(first + count) // high)
    data = read(scales.path.name, scales.offset + begin * size, (end - begin) * size)
    factors = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(end - begin, size)
    wide = widen(factors, scales.dtype)
    weights = raw.view(torch.float8_e4m3fn)
    return fp8.widen(weights, wide, tensor.block, first - begin * high)


def _factors(tensor: SourceTensor, rows: int, read: Read) -> Tensor | None:
    """Return the factor of an NVFP4 tensor for each row, float32 [rows], or None for 1."""
    factor = tensor.factor
    if factor is None:
        return None
    data = bytearray(read(factor.path.name, factor.offset, factor.size_bytes))
    return torch.frombuffer(data, dtype=torch.float32).expand(rows)
