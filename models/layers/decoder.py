"""A pre-norm decoder: embedding, blocks of attention and feed-forward, final norm, logits.

A family's file builds the blocks. Experts are used only through the `Experts` interface.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from moeinf.models.base import Embedding, Experts, Linear, MoeShape, Parts, State
from moeinf.models.config import (
    MAX_CONTEXT,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    Fields,
)
from moeinf.models.layers.batches import about_rows, check_batch
from moeinf.models.layers.half_blocks import FfnBlock, MixerBlock
from moeinf.models.layers.hyper_block import HyperBlock
from moeinf.models.layers.hyper_connection import StreamBlock
from moeinf.models.layers.kv_cache import (
    CacheLayout,
    KvCache,
    PassRows,
    Piece,
    Planes,
    Span,
)
from moeinf.models.layers.moe import SparseFfn, one_pass
from moeinf.models.layers.norms import RmsNorm, WideRmsNorm, centred_norm, layer_norm
from moeinf.models.layers.parallel_block import ParallelBlock
from moeinf.models.layers.recurrent import RecurrentLayout
from moeinf.models.layers.rope import Rope, RopeConfig, parse_rope
from moeinf.models.layers.sandwich_block import SandwichBlock
from moeinf.models.layers.tuning import tuned_blocks
from moeinf.models.quantisation import refuse_quantised

_HEAD_ROWS = 64  # rows of logits computed at once


@dataclass(frozen=True)
class BodyConfig:
    """The values that every decoder's config has."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    norm_eps: float
    max_context: int
    tied_embeddings: bool
    rope: RopeConfig
    layer_norm: bool = False  # the final norm is a LayerNorm, with a bias
    centred_norm: bool = False  # the final norm stores its weight minus 1
    wide_norm: bool = False  # the final norm is a WideRmsNorm
    head_bias: bool = False  # on lm_head
    embedding_scale: float = 1.0  # embeddings are multiplied with it
    logits_scale: float = 1.0  # logits are divided by it
    logits_cap: float | None = None  # then a tanh keeps them within ± this

    @property
    def usual_context(self) -> int | None:
        """See base.Model. A longrope state with more room rotates every text by other factors."""
        original = self.rope.original_context
        return original if self.rope.kind == "longrope" and original < self.max_context else None


class HasBody(Protocol):
    """The config of any decoder."""

    @property
    def body(self) -> BodyConfig: ...


def parse_body(
    fields: Fields,
    *,
    default_theta: float,
    default_eps: float,
    default_partial: float | None = None,
) -> BodyConfig:
    """Read the values that every decoder has.

    default_partial: see rope.parse_rope. Raises ModelDataError, also for an activation other than
    silu and for quantised weights that cannot be read.
    """
    fields.choice("hidden_act", default="silu", known=("silu", "swish"))
    refuse_quantised(fields)
    max_context = fields.integer("max_position_embeddings", high=MAX_CONTEXT)
    return BodyConfig(
        vocab=fields.integer("vocab_size", high=MAX_VOCAB),
        hidden=fields.integer("hidden_size", high=MAX_WIDTH),
        layers=fields.integer("num_hidden_layers", high=MAX_LAYERS),
        heads=fields.integer("num_attention_heads", high=MAX_HEADS),
        norm_eps=fields.number("rms_norm_eps", low=0.0, high=1.0, default=default_eps),
        max_context=max_context,
        tied_embeddings=fields.flag("tie_word_embeddings"),
        rope=parse_rope(fields, max_context, default_theta, default_partial),
    )


@dataclass(frozen=True)
class Block:
    """x += residual · attention(norm(x)); x += residual · ffn(norm(x))."""

    attention_norm: Callable[[Tensor], Tensor]
    attention: Callable[[Tensor, PassRows], Tensor]
    ffn_norm: Callable[[Tensor], Tensor]
    ffn: Callable[[Tensor, Experts], Tensor]
    residual: float = 1.0

    def __call__(self, x: Tensor, rows: PassRows, experts: Experts) -> Tensor:
        """Map [T, D] to [T, D]."""
        x = self.attended(x, rows)
        return self.plus(x, self.ffn(self.ffn_norm(x), experts))

    def over(self, x: Tensor, pieces: Sequence[Piece], experts: Experts) -> Tensor:
        """Map x [T, D], which is overwritten, to [T, D]: each piece as if it were a pass."""
        if not isinstance(self.ffn, SparseFfn):
            for at, rows in pieces:
                x[at] = self(x[at], rows, experts)
            return x
        normed = torch.empty_like(x)
        for at, rows in pieces:
            x[at] = self.attended(x[at], rows)
            normed[at] = self.ffn_norm(x[at])
        return self.plus(x, self.ffn.over(normed, [at for at, _ in pieces], experts))

    def attended(self, x: Tensor, rows: PassRows) -> Tensor:
        """Return x + residual · attention(norm(x))."""
        return self.plus(x, self.attention(self.attention_norm(x), rows))

    def plus(self, x: Tensor, change: Tensor) -> Tensor:
        """Return x + residual · change."""
        return x + change if self.residual == 1.0 else x + change * self.residual


class MoreBlocks(Protocol):
    """Blocks that follow a decoder's own, wherever they are computed. See Block."""

    def __call__(self, x: Tensor, rows: PassRows, experts: Experts) -> Tensor: ...

    def over(self, x: Tensor, pieces: Sequence[Piece], experts: Experts) -> Tensor: ...


Ahead = Callable[[Tensor, Sequence[Span]], None]  # ids [T] and spans of a pass
Watcher = Callable[[Sequence[tuple[Sequence[int], State]], Tensor], None]  # before the last norm
Layer = Block | ParallelBlock | SandwichBlock | HyperBlock | StreamBlock | MixerBlock | FfnBlock


@dataclass(frozen=True)
class DecodeStep:
    """A token of each request, from its id to logits.

    Only the contents of tensors differ between two tokens of a text, if attention's cores read the
    position from a tensor. Such a step can be captured and replayed.
    """

    embedding: Embedding
    embedding_scale: float
    rope: Rope
    blocks: tuple[Layer | MoreBlocks, ...]
    norm: Callable[[Tensor], Tensor]
    head: Linear
    cache: CacheLayout
    others: tuple[Rope, ...] = ()  # see PassRows.turned_by
    streams: int = 0  # of hyper-connections: hidden states are [T, streams, D]; 0: they are [T, D]
    ahead: tuple[Ahead, ...] = ()  # called when the tokens of a pass are known

    def __call__(
        self, ids: Tensor, positions: Tensor, spans: tuple[Span, ...], experts: Experts
    ) -> Tensor:
        """Map ids and positions [T] int64 to unscaled logits [T, vocab], on the weights' device."""
        return self.head(self.norm(self.states(ids, positions, spans, experts)))

    def embedded(self, ids: Tensor) -> Tensor:
        """Map ids [T] to the first layer's inputs: [T, D], or [T, streams, D]."""
        rows = self.embedding.rows(ids)
        if self.embedding_scale != 1.0:
            rows = rows * self.embedding_scale
        return rows[:, None].repeat(1, self.streams, 1) if self.streams else rows

    def states(
        self,
        ids: Tensor,
        positions: Tensor,
        spans: tuple[Span, ...],
        experts: Experts,
        piece: int | None = None,
    ) -> Tensor:
        """Map ids and positions [T] of any rows to hidden states before the final norm.

        piece: see Model.extend.
        """
        for begin in self.ahead:
            begin(ids, spans)
        return self.through(self.embedded(ids), positions, spans, experts, piece, ids)

    def through(
        self,
        x: Tensor,
        positions: Tensor,
        spans: tuple[Span, ...],
        experts: Experts,
        piece: int | None = None,
        ids: Tensor | None = None,
    ) -> Tensor:
        """Map the first block's inputs x [T, D], which may be overwritten; see `states`."""
        contexts = [s.cache.capacity for s in spans for _ in range(s.count)]
        others = tuple(rope(positions, contexts) for rope in self.others)
        angles = self.rope(positions, contexts)
        rows = PassRows(spans, positions, *angles, others, token_ids=ids)
        if piece is None:
            for block in self.blocks:
                x = block(x, rows, experts)
            return x
        pieces = rows.pieces(piece)
        for block in self.blocks:
            x = block.over(x, pieces, experts)
        return x


class Decoder:
    """A `Model` made of blocks. Weights are named as in the checkpoints of llama-like families."""

    def __init__(
        self,
        config: BodyConfig,
        moe: MoeShape,
        planes: Planes,
        rope_dim: int,
        blocks: Sequence[Layer],
        parts: Parts,
        recurrent: RecurrentLayout | None = None,
        more_ropes: Sequence[tuple[RopeConfig, int]] = (),
        planes_of_each: Sequence[Planes] = (),
        indexers: tuple[int, ...] = (),
        coarse: tuple[tuple[int, int], ...] = (),
        streams: int = 0,
        head: Callable[[Tensor], Tensor] | None = None,
        ahead: Sequence[Ahead] = (),
        last: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Build the decoder around its blocks.

        planes: the planes that attention caches per layer; see kv_cache.py. recurrent: the memory
        of the layers without attention. more_ropes: see PassRows.turned_by. planes_of_each: see
        CacheLayout.each. indexers, coarse: see there. streams, ahead: see DecodeStep. head:
        collapses the streams before the final norm. last: in place of the final norm.
        """
        self.moe = moe
        self.vocab_size = config.vocab
        self._hidden = config.hidden
        self.max_context, self.usual_context = config.max_context, config.usual_context
        embedding = parts.embedding("model.embed_tokens", config.vocab, config.hidden)
        attending = config.layers - (0 if recurrent is None else recurrent.layers)
        self._cache = CacheLayout(
            attending, planes, embedding.dtype, embedding.device, recurrent, parts.kv,
            tuple(planes_of_each), indexers, coarse,
        )  # fmt: skip
        table = "model.embed_tokens" if config.tied_embeddings else "lm_head"
        self._logits_scale, self._logits_cap = config.logits_scale, config.logits_cap
        self.body = DecodeStep(
            embedding,
            config.embedding_scale,
            Rope(config.rope, rope_dim, embedding.device),
            tuned_blocks(blocks, parts),
            _after(head, parts.tuned(_final_norm(config, parts) if last is None else last)),
            parts.linear(table, config.vocab, config.hidden, config.head_bias),
            self._cache,
            tuple(Rope(rope, dim, embedding.device) for rope, dim in more_ropes),
            streams,
            tuple(ahead),
        )
        self._decode = parts.tuned(self.body)
        self.watcher: Watcher | None = None  # sees the states [T, D] of every pass; not on a GPU
        self.kv_bytes_per_token = self._cache.bytes_per_token
        self.state_bytes = self._cache.fixed_bytes

    def add_block(self, block: MoreBlocks) -> None:
        """Compute `block` after the last one, too. Not on a GPU."""
        self.body = self._decode = replace(self.body, blocks=(*self.body.blocks, block))

    def new_state(self, capacity: int) -> KvCache:
        """Return an empty state; raise ValueError unless 1 ≤ capacity ≤ max_context."""
        if capacity > self.max_context:
            raise ValueError(f"the context must be at most {self.max_context}, got {capacity}")
        return KvCache(self._cache, capacity)

    def extend(
        self,
        batch: Sequence[tuple[Sequence[int], State]],
        experts: Experts,
        logits: Literal["last", "all", "states"] = "last",
        piece: int | None = None,
        accept: Callable[[Tensor], int] | None = None,
    ) -> Tensor:
        """See base.Model. Raises ValueError for no tokens, unknown ids, or a duplicate state."""
        spans = check_batch(batch, self._cache, self.vocab_size)
        if accept is not None:
            if len(spans) > 1 or not spans[0].past:
                raise ValueError("drafts need one state with history")
            spans = spans[0].one_by_one()
        count = spans[-1].rows.stop
        device = self._cache.device
        ids = torch.tensor([i for tokens, _ in batch for i in tokens], device=device)  # [T]
        positions, owner, phase, piece, cuts = about_rows(spans, device, piece)
        # Allocated outside inference mode, so that the caller may write into the logits.
        width = self._hidden if logits == "states" else self.vocab_size
        last = logits == "last"
        pinned = last and device.type == "cuda"  # then they come down in one direct copy
        out = torch.empty(len(spans) if last else count, width, pin_memory=pinned)
        for span in spans:
            span.cache.begin(span.count)
        if accept is not None:
            spans[0].cache.keep_steps()
        kept = len(spans)
        with torch.inference_mode(), one_pass(experts, owner, phase, cuts) as ending:
            whole = phase == "decode" and logits != "states" and count <= _HEAD_ROWS
            if whole and self.watcher is None:
                out.copy_(self._decode(ids, positions, spans, experts))
            else:
                x = self.body.states(ids, positions, spans, experts, piece)  # [T, D]
                if self.watcher is not None:
                    self.watcher(batch, x)
                if logits == "last":
                    x = x[torch.tensor([span.rows.stop - 1 for span in spans], device=device)]
                step = _HEAD_ROWS if piece is None or logits != "last" else 1
                self._fill(out, x, self.body.norm if logits == "states" else self._logits, step)
            if self._logits_scale != 1.0 and logits != "states":
                out /= self._logits_scale
            if self._logits_cap is not None and logits != "states":
                out.div_(self._logits_cap).tanh_().mul_(self._logits_cap)
            if accept is not None:
                kept = accept(out)
                ending.accepted = torch.arange(count) < kept
                if kept < count:
                    spans[0].cache.repeat(kept)
        for span in spans[:kept]:
            span.cache.advance(span.count)
        return out

    def _logits(self, x: Tensor) -> Tensor:
        """Map x [n, D] to logits [n, vocab]."""
        return self.body.head(self.body.norm(x))

    def _fill(self, out: Tensor, x: Tensor, made: Callable[[Tensor], Tensor], step: int) -> None:
        """Set out [n, …] = made(x [n, D]), `step` rows at a time."""
        for start in range(0, len(x), step):
            rows = slice(start, start + step)
            out[rows].copy_(made(x[rows]))


def _final_norm(config: BodyConfig, parts: Parts) -> Callable[[Tensor], Tensor]:
    if config.layer_norm:
        return layer_norm(parts, "model.norm", config.hidden, config.norm_eps)
    if config.centred_norm:
        return centred_norm(parts, "model.norm", config.hidden, config.norm_eps)
    kind = WideRmsNorm if config.wide_norm else RmsNorm
    return kind(parts.tensor("model.norm.weight", config.hidden), config.norm_eps)


def _after(
    head: Callable[[Tensor], Tensor] | None, norm: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    return norm if head is None else lambda x: norm(head(x))


def ignores_buffers(name: str, config: HasBody) -> bool:
    """Return True for tensors that old checkpoints have and no model needs: Family.ignores."""
    tied = config.body.tied_embeddings
    return name.endswith(".rotary_emb.inv_freq") or (tied and name == "lm_head.weight")
