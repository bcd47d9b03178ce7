"""Hashed n-grams: the rows of a table that belong to the last few tokens of a text.

Math as in transformers 5.23, modeling_qwen4_exp.py (Qwen4ExpTextNGramEmbedding). The n-grams of a
token are itself and the 1 … n - 1 tokens before it. Tokens before the start of a text count as
`end`, and so do those before the last `end` token. Every order of n-gram has several heads. The
hash of the tokens t and odd multipliers m is

    (t[0] · m[0]) xor (t[-1] · m[1]) xor …     modulo a prime number of rows, one for each head

Heads have rows of their own, one head after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeinf.models.layers.kv_cache import Span

_MASK, _GAMMA = (1 << 64) - 1, 0x9E3779B97F4A7C15
_LAYER_STEP = 10007  # between the seeds of two layers


@dataclass(frozen=True)
class NgramShape:
    """Sizes by their config keys."""

    size: int  # ngram_size: tokens of the longest n-gram
    heads: int  # heads_per_ngram
    least_rows: int  # ngram_vocab_size_base
    multiple: int  # make_ngram_vocab_size_divisible_by
    seed: int
    vocab: int
    end: int  # the first of eos_token_id

    @property
    def all_heads(self) -> int:
        return (self.size - 1) * self.heads


class Ngrams:
    """The hash functions of one layer, the `number`-th with n-grams.

    multipliers: of a token and those before it. sizes, starts [heads]: of each head's rows.
    """

    def __init__(self, shape: NgramShape, number: int) -> None:
        self._shape = shape
        self.multipliers = _multipliers(shape, number)
        first = number * shape.all_heads
        sizes = primes(shape.least_rows, first + shape.all_heads)[first:]
        starts = [sum(sizes[:head]) for head in range(shape.all_heads)]
        self.sizes, self.starts = torch.tensor(sizes), torch.tensor(starts)
        self.rows = -(-sum(sizes) // shape.multiple) * shape.multiple  # of the table

    def __call__(self, history: Tensor) -> Tensor:
        """Map size - 1 tokens and the n after them, int64 on the CPU, to rows [n, heads]."""
        shape, count = self._shape, len(history) - self._shape.size + 1
        mixed = history[shape.size - 1 :] * self.multipliers[0]  # [n]
        live = torch.ones(count, dtype=torch.bool)  # no `end` token is between
        found = []
        for back in range(1, shape.size):
            at = shape.size - 1 - back
            token = history[at : at + count]
            live = live & (token != shape.end)
            mixed = mixed ^ (torch.where(live, token, shape.end) * self.multipliers[back])
            heads = slice((back - 1) * shape.heads, back * shape.heads)
            found.append(mixed[:, None].remainder(self.sizes[heads]) + self.starts[heads])
        return torch.cat(found, 1)


def histories(
    ids: Tensor, spans: Sequence[Span], before: Callable[[Span], Tensor]
) -> Iterator[tuple[slice, Tensor]]:
    """Yield each span's rows, and its tokens after those of `before`.

    ids [T] are those of a pass. `before` gives the last tokens before a span, unless the span
    before it is of the same request.
    """
    cache, known = None, ids[:0]
    for span in spans:
        past = before(span) if span.cache is not cache else known
        history = torch.cat((past, ids[span.rows]))
        yield span.rows, history
        cache, known = span.cache, history[len(history) - len(past) :]


def primes(least: int, count: int) -> list[int]:
    """Return the first `count` primes from `least` on."""
    found: list[int] = []
    number = least
    while len(found) < count:
        if number > 1 and all(number % by for by in range(2, math.isqrt(number) + 1)):
            found.append(number)
        number += 1
    return found


def _multipliers(shape: NgramShape, number: int) -> list[int]:
    """Return an odd number for each token of an n-gram, so small that no product overflows."""
    bound = max(1, ((1 << 63) - 1) // shape.vocab // 2)
    seed = shape.seed + _LAYER_STEP * number
    mixed = (_splitmix((seed + _GAMMA * (back + 1)) & _MASK) for back in range(shape.size))
    return [2 * (value % bound) + 1 for value in mixed]


def _splitmix(value: int) -> int:
    """Return the next number of the generator SplitMix64."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
