"""Measure how well a model predicts a text, and how close it is to a reference model.

Logits are compared a few rows at a time, so memory does not grow with the text.

    perplexity        exp of the mean of −ln p(token | tokens before it)
    KL divergence     mean over tokens of Σ p ln(p / q): p the reference, q the model, in nats
    top-1 agreement   share of the tokens for which both would have chosen the same next one
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from moeinf.errors import InvalidInput
from moeinf.offload.store.stats import StoreStats
from moeinf.runtime.checkpoints.finite import check_logits
from moeinf.runtime.engine.engine import Engine

WINDOW = 512  # maximum tokens per window; a begin-of-text token also starts a new one
_ROWS = 64  # logits rows at once, unless each token is decoded
Advance = Callable[[int], None]


class CannotCompare(InvalidInput, ValueError):
    """A text has fewer than two tokens, or two models have different tokens."""

    code = "cannot_compare"
    hint = (
        "`moeinf eval NAME:q4 --file TEXT --against NAME:bf16`, which compares two tags of a model"
    )


@dataclass(frozen=True)
class Speed:
    """The speed of a model that decoded the text. A model without routed events has no shares."""

    tokens_per_s: float
    bytes_read_per_token: int
    hit_rate: float | None
    skipped_share: float | None
    rerouted_share: float | None
    low_share: float | None

    @classmethod
    def of(cls, store: StoreStats, seconds: float, tokens: int) -> Speed:
        """Return the speed of `tokens` tokens, one per pass, that took `seconds`."""
        read, hits = store.bytes_read // tokens, store.hit_rate
        shares = (store.skipped_share, store.rerouted_share, store.low_share)
        return cls(tokens / seconds, read, hits, *shares)


@dataclass(frozen=True)
class Score:
    """The result of an evaluation. Without a reference its three fields have no value.

    speed and reference_speed have values where tokens were decoded.
    """

    tokens: int  # predicted
    perplexity: float
    reference_perplexity: float | None = None
    kl_divergence: float | None = None
    top1_agreement: float | None = None
    speed: Speed | None = None
    reference_speed: Speed | None = None


class _Sums:
    def __init__(self) -> None:
        self.tokens = self.agreed = 0
        self.loss = self.reference_loss = self.kl = 0.0
        self.seconds = [0.0, 0.0]  # of the passes of the model and of the reference

    def add(self, logits: Tensor, reference: Tensor | None, targets: Tensor) -> None:
        """Add rows to the sums. logits and reference: [n, V] float32; targets: [n]."""
        count = torch.arange(len(targets))
        q = logits.double().log_softmax(-1)
        self.tokens += len(targets)
        self.loss -= float(q[count, targets].sum())
        if reference is not None:
            p = reference.double().log_softmax(-1)
            self.reference_loss -= float(p[count, targets].sum())
            self.kl += float((p.exp() * (p - q)).sum())
            self.agreed += int((p.argmax(-1) == q.argmax(-1)).sum())


def _uncounted(_tokens: int) -> AbstractContextManager[Advance]:
    return nullcontext(lambda _done: None)


def evaluate(
    engine: Engine,
    reference: Engine | None,
    text: str,
    counting: Callable[[int], AbstractContextManager[Advance]] = _uncounted,
    *,
    decode: bool = False,
) -> Score:
    """Score `engine` on a text, against `reference` if given. Raises CannotCompare.

    Special tokens in the text count as special tokens. counting: receives the number of tokens and
    gives the function that is told of tokens done. decode: read one token per pass, which is slower
    and measures decoding; a lossy option has an effect only there.
    """
    if any(one is not None and one.info.reads_sources for one in (engine, reference)):
        raise CannotCompare("an encoder-decoder answers texts, it does not continue them")
    ids = engine.tokenizer.encode_text(text)
    if reference is not None and ids != reference.tokenizer.encode_text(text):
        raise CannotCompare(f"{reference.info.name} has different tokens for the text")
    if len(ids) < 2:
        raise CannotCompare("the text has fewer than two tokens")
    engines = [engine] if reference is None else [engine, reference]
    window = min(WINDOW, *(one.info.context for one in engines))
    sums, before = _Sums(), [one.store.stats.copy() for one in engines]
    begin = engine.tokenizer.token_id(engine.tokenizer.bos) if engine.tokenizer.bos else None
    with counting(len(ids)) as advance:
        for piece in _pieces(ids, begin, window):
            _score_window(engines, piece, sums, advance, 1 if decode else _ROWS)
    count = sums.tokens
    score = Score(count, math.exp(sums.loss / count))
    if reference is not None:
        score = replace(
            score,
            reference_perplexity=math.exp(sums.reference_loss / count),
            kl_divergence=sums.kl / count,
            top1_agreement=sums.agreed / count,
        )
    if not decode:
        return score
    speeds = [
        Speed.of(one.store.stats.since(start), seconds, count)
        for one, start, seconds in zip(engines, before, sums.seconds, strict=False)
    ]
    return replace(score, speed=speeds[0], reference_speed=None if reference is None else speeds[1])


def _pieces(ids: Sequence[int], begin: int | None, most: int) -> Iterator[Sequence[int]]:
    """Cut before every token that begins a text, and after `most` tokens."""
    starts = [place for place, token in enumerate(ids) if token == begin and place > 0]
    for start, stop in pairwise([0, *starts, len(ids)]):
        for first in range(start, stop, most):
            yield ids[first : min(first + most, stop)]


def _score_window(
    engines: Sequence[Engine], ids: Sequence[int], sums: _Sums, advance: Advance, most: int
) -> None:
    advance(1)  # the first token of a window is not predicted
    states = [engine.new_state() for engine in engines]
    for first in range(0, len(ids) - 1, most):
        rows = ids[first : min(first + most, len(ids) - 1)]
        targets = torch.tensor(ids[first + 1 : first + 1 + len(rows)])
        found = []
        for number, (engine, state) in enumerate(zip(engines, states, strict=True)):
            start = time.perf_counter()
            found.append(engine.all_logits(state, rows))
            sums.seconds[number] += time.perf_counter() - start
            check_logits(found[-1].numpy())
        sums.add(found[0], found[1] if len(found) > 1 else None, targets)
        advance(len(rows))
