"""Run the blocks of a decoder whose earlier ones run elsewhere: a stage of a pipeline."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from moeinf.models.base import Experts
from moeinf.models.layers.batches import about_rows
from moeinf.models.layers.decoder import DecodeStep
from moeinf.models.layers.kv_cache import KvCache, Span
from moeinf.models.layers.moe import one_pass


def run_later_blocks(
    step: DecodeStep,
    x: Tensor,
    batch: Sequence[tuple[int, KvCache]],
    experts: Experts,
    piece: int | None = None,
) -> Tensor:
    """Map x [T, D], the inputs of the first block, to the last block's outputs [T, D], in one pass.

    x may be overwritten. batch: the rows of each state, which has room for them. There are no
    recurrent layers. piece, and a pass that fails: see base.Model.extend.
    """
    ends = itertools.accumulate(count for count, _ in batch)
    spans = tuple(
        Span(state, slice(end - count, end), state.length)
        for end, (count, state) in zip(ends, batch, strict=True)
    )
    positions, owner, phase, piece, cuts = about_rows(spans, step.cache.device, piece)
    with torch.inference_mode(), one_pass(experts, owner, phase, cuts):
        x = step.through(x, positions, spans, experts, piece)
    for span in spans:
        span.cache.advance(span.count)
    return x
