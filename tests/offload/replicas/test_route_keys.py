"""Test the hashes of prompts."""

from __future__ import annotations

import pytest

from moeinf.offload.replicas.route_keys import (
    MOST_PREFIXES,
    grams,
    prefixes,
    route_keys,
    shares,
)


def test_prompts_share_the_prefixes_of_their_common_pieces() -> None:
    one, two = prefixes(["system", "hello", "more"]), prefixes(["system", "hello", "else"])
    assert one[:2] == two[:2]
    assert one[2] != two[2]


@pytest.mark.parametrize("pieces", [["ab", "c"], ["a", "bc"], ["abc"], ["", "abc"]])
def test_where_a_piece_ends_is_part_of_its_digest(pieces: list[str]) -> None:
    others = {prefixes(other)[-1] for other in (["ab", "c"], ["a", "bc"], ["abc"], ["", "abc"])}
    assert len(others) == 4
    assert prefixes(pieces)[-1] in others


def test_grams_are_words_and_pairs_of_words() -> None:
    found = set(grams(["a", "b", "a", "b"]).tolist())
    assert len(found) == 4  # a, b, a b, b a
    assert found == set(grams(["b", "a", "b"]).tolist())
    assert not found & set(grams(["c"]).tolist())


def test_a_long_prompt_keeps_its_ends_and_its_longest_prefixes() -> None:
    pieces = [f"word{n}" for n in range(5000)]
    found = route_keys(7, pieces, "session", "model")
    first, last, middle = (grams([f"word{n}"])[0] for n in (0, 4999, 2000))
    assert first in found.grams
    assert last in found.grams
    assert middle not in found.grams
    assert found.prefixes == prefixes(pieces)
    assert len(found.prefixes) == len(found.shares) == MOST_PREFIXES
    assert found.shares[-1] == 1
    assert found.shares[0] < found.shares[1]
    assert (found.number, found.session, found.model) == (7, "session", "model")


def test_shares_count_bytes() -> None:
    assert shares(["ab", "é", "1234"]) == (0.25, 0.5, 1)
    assert shares(["", ""]) == (0, 0)
    assert shares([]) == ()


def test_text_of_any_kind_is_hashed() -> None:
    found = route_keys(0, ["\ud800 \x00", "漢字" * 5000, "UPPER upper"])
    assert len(found.prefixes) == 3
    assert grams(["upper", "upper"])[0] in found.grams
