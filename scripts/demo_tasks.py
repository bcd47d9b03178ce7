"""The exercises that the embedded demo is trained on: one generator for each kind.

An exercise is a prompt and its only right answer. A hash of what is asked, whatever the wording,
holds some exercises back from training. `demo_words.UNSEEN` holds back wordings.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from demo_other import QUESTIONS, other_prompt
from demo_words import (
    BARE,
    DAYS,
    IMPERATIVE,
    LISTS,
    OTHER,
    QUESTION,
    SEEN,
    TALK,
    UNSEEN,
    UNSEEN_TALK,
    WORDS,
)

HELD_OUT_PERCENT = 5
LARGEST = 9_999

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_FOODS = "figs pears plums rice soup bread cheese pasta beans olives nuts corn salad cake".split()
_UNITS = (
    ("km", "m", 3), ("m", "cm", 2), ("cm", "mm", 1), ("kg", "g", 3), ("g", "mg", 3), ("l", "ml", 3),
)  # fmt: skip
_UNIT_NAMES = {
    "km": "kilometers", "m": "meters", "cm": "centimeters", "mm": "millimeters", "kg": "kilograms",
    "g": "grams", "mg": "milligrams", "l": "liters", "ml": "milliliters",
}  # fmt: skip
_BRACKETS = {"(": ")", "[": "]", "{": "}", "<": ">"}


@dataclass(frozen=True)
class Item:
    """One exercise: the user's words and the only right answer."""

    kind: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class Asked:
    """An exercise without its wording: the values of the wording's slots, and the answer."""

    slots: dict[str, str]
    answer: str

    def held_out(self, kind: str) -> bool:
        """Return True when training must not see this, in any wording."""
        if kind in _FEW:
            return False
        digest = hashlib.sha256(f"{kind} {sorted(self.slots.values())}".encode()).digest()
        return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def _random_letters(rng: random.Random, low: int, high: int, alphabet: str = _LETTERS) -> str:
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(low, high)))


def _syllables(rng: random.Random) -> str:
    text = "".join(
        rng.choice("bcdfghjklmnprstvwz")
        + rng.choice("aeiou")
        + rng.choice(("", "", "n", "r", "s", "t"))
        for _ in range(rng.randint(1, 4))
    )
    return (rng.choice(("", "", "a", "e", "o", "st", "tr", "ch")) + text)[:10]


def word(rng: random.Random) -> str:
    """Return a word of 2 to 10 letters: an English one, one that could be, or any letters."""
    make = rng.random()
    if make < 0.5:
        return rng.choice(_SHORT_WORDS)
    return _syllables(rng) if make < 0.75 else _random_letters(rng, 2, 10)


_SHORT_WORDS = [word for word in WORDS if len(word) <= 10]


def _number(rng: random.Random) -> int:
    return rng.randrange(10 ** rng.randint(1, 4))


def _add(rng: random.Random) -> Asked:
    a, b = _number(rng), _number(rng)
    return Asked({"a": str(a), "b": str(b)}, str(a + b))


def _subtract(rng: random.Random) -> Asked:
    a, b = _number(rng), _number(rng)
    if a < b and rng.random() < 0.6:
        a, b = b, a
    return Asked({"a": str(a), "b": str(b)}, str(a - b))


def _sort(rng: random.Random) -> Asked:
    words = {word(rng) for _ in range(rng.randint(2, 4))}
    if rng.random() < 0.3:  # words with the same beginning are the hard part
        first = word(rng)
        words.add((first[: rng.randint(1, 3)] + _syllables(rng))[:10])
        words.add(first)
    shuffled = rng.sample(sorted(words), min(4, len(words)))  # a set's own order is not fixed
    glue = rng.choice((", ", ", ", ", ", " ", ","))
    if len(shuffled) > 1 and glue == ", " and rng.random() < 0.15:
        joined = ", ".join(shuffled[:-1]) + " and " + shuffled[-1]
    else:
        joined = glue.join(shuffled)
    return Asked({"x": joined}, ", ".join(sorted(shuffled)))


def _capital_or_not(rng: random.Random) -> str:
    return word(rng).capitalize() if rng.random() < 0.1 else word(rng)


def _reverse(rng: random.Random) -> Asked:
    asked = _capital_or_not(rng)
    return Asked({"x": asked}, asked[::-1])


def _some_words(rng: random.Random) -> str:
    return " ".join(word(rng) for _ in range(rng.choice((1, 1, 1, 1, 2, 3))))


def _upper(rng: random.Random) -> Asked:
    asked = _some_words(rng)
    return Asked({"x": rng.choice((asked, asked, asked, asked.title()))}, asked.upper())


def _lower(rng: random.Random) -> Asked:
    asked = _some_words(rng)
    return Asked({"x": rng.choice((asked.upper(), asked.upper(), asked.title()))}, asked)


def _spell(rng: random.Random) -> Asked:
    asked = _capital_or_not(rng)
    return Asked({"x": asked}, "-".join(asked))


_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
).split()
_TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()


def spelled(n: int) -> str:
    """Return n (0 to 9,999) in English words."""
    if n < 20:
        return _ONES[n]
    if n < 100:
        return _TENS[n // 10] + (f"-{_ONES[n % 10]}" if n % 10 else "")
    unit, name = (1000, "thousand") if n >= 1000 else (100, "hundred")
    rest = f" {spelled(n % unit)}" if n % unit else ""
    return f"{spelled(n // unit)} {name}{rest}"


def _words(rng: random.Random) -> Asked:
    n = _number(rng)
    return Asked({"n": str(n)}, spelled(n))


def _digits(rng: random.Random) -> Asked:
    n = _number(rng)
    return Asked({"n": spelled(n)}, str(n))


def _convert(rng: random.Random) -> Asked:
    big, small, power = rng.choice(_UNITS)
    n = rng.randint(1, 10 ** rng.randint(1, 4) - 1)
    name = _UNIT_NAMES.get if rng.random() < 0.3 else lambda unit: unit
    if rng.random() < 0.5:
        slots = {"n": str(n), "u": name(big), "v": name(small)}
        return Asked(slots, f"{n * 10**power} {small}")
    answer = f"{n / 10**power:.3f}".rstrip("0").rstrip(".") + f" {big}"
    return Asked({"n": str(n), "u": name(small), "v": name(big)}, answer)


def _brackets(rng: random.Random) -> Asked:
    text, open_ = "", []
    for _ in range(rng.randint(2, 10)):
        if open_ and rng.random() < 0.35:
            text += _BRACKETS[open_.pop()]
        else:
            open_.append(rng.choice("([{<"))
            text += open_[-1]
    if not open_:
        open_, text = ["("], text + "("
    return Asked({"x": text}, "".join(_BRACKETS[b] for b in reversed(open_)))


def _json_field(rng: random.Random) -> Asked:
    fields: dict[str, str | int] = {
        "name": rng.choice(LISTS["names"]),
        "age": rng.randint(1, 99),
        "city": rng.choice(LISTS["places"]),
        "food": rng.choice(_FOODS),
        "id": rng.randrange(1000),
    }
    keys = rng.sample(list(fields), rng.randint(1, 3))
    key = rng.choice(keys)
    return Asked({"x": json.dumps({k: fields[k] for k in keys}), "k": key}, str(fields[key]))


def _weekday(rng: random.Random) -> Asked:
    start, n, sign = rng.randrange(7), rng.randint(1, 7), rng.choice((1, -1))
    slots = {
        "n": str(n) if rng.random() < 0.7 else spelled(n),
        "d": "day" if n == 1 else "days",
        "w": "after" if sign > 0 else "before",
        "s": "plus" if sign > 0 else "minus",
        "x": DAYS[start],
    }
    return Asked(slots, DAYS[(start + sign * n) % 7])


SKILLS: dict[str, Callable[[random.Random], Asked]] = {
    "add": _add,
    "subtract": _subtract,
    "sort": _sort,
    "reverse": _reverse,
    "upper": _upper,
    "lower": _lower,
    "spell": _spell,
    "words": _words,
    "digits": _digits,
    "convert": _convert,
    "brackets": _brackets,
    "json": _json_field,
    "weekday": _weekday,
}
KINDS = (*SKILLS, *TALK, "other")
_FEW = ("weekday",)  # 98 questions in all: none is held back, only wordings


STARTS = {
    IMPERATIVE: (
        "please ", "please, ", "can you ", "could you ", "would you ", "hey, ", "hi, ", "ok, ",
        "now ", "now please ", "I want you to ", "next, ", "well, ", "so, ", "ok, now ", "first, ",
    ),
    QUESTION: (
        "tell me, ", "please tell me, ", "can you say ", "hey, ", "hi, ", "so ", "and ", "ok, ",
        "well, ", "my question: ", "I wonder, ", "next, ", "now, ",
    ),
}  # fmt: skip


def _filled(pattern: str, slots: dict[str, str]) -> str:
    for name, value in slots.items():
        pattern = pattern.replace(f"{{{name}}}", value)
    return pattern


def _varied(rng: random.Random, style: str, pattern: str) -> str:
    """Return a wording with a capital, a "please" or a sign at its end, now and then."""
    if style == BARE:
        return pattern
    ends_in_words = pattern.endswith("{x}")
    end: tuple[str, ...] = ("?", "?", "?", "", " ?")
    if style == IMPERATIVE:
        end = (
            ("", "", "", "", ".", "!")
            if ends_in_words
            else ("", "", "", " please", ", please", ".")
        )
    if rng.random() < 0.25:
        pattern = rng.choice(STARTS[style]) + pattern
    pattern += rng.choice(end)
    if style == IMPERATIVE and pattern.startswith(("can", "could")) and rng.random() < 0.7:
        pattern += "?"
    chance = rng.random()
    if chance < 0.4 and pattern[0] != "{":
        return pattern[0].upper() + pattern[1:]
    if chance < 0.44:
        pieces = pattern.split("{")
        return "{".join(
            [pieces[0].upper(), *(slot + "}" + rest.upper() for slot, rest in _slots(pieces[1:]))]
        )
    return pattern


def _slots(pieces: list[str]) -> Iterator[tuple[str, str]]:
    for piece in pieces:
        slot, _, rest = piece.partition("}")
        yield slot, rest


def _pattern(kind: str, rng: random.Random) -> str:
    styles = SEEN[kind]
    # Any style is as likely as its number of wordings; the bare sum is what most people type.
    weights = [3 * len(w) if style == BARE else len(w) for style, w in styles.items()]
    style = rng.choices(list(styles), weights)[0]
    return _varied(rng, style, rng.choice(styles[style]))


def _talk(kind: str, rng: random.Random) -> tuple[str, str]:
    answer, prompts = rng.choice(list(TALK[kind].items()))
    prompt = rng.choice(prompts)
    if kind == "self" and rng.random() < 0.2:
        prompt = (
            rng.choice(("hi, ", "hey, ", "hello, ", "so ", "ok, ", "well, ", "please ")) + prompt
        )
    if rng.random() < 0.5:
        prompt = prompt[0].upper() + prompt[1:]
    return prompt + rng.choice(("", "", "?", "!", ".")), answer


def draw(kind: str, rng: random.Random, *, held_out: bool = False) -> Item:
    """Return a random exercise of `kind`, from the held-out side or the training side of the split.

    Both sides are in wordings that training sees. Kinds of a few fixed questions have one side.
    """
    if kind == "other":
        return Item(kind, other_prompt(rng), OTHER)
    if kind in TALK:
        return Item(kind, *_talk(kind, rng))
    while True:
        asked = SKILLS[kind](rng)
        if kind in _FEW or asked.held_out(kind) == held_out:
            return Item(kind, _filled(_pattern(kind, rng), asked.slots), asked.answer)


def held_out_items(per_kind: int, seed: int = 1) -> Iterator[Item]:
    """Yield `per_kind` distinct held-out exercises of each kind, in a fixed order."""
    for kind in KINDS:
        rng, seen = random.Random(f"{seed}:{kind}"), set[str]()
        while len(seen) < per_kind:
            item = draw(kind, rng, held_out=True)
            if item.prompt not in seen:
                seen.add(item.prompt)
                yield item


def unseen_wordings(per_kind: int, seed: int = 1) -> Iterator[Item]:
    """Yield held-out exercises in wordings that training never sees, in a fixed order."""
    for kind, patterns in UNSEEN.items():
        rng = random.Random(f"{seed}:{kind}:wordings")
        for number in range(per_kind):
            asked = SKILLS[kind](rng)
            while kind not in _FEW and not asked.held_out(kind):
                asked = SKILLS[kind](rng)
            prompt = _filled(patterns[number % len(patterns)], asked.slots)
            yield Item(kind, prompt, asked.answer)
    for kind, answers in UNSEEN_TALK.items():
        for answer, prompts in answers.items():
            yield from (Item(kind, prompt, answer) for prompt in prompts)


def general_questions() -> Iterator[Item]:
    """Yield 100 questions of other people's, which must get the honest answer."""
    yield from (Item("other", question, OTHER) for question in QUESTIONS)
