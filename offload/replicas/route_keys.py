"""Reduce a prompt to hashes: its prefixes, and its n-grams. No text leaves this module.

A prompt is a list of pieces, such as the messages of a conversation. Prefix p is a digest of the
pieces 0 … p, so two prompts share a prefix if they share its digest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

MOST_PREFIXES = 256  # of a prompt; its last ones
MOST_WORDS = 1024  # of a prompt, half of them its first and half its last ones
MOST_LETTERS = 64  # of a word: a text without spaces is cut
LONGEST_GRAM = 2  # words

_WORD = re.compile(rf"\w{{1,{MOST_LETTERS}}}")
Grams = NDArray[np.uint32]


@dataclass(frozen=True)
class RouteKeys:
    """The hashes by which a request is routed.

    number: differs for every request. prefixes: digests, the shortest prefix first. grams [G]:
    distinct and ascending. session: chosen by the client, or empty. model: its name. shares: of the
    prompt's bytes that each prefix has; empty where nothing is published of them.
    """

    number: int
    prefixes: tuple[int, ...]
    grams: Grams
    session: str = ""
    model: str = ""
    shares: tuple[float, ...] = ()


def route_keys(number: int, pieces: Sequence[str], session: str = "", model: str = "") -> RouteKeys:
    """Return the hashes of a prompt of these pieces."""
    words = grams(_ends(pieces))
    return RouteKeys(number, prefixes(pieces), words, session, model, shares(pieces))


def prefixes(pieces: Iterable[str]) -> tuple[int, ...]:
    """Return a digest of 64 bits per prefix of whole pieces, at most the MOST_PREFIXES longest."""
    found, digest = list[int](), blake2b(digest_size=8)
    for piece in pieces:
        data = piece.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
        found.append(int.from_bytes(digest.digest(), "little"))
    return tuple(found[-MOST_PREFIXES:])


def shares(pieces: Sequence[str]) -> tuple[float, ...]:
    """Return the share of a prompt's bytes in each of its `prefixes`; the last one is 1."""
    ends = list(accumulate(len(piece.encode("utf-8", "surrogatepass")) for piece in pieces))
    return tuple(end / max(1, ends[-1]) for end in ends[-MOST_PREFIXES:])


def grams(words: Sequence[str]) -> Grams:
    """Return the hashes of all runs of 1 … LONGEST_GRAM words, distinct and ascending."""
    runs = (
        " ".join(words[start : start + length])
        for length in range(1, LONGEST_GRAM + 1)
        for start in range(len(words) - length + 1)
    )
    hashes = {crc32(run.encode("utf-8", "surrogatepass")) for run in runs}
    return np.array(sorted(hashes), np.uint32)


def _ends(pieces: Sequence[str]) -> list[str]:
    """Return the first and the last words of a prompt, in lower case."""
    first = _take(pieces, MOST_WORDS)
    if len(first) < MOST_WORDS:
        return first
    tail = " ".join(pieces)[-MOST_WORDS * 16 :]
    half = MOST_WORDS // 2
    return first[:half] + _take([tail], MOST_WORDS * 16)[-half:]


def _take(pieces: Iterable[str], most: int) -> list[str]:
    found = list[str]()
    for word in _words(pieces):
        found.append(word)
        if len(found) == most:
            break
    return found


def _words(pieces: Iterable[str]) -> Iterator[str]:
    for piece in pieces:
        for match in _WORD.finditer(piece):
            yield match[0].lower()
