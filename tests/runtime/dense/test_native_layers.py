"""Decoder layers of every family: which are one native call, and their bits.

docs/performance/token.md has the table.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moeinf.models.base import Embedding, KvForm, Linear, MemoryTable, Phase, Piece
from moeinf.models.families import FAMILIES, family_of
from moeinf.models.layers.decoder import Block, Decoder, Layer
from moeinf.models.layers.moe import Done
from moeinf.runtime.dense.cpu_backend import CpuMath
from moeinf.runtime.dense.cpu_block import NativeBlock, NativeBlocks, why_in_pieces
from moeinf.runtime.dense.cpu_fused import tuned
from tests.tiny import TINY, tiny_config

PAGE = Path(__file__).parents[3] / "docs" / "performance" / "token.md"
HEAD = "| one call computes | of families | without |\n|---|---|---|\n"
AMOUNTS = ("a whole layer", "all but attention", "all but experts", "router alone", "nothing")
OTHERS = {"nllb-moe", "switch_transformers"}  # encoder-decoders have no such layers


class Sums:
    """`Experts` whose output depends on everything that a layer submits."""

    wants_hints = False

    def begin_pass(self, rows: Tensor, phase: Phase, pieces: Sequence[slice] = ()) -> None: ...

    def end_pass(self, accepted_rows: Tensor | None = None) -> None: ...

    def hint(self, layer: int, ids: Tensor, scores: Tensor) -> None: ...

    def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Done:
        return Done(x * (ids.sum(1, keepdim=True) / 8 + weights.sum(1, keepdim=True)).to(x.dtype))


class Weights:
    """`Parts` of random weights in bfloat16. joins: blocks are native calls, not only pieces."""

    def __init__(self, joins: bool = True, kv: KvForm = "full") -> None:
        self._joins, self.kv = joins, kv

    def tensor(self, name: str, *shape: int) -> Tensor:
        if name.endswith("tid2eid"):  # numbers of experts
            return torch.zeros(shape, dtype=torch.int64)
        draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(shape, generator=draw) / shape[-1] ** 0.5
        return (noise if len(shape) > 1 else 1 + noise / 4).bfloat16()

    def linear(
        self, prefix: str, out_features: int, in_features: int, bias: bool = False
    ) -> Linear:
        offset = self.tensor(prefix, out_features) if bias else None
        return CpuMath().plain_linear(self.tensor(prefix, out_features, in_features), offset)

    def embedding(self, prefix: str, count: int, width: int) -> Embedding:
        return Embedding.of(self.tensor(prefix, count, width))

    def table(self, prefix: str, count: int, width: int) -> MemoryTable:
        return MemoryTable(self.tensor(prefix, count, width))

    def tuned(self, piece: Piece) -> Piece:
        return CpuMath().tuned(piece) if self._joins else tuned(piece)


def families() -> Iterator[tuple[str, str]]:
    """Yield each family of decoders and one of its tiny configurations."""
    seen = set(OTHERS)
    for name in TINY:
        kind = family_of(tiny_config(name).to_dict()).model_type
        if kind not in seen:
            seen.add(kind)
            yield kind, name
    assert seen == {family.model_type for family in FAMILIES.values()}


def built(name: str, parts: Weights) -> Decoder:
    """Return a model of TINY."""
    values = tiny_config(name).to_dict()
    model = (family := family_of(values)).build(family.parse(values), parts)
    assert isinstance(model, Decoder)
    return model


def kind_of(block: NativeBlock | Layer) -> tuple[str, str]:
    """Return what one call computes of a block, and why not the rest."""
    if not isinstance(block, NativeBlock):
        if isinstance(block, Block):
            return "nothing", ", ".join(dict.fromkeys(why_in_pieces(block)))
        return "nothing", type(block).__name__
    whole, attends = block.joins, block.core is not None
    amount = AMOUNTS[0 if whole and attends else 1 if whole else 2 if attends else 3]
    return amount, ", ".join(why_in_pieces(block.block))


def layers() -> Iterator[tuple[str, NativeBlock | Layer]]:
    """Yield the family and each block of one tiny configuration of every family of decoders."""
    for kind, name in families():
        for block in built(name, Weights()).body.blocks:
            inner = block.blocks if isinstance(block, NativeBlocks) else [block]
            yield from ((kind, one) for one in inner)


def table() -> str:
    """Return the table in Markdown."""
    rows: dict[tuple[str, str], dict[str, None]] = {}
    for family, block in layers():
        rows.setdefault(kind_of(block), {})[family] = None
    lines = [
        f"| {amount} | {', '.join(sorted(rows[amount, reason]))} | {reason} |\n"
        for amount, reason in sorted(rows, key=lambda row: (AMOUNTS.index(row[0]), row[1]))
    ]
    return HEAD + "".join(lines)


def test_the_table_is_true() -> None:
    text = PAGE.read_text()
    start = text.index(HEAD)
    found = text[start : text.index("\n\n", start) + 1]
    assert found == table(), f"docs/performance/token.md needs:\n{table()}"


@pytest.mark.parametrize("kv", ["full", "q8"])
@pytest.mark.parametrize("name", [name for _, name in families()])
def test_the_bits_of_the_pieces(name: str, kv: KvForm) -> None:
    """Prompts, then tokens of two requests together, alone, and beside a prompt."""
    found = []
    for joins in (True, False):
        model, passes = built(name, Weights(joins, kv)), []
        states = [model.new_state(20) for _ in range(2)]
        for batch in ([[3, 5, 7], [11]], [[2], [4]], [[6], [8]], [[9], []], [[1], [2, 3]]):
            given = [(ids, states[at]) for at, ids in enumerate(batch) if ids]
            passes.append(model.extend(given, Sums()))
        found.append(torch.cat(passes))
    assert torch.equal(*found)
    assert found[0].isfinite().all()
    assert float(found[0].std()) > 0.01
