"""The exercises of the embedded demo: right answers, and what training never sees."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moeinf.runtime.library.library import DEMO_CHECKPOINT

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import demo_tasks as tasks
from demo_other import QUESTIONS, other_prompt


def asked(kind: str, count: int = 300) -> Iterator[tuple[str, str]]:
    rng = random.Random(kind)
    for _ in range(count):
        item = tasks.draw(kind, rng)
        yield item.prompt, item.answer


def test_sums_and_differences() -> None:
    for prompt, answer in asked("add"):
        a, b = map(int, re.findall(r"\d+", prompt))
        assert int(answer) == a + b
    for prompt, answer in asked("subtract"):
        a, b = map(int, re.findall(r"\d+", prompt))
        assert int(answer) == a - b


def test_words_are_sorted() -> None:
    for prompt, answer in asked("sort"):
        words = answer.split(", ")
        assert words == sorted(words)
        assert all(word in prompt for word in words)


@pytest.mark.parametrize("kind", tasks.SKILLS)
def test_training_never_draws_a_held_out_exercise(kind: str) -> None:
    rng = random.Random(3)
    drawn = [tasks.SKILLS[kind](rng) for _ in range(500)]
    kept = sum(one.held_out(kind) for one in drawn)
    assert 5 <= kept <= 60 if kind != "weekday" else kept == 0
    held = {item.prompt for item in tasks.held_out_items(20) if item.kind == kind}
    assert len(held) == 20
    assert kind == "weekday" or not held & {tasks.draw(kind, rng).prompt for _ in range(500)}


def test_unseen_wordings_are_not_seen_ones() -> None:
    def plain(pattern: str) -> str:
        return re.sub(r"[^a-z{}]+", " ", pattern.lower()).strip()

    for kind, patterns in tasks.UNSEEN.items():
        seen = set()
        for style, ones in tasks.SEEN[kind].items():
            starts = {"", *tasks.STARTS.get(style, ())}
            seen |= {plain(start + one) for start in starts for one in ones}
        assert not seen & {plain(one) for one in patterns}, kind


def test_the_general_questions_are_never_drawn() -> None:
    rng = random.Random(5)
    drawn = {other_prompt(rng).lower().rstrip(".?!") for _ in range(20_000)}
    assert len(set(QUESTIONS)) == 100
    assert not drawn & {question.lower().rstrip(".?!") for question in QUESTIONS}


def test_what_the_demo_comes_with_is_what_the_generator_makes() -> None:
    made = {
        "heldout": tasks.held_out_items(per_kind=100),
        "wordings": tasks.unseen_wordings(per_kind=40),
        "questions": tasks.general_questions(),
    }
    for name, items in made.items():
        lines = (DEMO_CHECKPOINT / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [vars(item) for item in items], name
