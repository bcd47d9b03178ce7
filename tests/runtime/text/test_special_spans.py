"""Special tokens are found as by a flat alternation, in time independent of the text."""

from __future__ import annotations

import json
import random
import re
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from moeinf.runtime.text import special_spans
from moeinf.runtime.text.special_spans import SpecialSpans
from moeinf.runtime.text.tokenizer import Tokenizer
from tests.tokenizer_files import document, token

PLACEHOLDERS = [f"<｜place▁holder▁no▁{number}｜>" for number in range(1000)]
HAN = [f"<{chr(number)}>" for number in range(0x4E00, 0x4E00 + 800)]
SETS = {
    "one": ["<|end|>"],
    "prefixes of others": ["<", "<|", "<|end", "<|end|>", "<|ending|>", "|>", "|"],
    "placeholders": PLACEHOLDERS,
    "a, aa, aaa": ["a" * size for size in range(1, 150)],
    "b, ab, aab": ["a" * size + "b" for size in range(70)],
    "forks at each character": [
        "ab" * size + end for size in range(25) for end in ("c", "ad", *map(chr, range(200, 212)))
    ],
    "many first characters": [chr(number) + "x" for number in range(0x20, 0x250)],
    "marks of patterns": ["[", "]", "^", "-", "\\", "(?:", "(", ".*", "a-z", "\n", " ", "\0", "]^"],
    "far characters": ["\ud7ff", "\U0010ffff", "\U0010ffffa", "\U00010000", "é"],
    "none": [],
}


def flat(tokens: list[str], text: str) -> list[tuple[int, int]]:
    longest_first = sorted(tokens, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
    return [found.span() for found in pattern.finditer(text)]


def texts(tokens: list[str], chance: random.Random) -> list[str]:
    """Return tokens, parts of them and other characters in random order; also the empty text."""
    letters = sorted({letter for token in tokens for letter in token} | {"z", "<"})
    found = ["", *letters[:3], letters[0] * 3000]
    for _ in range(20):
        pieces = []
        for _ in range(60):
            token = chance.choice(tokens or ["<|end|>"])
            cut = token[: chance.randrange(len(token) + 1)]
            pieces.append(chance.choice([token, cut, chance.choice(letters)]))
        found.append("".join(pieces))
    return found


@pytest.mark.parametrize("window", [1, 7, None])
@pytest.mark.parametrize("name", SETS)
def test_the_spans_are_those_of_a_flat_alternation(name: str, window: int | None) -> None:
    spans, chance = SpecialSpans(SETS[name]), random.Random(name)
    spans.window = window or spans.window
    for text in texts(SETS[name], chance):
        assert list(spans.find(text)) == flat(SETS[name], text), text


def test_the_spans_of_random_sets() -> None:
    chance = random.Random(7)
    for _ in range(300):
        letters = chance.choice(["ab", "abc", "<|>e"])
        sizes = [chance.randrange(1, 9) for _ in range(chance.randrange(1, 40))]
        tokens = ["".join(chance.choices(letters, k=size)) for size in sizes]
        spans = SpecialSpans(tokens)
        spans.window = chance.choice([1, 3, 10, 1000])
        text = "".join(chance.choices(letters, k=200))
        assert list(spans.find(text)) == flat(tokens, text), (tokens, text)


def test_a_token_is_found_where_windows_meet() -> None:
    spans = SpecialSpans(["<|end|>", "<|end|><|end|>", "<"])
    for size in range(spans.window - 20, spans.window + 5):
        text = "x" * size + "<|end|><|end|>x"
        assert list(spans.find(text)) == [(size, size + 14)]


def test_a_long_token_makes_windows_small() -> None:
    assert SpecialSpans(["<"]).window == special_spans._WINDOW
    assert SpecialSpans(["a" * (1 << 16), "b"]).window == special_spans._LEAST_WINDOW


@pytest.mark.parametrize("piece", ["<", "<｜", "<｜place▁holder▁no▁", "<｜place▁holder▁no▁99", "é"])
def test_a_thousand_tokens_cost_a_place_no_more_than_a_few(piece: str) -> None:
    """A flat alternation took 2.6 s for 400,000 times "<"."""
    spans = SpecialSpans([*PLACEHOLDERS, *HAN])
    text = piece * (1_000_000 // len(piece))
    start = time.process_time()
    assert list(spans.find(text)) == []
    assert time.process_time() - start < 1.5


def test_a_user_text_is_fenced_fast(tmp_path: Path) -> None:
    added = [token(256 + place, text) for place, text in enumerate(PLACEHOLDERS + HAN)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(document(added_tokens=added)))
    tokenizer, text = Tokenizer(tmp_path), "<" * 1_000_000
    start = time.process_time()
    assert tokenizer.guard(text) == text
    assert time.process_time() - start < 1.5


def test_other_threads_run_while_a_text_is_searched() -> None:
    """One search is a single call, during which no other thread runs."""
    spans, text = SpecialSpans([*PLACEHOLDERS, *HAN]), "<" * 4_000_000
    ticks, over = list[float](), threading.Event()

    def tick() -> None:
        while not over.is_set():
            ticks.append(time.monotonic())
            time.sleep(0)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    thread = threading.Thread(target=tick)
    try:
        thread.start()
        start = time.monotonic()
        list(spans.find(text))
        end = time.monotonic()
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(before)
    within = [start, *(at for at in ticks if start < at < end), end]
    assert max(later - earlier for earlier, later in pairwise(within)) < 0.9 * (end - start)
