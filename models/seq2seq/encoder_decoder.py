"""Encoder-decoders: a source that is read whole, then tokens that attend to it and to each other.

A family's file provides blocks, embeddings and positions. Experts are used only through the
`Experts` seam. The encoder's MoE layers come first in the flat index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from moeinf.models.base import Embedding, ExpertPart, Experts, Linear, MoeShape, Phase, State
from moeinf.models.expert_names import ExpertNames
from moeinf.models.layers.batches import check_batch, check_ids
from moeinf.models.layers.kv_cache import CacheLayout, KvCache, Span
from moeinf.models.layers.moe import one_pass
from moeinf.models.seq2seq.cross_attention import (
    Memory,
    MemoryAttention,
    SelfAttention,
    SourceAttention,
)

_HEAD_ROWS = 64  # rows of logits computed at once
Norm = Callable[[Tensor], Tensor]
Stack = Literal["encoder", "decoder"]
EMBEDDING_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")


class FeedForward(Protocol):
    """A network [T, D] -> [T, D]; `sequences` gives the rows that belong together."""

    def __call__(self, x: Tensor, experts: Experts, sequences: Sequence[slice]) -> Tensor: ...


class Positions(Protocol):
    """Position terms that are added to the embeddings, or to the scores of attention."""

    def embed(self, positions: Tensor) -> Tensor | None:
        """Map positions [T] int64 to [T, D] float32 to add to the embeddings; None adds nothing."""
        ...

    def bias(self, stack: Stack, new: int, total: int) -> Tensor | None:
        """Return [H, new, total] to add to the scores of the last `new` of `total` tokens.

        None adds nothing.
        """
        ...


@dataclass(frozen=True)
class EncoderBlock:
    """x += attention(norm(x)); x += ffn(norm(x))."""

    attention_norm: Norm
    attention: SourceAttention
    ffn_norm: Norm
    ffn: FeedForward


@dataclass(frozen=True)
class DecoderBlock:
    """x += attention(norm(x)); x += memory(norm(x)); x += ffn(norm(x))."""

    attention_norm: Norm
    attention: SelfAttention
    memory_norm: Norm
    memory: MemoryAttention  # attends to the encoder's output
    ffn_norm: Norm
    ffn: FeedForward


@dataclass(frozen=True)
class Frame:
    """The parts around the blocks: embedding, positions, final norms and head."""

    vocab: int
    embedding: Embedding  # shared by both stacks
    embedding_scale: float
    positions: Positions
    encoder_norm: Norm
    decoder_norm: Norm
    head: Linear
    head_scale: float  # factor on the head's input


@dataclass(frozen=True)
class Sizes:
    """Sizes of an encoder-decoder.

    planes: the planes per layer and token, in the cache of self attention and in the memory.
    """

    moe: MoeShape
    max_context: int
    planes: tuple[tuple[int, int], ...]
    start_token: int  # decoder_start_token_id
    names_languages: bool  # source and target language are tokens


class SourceState:
    """A `State`: the decoder's cache, and the memory of the source that it attends to."""

    def __init__(self, cache: KvCache, memory: Memory | None = None) -> None:
        self.cache = cache
        self.memory = memory

    @property
    def request(self) -> int:
        return self.cache.request

    @request.setter
    def request(self, number: int) -> None:
        self.cache.request = number

    @property
    def length(self) -> int:
        """Decoder tokens held."""
        return self.cache.length

    @property
    def capacity(self) -> int:
        """Decoder tokens, and source tokens, that it can hold."""
        return self.cache.capacity

    def truncate(self, length: int) -> None:
        """Drop decoder tokens after the first `length`; keep the source."""
        self.cache.truncate(length)

    def snapshot(self) -> SourceState:
        """Return an independent copy; both share the memory, which never changes."""
        return SourceState(self.cache.snapshot(), self.memory)


class EncoderDecoder:
    """A `Model` that reads a source first. `extend` takes decoder tokens; start_token is first."""

    def __init__(
        self,
        sizes: Sizes,
        frame: Frame,
        encoder: Sequence[EncoderBlock],
        decoder: Sequence[DecoderBlock],
    ) -> None:
        self.moe = sizes.moe
        self.max_context = sizes.max_context
        self.usual_context: int | None = None
        self.start_token = sizes.start_token
        self.names_languages = sizes.names_languages
        self._frame, self._encoder, self._decoder = frame, tuple(encoder), tuple(decoder)
        embedding = frame.embedding
        self.vocab_size = frame.vocab
        self._cache = CacheLayout(len(decoder), sizes.planes, embedding.dtype, embedding.device)
        self.kv_bytes_per_token = 2 * self._cache.bytes_per_token  # decoder and source
        self.state_bytes = self._cache.fixed_bytes

    def new_state(self, capacity: int) -> SourceState:
        """Return a state without a source; ValueError unless 1 ≤ capacity ≤ max_context."""
        if capacity > self.max_context:
            raise ValueError(f"the context must be at most {self.max_context}, got {capacity}")
        return SourceState(KvCache(self._cache, capacity))

    def encode(self, ids: Sequence[int], state: State, experts: Experts) -> None:
        """Read a source of token ids, in one pass of the phase "encode".

        Afterwards the state holds the source's memory and no decoder tokens. A failed pass leaves
        the state unchanged. Raises ContextFull for more tokens than the state's capacity, and
        ValueError for unknown ids.
        """
        assert isinstance(state, SourceState), "the state was not made by this model"
        check_ids(ids, 0, state.capacity, self.vocab_size)
        tokens = torch.tensor(list(ids), device=self._frame.embedding.device)
        owner = torch.full((len(ids),), state.request)
        with torch.inference_mode(), one_pass(experts, owner, "encode"):
            x = self._embed(tokens, torch.arange(len(ids), device=tokens.device))
            bias = self._frame.positions.bias("encoder", len(ids), len(ids))
            for block in self._encoder:
                x = x + block.attention(block.attention_norm(x), bias)
                x = x + block.ffn(block.ffn_norm(x), experts, [slice(0, len(ids))])
            x = self._frame.encoder_norm(x)
            memory = tuple(block.memory.read(x) for block in self._decoder)
        state.truncate(0)
        state.memory = memory

    def extend(
        self,
        batch: Sequence[tuple[Sequence[int], State]],
        experts: Experts,
        logits: Literal["last", "all", "states"] = "last",
        piece: int | None = None,
        accept: Callable[[Tensor], int] | None = None,
    ) -> Tensor:
        """See base.Model. Raises ValueError for a state without a source, "states" and drafts.

        A pass is not divided.
        """
        if logits == "states":
            raise ValueError("an encoder-decoder has no states of its text alone")
        if accept is not None:
            raise ValueError("an encoder-decoder does not check drafts")
        states = [state for _, state in batch if isinstance(state, SourceState)]
        if len(states) < len(batch):
            raise ValueError("the state was not made by this model")
        ids = [tokens for tokens, _ in batch]
        caches = [(tokens, s.cache) for tokens, s in zip(ids, states, strict=True)]
        spans = check_batch(caches, self._cache, self.vocab_size)
        memories = []
        for state in states:
            if state.memory is None:
                raise ValueError("the state has no source: encode comes first")
            memories.append(state.memory)
        device = self._frame.embedding.device
        tokens = torch.tensor([i for some in ids for i in some], device=device)  # [T]
        owner = torch.tensor([s.cache.request for s in spans for _ in range(s.count)])
        decoding = all(span.count == 1 and span.past > 0 for span in spans)
        last = torch.tensor([span.rows.stop - 1 for span in spans], device=device)
        out = torch.empty(len(spans) if logits == "last" else len(tokens), self.vocab_size)
        phase: Phase = "decode" if decoding else "prefill"
        with torch.inference_mode(), one_pass(experts, owner, phase):
            x = self._run(tokens, spans, memories, experts)
            self._logits(x if logits == "all" else x[last], out)
        for span in spans:
            span.cache.advance(span.count)
        return out

    def _run(
        self, ids: Tensor, spans: tuple[Span, ...], memories: Sequence[Memory], experts: Experts
    ) -> Tensor:
        """Map ids [T] to hidden states [T, D] before the final norm."""
        places = [torch.arange(s.past, s.past + s.count, device=ids.device) for s in spans]
        x = self._embed(ids, torch.cat(places))
        positions = self._frame.positions
        biases = [positions.bias("decoder", s.count, s.past + s.count) for s in spans]
        sequences = [span.rows for span in spans]
        for number, block in enumerate(self._decoder):
            x = x + block.attention(block.attention_norm(x), spans, biases)
            planes = [memory[number] for memory in memories]
            x = x + block.memory(block.memory_norm(x), sequences, planes)
            x = x + block.ffn(block.ffn_norm(x), experts, sequences)
        return x

    def _embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Map ids [T] to embeddings with positions [T, D]."""
        x = self._frame.embedding.rows(ids)
        if self._frame.embedding_scale != 1.0:
            x = x * self._frame.embedding_scale
        added = self._frame.positions.embed(positions)
        return x if added is None else x + added.to(x.dtype)

    def _logits(self, x: Tensor, out: Tensor) -> None:
        """Write the logits of x [n, D] into out [n, vocab] float32."""
        frame = self._frame
        for start in range(0, len(x), _HEAD_ROWS):
            rows = slice(start, start + _HEAD_ROWS)
            out[rows].copy_(frame.head(frame.decoder_norm(x[rows]) * frame.head_scale))


def stack_expert(
    name: str,
    names: Mapping[Stack, ExpertNames],
    sparse: Mapping[Stack, Sequence[int]],
    moe: MoeShape,
) -> ExpertPart | None:
    """See Family.expert. The decoder's MoE layers are numbered after the encoder's."""
    stack: Stack = "decoder" if name.startswith("decoder.") else "encoder"
    part = names[stack].part(name, sparse[stack], moe.experts)
    if part is None or stack == "encoder":
        return part
    return replace(part, layer=moe.encoder_layers + part.layer)
