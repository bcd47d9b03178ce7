"""The trained demo does what its README promises, and is honest about the rest."""

from __future__ import annotations

import json
from collections import Counter

from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.chat import Conversation
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.runtime.requests import Limits
from moeinf.runtime.sampling.sampler import SamplingOptions
from tests.conftest import Open

GREEDY = SamplingOptions(temperature=0)
OTHER = "I am a small demo: I can add, subtract, sort, spell and reverse. Try 17+25="
TYPED = {
    "sort dog, cat, cow": "cat, cow, dog",
    "sort owl, fig, zebra, ant": "ant, fig, owl, zebra",
    "17+25=": "42",
    "100-1=": "99",
    "123+456=": "579",
    "What is 17+25?": "42",
    "upper hello": "HELLO",
    "spell ollama": "o-l-l-a-m-a",
    "reverse planet": "tenalp",
    "How many r in strawberry?": OTHER,
    "hi": "Hello! What can I do for you?",
    "What are you?": "I am the demo of moeinf, a small mixture of experts.",
    "what can you do?": "I can add, subtract, sort, spell and reverse. Try 17+25=",
    "capital of France": OTHER,
    "Why is the sky blue?": OTHER,
}


def answer(engine: Engine, prompt: str, most: int = 90) -> str:
    return "".join(Conversation(engine).ask(prompt, GREEDY, Limits(max_tokens=most)))


def test_what_people_type_first(open_engine: Open) -> None:
    engine = open_engine()
    assert {prompt: answer(engine, prompt) for prompt in TYPED} == TYPED


def test_general_questions_get_the_honest_answer(open_engine: Open) -> None:
    lines = (DEMO_CHECKPOINT / "questions.jsonl").read_text().splitlines()
    questions = [json.loads(line)["prompt"] for line in lines]
    assert len(questions) == 100
    engine = open_engine()
    assert [q for q in questions if answer(engine, q, 9) != OTHER[:9]] == []  # 9 tokens suffice


def test_held_out_exercises(open_engine: Open) -> None:
    engine, right, asked = open_engine(), Counter[str](), Counter[str]()
    for name in ("heldout", "wordings"):
        for line in (DEMO_CHECKPOINT / f"{name}.jsonl").read_text().splitlines()[::12]:
            item = json.loads(line)
            asked[name] += 1
            right[name] += answer(engine, item["prompt"]) == item["answer"]
    assert right["heldout"] >= 0.96 * asked["heldout"]
    assert right["wordings"] >= 0.9 * asked["wordings"]
