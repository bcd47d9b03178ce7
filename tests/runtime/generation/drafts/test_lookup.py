"""Drafts by hand: the longest match, the latest of equals, texts that repeat, shares of hits."""

from __future__ import annotations

import pytest

from moeinf.runtime.generation.drafts.lookup import AcceptanceByMatch, Lookup


@pytest.mark.parametrize(
    ("history", "matched", "draft"),
    [
        ([1, 2, 3, 4], 0, []),
        ([1, 2, 3, 9, 2], 0, []),  # one token is no match
        ([1, 2, 3, 9, 1, 2], 2, [3, 9, 1, 2]),
        ([1, 2, 3, 1, 2, 4, 1, 2], 2, [4, 1, 2, 4]),  # the latest
        ([5, 1, 2, 3, 1, 2, 4, 5, 1, 2], 3, [3, 1, 2, 4]),  # the longest
        ([7, 8, 7, 8], 2, [7, 8, 7, 8]),  # the draft continues itself
        ([6, 6, 6], 2, [6, 6, 6, 6]),
    ],
)
def test_drafts(history: list[int], matched: int, draft: list[int]) -> None:
    lookup = Lookup(16)
    lookup.follow(history)
    assert (lookup.matched, lookup.draft(4)) == (matched, draft)
    grown = Lookup(16)
    for length in range(1, len(history) + 1):
        grown.follow(history[:length])
    assert grown.draft(1) == draft[:1]


def test_a_right_token_makes_the_match_longer() -> None:
    history = [1, 2, 3, 4, 5, 1, 2]
    lookup = Lookup(16)
    lookup.follow(history)
    history += [3, 4]
    lookup.follow(history)
    assert (lookup.matched, lookup.draft(2)) == (4, [5, 1])
    history.append(9)
    lookup.follow(history)
    assert (lookup.matched, lookup.draft(2)) == (0, [])


def test_outcomes_count_by_the_length_of_the_match() -> None:
    acceptance = AcceptanceByMatch()
    before = acceptance.chances(2, 3)
    assert before == [0.5, 0.25, 0.125]
    for _ in range(8):
        acceptance.add(2, right=True)
        acceptance.add(3, right=False)
    first, both, three = acceptance.chances(2, 3)
    assert first > 0.85
    assert both < 0.15 * first
    assert three == pytest.approx(both / 2)  # no outcome after four tokens
    assert acceptance.chances(100, 1) == [0.5]
    assert acceptance.chances(0, 0) == []
