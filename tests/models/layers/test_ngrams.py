"""Test the rows of n-grams against the published sums, in any division of a text."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

from moeinf.models.layers.ngrams import Ngrams, NgramShape, primes


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(("size", "heads"), [(2, 1), (3, 3), (5, 2)])
def test_the_rows_of_transformers(size: int, heads: int, number: int) -> None:
    """With end tokens at the start, in the middle, and next to each other."""
    shape = NgramShape(size, heads, least_rows=300, multiple=16, seed=9, vocab=97, end=5)
    ours, all_heads = Ngrams(shape, number), (size - 1) * heads
    config = Qwen4ExpTextConfig(
        vocab_size=97, ngram_size=size, heads_per_ngram=heads, ngram_vocab_size_base=300,
        make_ngram_vocab_size_divisible_by=16, seed=9, eos_token_id=[5, 6],
        num_hidden_layers=1, ple_embed_dim=all_heads,
    )  # fmt: skip
    theirs = Qwen4ExpTextNGramEmbedding(config, all_heads, 0, number)
    assert theirs.ngram_embedding.weight.shape == (ours.rows, 1)
    with torch.no_grad():
        theirs.ngram_embedding.weight[:, 0] = torch.arange(ours.rows)
    ids = torch.randint(97, (200,), generator=torch.Generator().manual_seed(2))
    ids[[0, 20, 22, 23, 60]] = 5
    with torch.no_grad():
        expected = theirs(ids[None], None)[0].long()
    history = torch.cat((torch.full((size - 1,), 5), ids))
    assert torch.equal(ours(history), expected)
    for start in (1, 21, 59, 199):  # a token needs size - 1 tokens before it
        assert torch.equal(ours(history[start:]), expected[start:])


def test_primes() -> None:
    known = [n for n in range(2, 300) if all(n % d for d in range(2, math.isqrt(n) + 1))]
    assert primes(1, len(known)) == known
    assert primes(90, 3) == [97, 101, 103]
    assert primes(20_000_000, 2) == [20_000_003, 20_000_023]
