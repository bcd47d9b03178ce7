"""Find special tokens in a text: leftmost first, and the longest at each place.

A vocabulary may have a thousand special tokens with a common prefix. Each place of a text costs one
walk along a prefix trie. Other threads run between windows of a text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_LEVELS = 50  # of nested groups: `re` compiles them by recursion
_FEW = 8  # branches that are tried one by one
_WINDOW, _LEAST_WINDOW = 64 << 10, 256  # characters at which one search may start
_WINDOW_STEPS = 4 << 20  # per window; each place may cost the longest token's length


class SpecialSpans:
    """A finder of `tokens`, which must not be empty texts."""

    def __init__(self, tokens: Iterable[str]) -> None:
        found = sorted(set(tokens))
        self._pattern = re.compile(_after(found, _LEVELS) if found else "(?!)")
        self._longest = max(map(len, found), default=1)
        self.window = max(_LEAST_WINDOW, min(_WINDOW, _WINDOW_STEPS // self._longest))

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) of each token, in order, without overlap.

        A search reads past its window by the length of a token that starts in it.
        """
        at = 0
        while at < len(text):
            limit = at + self.window
            for found in self._pattern.finditer(text, at, limit + self._longest - 1):
                if found.start() >= limit:  # it may be cut off
                    break
                at = found.end()
                yield found.span()
            at = max(at, limit)


def _after(tails: list[str], levels: int) -> str:
    """Return a pattern for distinct sorted texts, longest first. "": a token ends here."""
    if tails == [""]:
        return ""
    if not levels:
        return f"(?:{'|'.join(map(re.escape, sorted(tails, key=len, reverse=True)))})"
    firsts: dict[str, list[str]] = {}
    for tail in tails:
        if tail:
            firsts.setdefault(tail[0], []).append(tail)
    branches = _one_of([firsts[first] for first in sorted(firsts)], levels - 1)
    return f"(?:{branches}{'|' if '' in tails else ''})"


def _one_of(groups: list[list[str]], levels: int) -> str:
    """Return branches for groups with different first characters; split many groups into halves."""
    if len(groups) <= _FEW or not levels:
        return "|".join(_alike(group, levels) for group in groups)
    middle = len(groups) // 2
    halves = []
    for half in (groups[:middle], groups[middle:]):
        low, high = re.escape(half[0][0][0]), re.escape(half[-1][0][0])
        halves.append(f"(?=[{low}-{high}])(?:{_one_of(half, levels - 1)})")
    return "|".join(halves)


def _alike(group: list[str], levels: int) -> str:
    """Return a pattern for sorted texts with a common prefix."""
    pairs = enumerate(zip(group[0], group[-1], strict=False))
    size = next((place for place, (one, other) in pairs if one != other), len(group[0]))
    return re.escape(group[0][:size]) + _after([text[size:] for text in group], levels)
