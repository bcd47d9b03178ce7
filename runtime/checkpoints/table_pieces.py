"""Find the pieces of a table of rows in a checkpoint: X.weight, or X.shard_0.weight and so on."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint, SourceTensor

_PIECE = re.compile(r"(.+?)(?:\.shard_([0-9]{1,6}))?\.weight")


class Piece(NamedTuple):
    """The name of a tensor: the `number`-th piece of a table."""

    table: str
    number: int


def piece_of(name: str, tables: Collection[str]) -> Piece | None:
    """Return which piece of one of the tables a tensor is; None for another tensor."""
    match = _PIECE.fullmatch(name)
    if match is None or match[1] not in tables:
        return None
    return Piece(match[1], int(match[2] or 0))


def in_order(table: str, rows: int, pieces: Mapping[int, SourceTensor]) -> tuple[SourceTensor, ...]:
    """Return all pieces of a table, by number. Raises BadCheckpoint unless they have its rows."""
    found = tuple(pieces[number] for number in sorted(pieces))
    there = sum(piece.shape[0] for piece in found)
    if there != rows or sorted(pieces) != list(range(len(pieces))):
        raise BadCheckpoint(
            f"the {len(found)} pieces of {table!r} have {there} rows, the config says {rows}"
        )
    return found
