"""Make prompts that the demo has no skill for, and read the questions that are held back."""

from __future__ import annotations

import random
import re

from demo_words import LISTS, WORDS, lines

_TEMPLATES, _FOREIGN = lines("other.txt"), lines("foreign.txt")
QUESTIONS = lines("questions.txt")
_KNOWN = {question.lower().rstrip(".?!") for question in QUESTIONS}
_COMMANDS = set("add hello help order read say spell thank turn write".split())
_NOUNS = [word for word in WORDS if word not in _COMMANDS]
_CONVERSATION = ("hey, ", "so ", "ok, ", "please ", "can you ", "could you ", "well, ", "hi, ")
_GLUE = "the a is of and to in what how why my you for on".split()


def _word(rng: random.Random) -> str:
    if rng.random() < 0.85:
        return rng.choice(_NOUNS)
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 13)))


def _topic(rng: random.Random) -> str:
    return rng.choice(LISTS["topics"])


def _verb(rng: random.Random) -> str:
    return rng.choice(LISTS["verbs"])


# The slots of a template. {c} is a letter to count, {D} a number too large for the demo.
_SLOTS = {
    "t": _topic,
    "w": _word,
    "c": lambda rng: rng.choice("abcdefghijklmnopqrstuvwxyz"),
    "v": _verb,
    "a": lambda rng: rng.choice(LISTS["adjectives"]),
    "p": lambda rng: rng.choice(LISTS["places"]),
    "n": lambda rng: rng.choice(LISTS["names"]),
    "l": lambda rng: rng.choice(LISTS["languages"]),
    "d": lambda rng: str(rng.randrange(10 ** rng.randint(1, 4))),
    "D": lambda rng: str(rng.randrange(10_000, 10**7)),
}


def _template(rng: random.Random) -> str:
    text = rng.choice(_TEMPLATES)
    for slot, make in _SLOTS.items():
        text = re.sub(rf"\{{{slot}\}}", lambda _, make=make: make(rng), text)
    return text


def _loose(rng: random.Random) -> str:
    """Return words in no order that means anything: most of what can be typed."""
    words = [
        rng.choice((_word, _word, _word, _topic, _verb))(rng) for _ in range(rng.randint(1, 9))
    ]
    pieces = []
    for word in words:
        pieces += [rng.choice(_GLUE), word] if rng.random() < 0.5 else [word]
    return " ".join(pieces)


def other_prompt(rng: random.Random) -> str:
    """Return something that the demo has no skill for, never one of `QUESTIONS`."""
    while True:
        draw = rng.random()
        if draw < 0.72:
            text = _template(rng)
        elif draw < 0.80:
            parts = (_template(rng) for _ in range(2))
            text = rng.choice((", ", ". ", " and ", " or ", "? ")).join(parts)
        elif draw < 0.95:
            text = _loose(rng)
        else:
            text = rng.choice(_FOREIGN)
        if rng.random() < 0.1:
            text = rng.choice(_CONVERSATION) + text
        if rng.random() < 0.55:
            text = text[:1].upper() + text[1:]
        text += rng.choice(("", "", "?", "?", ".", "!"))
        if text.lower().rstrip(".?!") not in _KNOWN:
            return text
