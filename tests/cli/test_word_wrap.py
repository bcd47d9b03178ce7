"""Test the wrapping of streamed words on a small terminal."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeinf.cli.word_wrap import WordWrap
from tests.cli.screen import Screen

WORDS = "one two three four five six seven eight nine ten"


def shown(text: str, columns: int, pieces: int = 1) -> Screen:
    """Return a terminal that shows the text, which arrives in pieces of that many characters."""
    wrap, screen = WordWrap(), Screen(columns)
    for start in range(0, len(text), pieces):
        screen.feed(wrap.add(text[start : start + pieces], columns))
    return screen


@pytest.mark.parametrize("pieces", [1, 3, 100])
def test_words_move_to_the_next_line(pieces: int) -> None:
    screen = shown(WORDS, 16, pieces)
    assert screen.lines == ["one two three", "four five six", "seven eight", "nine ten"]
    assert screen.continued == set()


def test_a_word_is_shown_before_it_ends_and_then_moved() -> None:
    """A stream does not wait for the end of a word."""
    wrap = WordWrap()
    assert wrap.add("alpha beta gam", 16) == "alpha beta gam"
    assert wrap.add("m", 16) == "m"
    assert wrap.add("a", 16) == "\x1b[4D\x1b[K\ngamma"
    assert wrap.column == 5


def test_spaces_at_the_edge_are_left_out() -> None:
    assert shown("alpha beta gamm   delta", 16).lines == ["alpha beta gamm", "delta"]
    assert shown("alpha beta gamm \ndelta", 16).lines == ["alpha beta gamm", "delta"]
    assert shown("alpha beta ga\tdelta", 16).lines == ["alpha beta ga", "delta"]


def test_lines_of_the_text_stay() -> None:
    assert shown("a\n\n  b c\n", 20).lines == ["a", "", "  b c", ""]


def test_a_word_longer_than_a_line_gets_no_line_end() -> None:
    """A copied address is whole: only the terminal breaks it."""
    address = "https://example.org/" + "x" * 20
    screen = shown(f"see {address} now", 16)
    assert screen.lines == ["see", address[:16], address[16:32], f"{address[32:]} now"]
    assert screen.continued == {2, 3}
    again = shown(f"{address} one two three", 16)
    assert again.lines == [address[:16], address[16:32], f"{address[32:]} one", "two three"]


@pytest.mark.parametrize("fence", ["```", "~~~"])
def test_code_blocks_get_no_line_ends(fence: str) -> None:
    code = "total = one_and_two + x"
    text = f"{fence}python\n{code}\n{fence}\none two three four"
    screen = shown(text, 16)
    code_lines = [code[:16], code[16:]]
    assert screen.lines == [f"{fence}python", *code_lines, fence, "one two three", "four"]
    assert screen.continued == {2}


def test_a_code_block_that_stays_open_ends_with_the_answer() -> None:
    wrap = WordWrap()
    wrap.add("```\ncode\n", 16)
    wrap.end_answer()
    assert Screen(16).feed(wrap.add("one two three four", 16)).lines == ["one two three", "four"]


def test_other_fences_do_not_end_a_block() -> None:
    text = "```\n~~~\none two three four\n```\n"
    assert shown(text, 16).lines == ["```", "~~~", "one two three fo", "ur", "```", ""]


def test_wide_characters_take_two_cells() -> None:
    screen = shown("日本語の文章は語の間に空白がない", 16)
    assert screen.lines == ["日本語の文章は", "語の間に空白が", "ない"]
    assert screen.continued == set()
    assert shown("alpha beta 日本語", 16).lines == ["alpha beta 日本", "語"]
    assert shown("a" * 8 + " 日本語 ok", 12).lines == ["aaaaaaaa 日", "本語 ok"]


def test_marks_without_width_stay_with_their_letter() -> None:
    screen = shown("alpha beta gamme\u0301 x", 16)
    assert screen.lines == ["alpha beta", "gamme\u0301 x"]


def test_each_piece_follows_the_width_of_its_moment() -> None:
    wrap = WordWrap()
    first, second = wrap.add("one two three ", 40), wrap.add("four five six", 12)
    assert first == "one two three "
    assert second.startswith("four five\nsix")
    assert wrap.column == 3


@pytest.mark.parametrize("columns", [0, 9])
def test_without_a_width_the_text_is_unchanged(columns: int) -> None:
    wrap = WordWrap()
    assert wrap.add(WORDS, columns) == WORDS
    assert wrap.column == 1
    assert wrap.add("\n", columns) == "\n"
    assert wrap.column == 0


@given(
    st.text(alphabet="ab c\t\n`~日é\u0301", max_size=120),
    st.lists(st.integers(1, 9), min_size=1, max_size=9),
    st.integers(10, 30),
)
@settings(deadline=None, derandomize=True)
def test_no_text_is_lost_however_it_is_cut(text: str, cuts: list[int], columns: int) -> None:
    if text[:1] == "\u0301":
        text = "e" + text
    text = text.replace("\n\u0301", "\ne\u0301").replace("\t\u0301", "\te\u0301")
    wrap, screen, rest, turn = WordWrap(), Screen(columns), text, 0
    while rest:
        size = cuts[turn % len(cuts)]
        screen.feed(wrap.add(rest[:size], columns))
        rest, turn = rest[size:], turn + 1
    assert "".join("".join(screen.lines).split()) == "".join(text.split())
    assert screen.lines == shown(text, columns).lines
