"""Compare the vocabularies of two models, token by token."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
_SHOWN = 20  # characters of a token


def difference(one: Path, other: Path) -> str | None:
    """Return in words the first difference between two files of tokenizers; None: no difference.

    Equal vocabularies have the same token for each number, and the same special tokens.
    """
    mine, its = _tokens(one), _tokens(other)
    for number in sorted(mine.keys() | its.keys()):
        if mine.get(number) != its.get(number):
            return f"token {number} is {_words(mine.get(number))}, not {_words(its.get(number))}"
    return None


def _tokens(path: Path) -> dict[int, tuple[str, bool]]:
    """Return each token's text, and whether it is special, by number."""
    tokenizer = Tokenizer.from_file(str(path))
    added = tokenizer.get_added_tokens_decoder()
    special = {number for number, token in added.items() if token.special}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    return {number: (token, number in special) for token, number in vocabulary.items()}


def _words(token: tuple[str, bool] | None) -> str:
    if token is None:
        return "missing"
    text, special = token
    return f"the special token {text[:_SHOWN]!r}" if special else repr(text[:_SHOWN])
