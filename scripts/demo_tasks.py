"""The task kinds that the embedded demo is trained on: one generator per kind.

It makes (prompt, answer) pairs as text. A hash of the prompt decides which pairs are held out from
training.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

HELD_OUT_PERCENT = 5

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_NAMES = (
    "Ana Ben Cleo Dan Eva Finn Gil Hana Ivan Jana Kim Leo Mia Ned Olga Paul Rita Sam Tina Uma "
    "Vera Will Yara Zoe Alex Bruno Carla Diego Emma Felix Grace Hugo Irene Jonas Karin Lukas "
    "Marta Nora Oscar Petra"
).split()
_CITIES = (
    "Oslo Rome Paris Berlin Madrid Lisbon Vienna Prague Dublin Athens Cairo Lima Quito Tokyo "
    "Seoul Delhi Hanoi Manila Nairobi Tunis Riga Bern Warsaw Zagreb Boston Denver Austin Toronto"
).split()
_FOODS = (
    "figs pears plums apples rice soup bread cheese pasta tofu beans olives honey nuts dates "
    "mango corn carrots peas salad cake tea coffee milk grapes melon lemons"
).split()
_WORDS = (
    "apple bird cat dog eagle fig goat hat ink jam kite lamp moon nest oak pear quill rose sun "
    "tree urn vase wolf yak zebra ant bread cloud door elm fox gem hill iron jar king leaf mint "
    "nut owl pen queen rain salt tent unit van wine yarn zinc arm bell coin desk east fish"
).split()
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_EVENTS = "exam flight party match trip concert visit lesson race wedding meeting holiday".split()
_CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Norway": "Oslo",
    "Portugal": "Lisbon", "Austria": "Vienna", "Ireland": "Dublin", "Greece": "Athens",
    "Egypt": "Cairo", "Peru": "Lima", "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi",
    "Vietnam": "Hanoi", "Kenya": "Nairobi", "Tunisia": "Tunis", "Latvia": "Riga",
    "Poland": "Warsaw", "Croatia": "Zagreb", "Sweden": "Stockholm", "Denmark": "Copenhagen",
    "Finland": "Helsinki", "Belgium": "Brussels", "Hungary": "Budapest", "Romania": "Bucharest",
    "Bulgaria": "Sofia", "Serbia": "Belgrade", "Ukraine": "Kyiv", "Turkey": "Ankara",
    "Iran": "Tehran", "Iraq": "Baghdad", "Cuba": "Havana", "Mexico": "Mexico City",
    "Canada": "Ottawa", "Brazil": "Brasilia", "Chile": "Santiago", "Colombia": "Bogota",
    "Australia": "Canberra", "Thailand": "Bangkok", "Nepal": "Kathmandu", "Ghana": "Accra",
    "Senegal": "Dakar", "Morocco": "Rabat", "Iceland": "Reykjavik", "Estonia": "Tallinn",
}  # fmt: skip
_UNITS = (
    ("km", "m", 3), ("m", "cm", 2), ("cm", "mm", 1), ("kg", "g", 3), ("g", "mg", 3), ("l", "ml", 3),
)  # fmt: skip
_BRACKETS = {"(": ")", "[": "]", "{": "}", "<": ">"}
_SMALL_TALK = {
    "hi": "Hello! What can I do for you?",
    "hello": "Hello! What can I do for you?",
    "hey": "Hello! What can I do for you?",
    "good morning": "Good morning! What can I do for you?",
    "how are you?": "I am fine, thank you.",
    "who are you?": "I am the demo of moeinf, a tiny mixture of experts.",
    "what is your name?": "I am the demo of moeinf, a tiny mixture of experts.",
    "what can you do?": "I add, sort, spell, count, convert and more. Try 17+25=",
    "help": "I add, sort, spell, count, convert and more. Try 17+25=",
    "thanks": "You are welcome.",
    "thank you": "You are welcome.",
    "bye": "Goodbye!",
}


@dataclass(frozen=True)
class Item:
    """One exercise: the user's words and the only right answer."""

    kind: str
    prompt: str
    answer: str

    @property
    def held_out(self) -> bool:
        """True when training must not see this prompt, nor the same sum with other spaces."""
        digest = hashlib.sha256(self.prompt.replace(" ", "").rstrip("=").encode()).digest()
        return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT and (
            self.prompt not in _SMALL_TALK
        )


def _word(rng: random.Random, low: int, high: int, alphabet: str = _LETTERS) -> str:
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(low, high)))


def _sum(rng: random.Random, sign: str) -> tuple[int, int, str]:
    a, b = rng.randrange(100), rng.randrange(100)
    form = rng.choice(("{}{}{}=", "{}{}{}=", "{}{}{}=", "{} {} {} =", "{}{}{}"))
    return a, b, form.format(a, sign, b)


def _add(rng: random.Random) -> tuple[str, str]:
    a, b, prompt = _sum(rng, "+")
    return prompt, str(a + b)


def _subtract(rng: random.Random) -> tuple[str, str]:
    a, b, prompt = _sum(rng, "-")
    return prompt, str(a - b)


def _reverse(rng: random.Random) -> tuple[str, str]:
    word = _word(rng, 3, 7)
    return f"reverse {word}", word[::-1]


def _upper(rng: random.Random) -> tuple[str, str]:
    word = _word(rng, 3, 8)
    return f"upper case: {word}", word.upper()


def _sort(rng: random.Random) -> tuple[str, str]:
    words = rng.sample(_WORDS, rng.randint(3, 4))
    return "sort " + ", ".join(words), ", ".join(sorted(words))


def _count(rng: random.Random) -> tuple[str, str]:
    alphabet = rng.sample(_LETTERS, 4)
    word = _word(rng, 4, 10, "".join(alphabet))
    return f"How many {alphabet[0]} in {word}?", str(word.count(alphabet[0]))


_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
).split()
_TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()


def spelled(n: int) -> str:
    """Return n (0 … 99,999) in English words."""
    if n < 20:
        return _ONES[n]
    if n < 100:
        return _TENS[n // 10] + (f"-{_ONES[n % 10]}" if n % 10 else "")
    unit, name = (1000, "thousand") if n >= 1000 else (100, "hundred")
    rest = f" {spelled(n % unit)}" if n % unit else ""
    return f"{spelled(n // unit)} {name}{rest}"


def _any_number(rng: random.Random) -> int:
    return rng.randrange(10 ** rng.randint(1, 5))


def _spell(rng: random.Random) -> tuple[str, str]:
    n = _any_number(rng)
    return f"{n} in words", spelled(n)


def _digits(rng: random.Random) -> tuple[str, str]:
    n = _any_number(rng)
    return f"{spelled(n)} in digits", str(n)


def _convert(rng: random.Random) -> tuple[str, str]:
    big, small, power = rng.choice(_UNITS)
    n = rng.randint(1, 10 ** rng.randint(1, 4) - 1)
    if rng.random() < 0.5:
        return f"{n} {big} in {small}?", f"{n * 10**power} {small}"
    return f"{n} {small} in {big}?", f"{n / 10**power:.3f}".rstrip("0").rstrip(".") + f" {big}"


def _capital(rng: random.Random) -> tuple[str, str]:
    country, city = rng.choice(list(_CAPITALS.items()))
    if rng.random() < 0.3:
        form = rng.choice(("{} is the capital of?", "Which country has the capital {}?"))
        return form.format(city), country
    form = rng.choice(
        (
            "What is the capital of {}?",
            "capital of {}?",
            "the capital of {} is",
            "Name the capital of {}.",
        )
    )
    return form.format(country), city


def _brackets(rng: random.Random) -> tuple[str, str]:
    text, open_ = "", []
    for _ in range(rng.randint(3, 10)):
        if open_ and rng.random() < 0.35:
            text += _BRACKETS[open_.pop()]
        else:
            open_.append(rng.choice("([{<"))
            text += open_[-1]
    if not open_:
        open_, text = ["("], text + "("
    return f"close {text}", "".join(_BRACKETS[b] for b in reversed(open_))


def _json_field(rng: random.Random) -> tuple[str, str]:
    fields: dict[str, str | int] = {
        "name": rng.choice(_NAMES),
        "age": rng.randint(1, 99),
        "city": rng.choice(_CITIES),
        "food": rng.choice(_FOODS),
        "id": rng.randrange(1000),
    }
    keys = rng.sample(list(fields), rng.randint(2, 4))
    key = rng.choice(keys)
    return json.dumps({k: fields[k] for k in keys}) + f" {key}", str(fields[key])


def _weekday(rng: random.Random) -> tuple[str, str]:
    start, n, sign = rng.randrange(7), rng.randint(1, 14), rng.choice((1, -1))
    word = "after" if sign > 0 else "before"
    days = "day" if n == 1 else "days"
    who, what = rng.choice(_NAMES), rng.choice(_EVENTS)
    prompt = f"{who}'s {what} is {n} {days} {word} {_DAYS[start]}. Which day?"
    return prompt, _DAYS[(start + sign * n) % 7]


def _dialogue(rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.15:
        return rng.choice(list(_SMALL_TALK.items()))
    name, city, food = rng.choice(_NAMES), rng.choice(_CITIES), rng.choice(_FOODS)
    question, answer = rng.choice(
        (
            ("What is my name?", f"Your name is {name}."),
            ("Where do I live?", f"You live in {city}."),
            ("What do I like?", f"You like {food}."),
        )
    )
    return f"I am {name}, I live in {city} and I like {food}. {question}", answer


KINDS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "add": _add,
    "subtract": _subtract,
    "reverse": _reverse,
    "upper": _upper,
    "sort": _sort,
    "count": _count,
    "spell": _spell,
    "digits": _digits,
    "convert": _convert,
    "capital": _capital,
    "brackets": _brackets,
    "json": _json_field,
    "weekday": _weekday,
    "dialogue": _dialogue,
}


def draw(kind: str, rng: random.Random, *, held_out: bool) -> Item:
    """Return a random item of `kind`, from the held-out side or the training side of the split."""
    while True:
        item = Item(kind, *KINDS[kind](rng))
        if item.held_out == held_out:
            return item


def held_out_items(per_kind: int, seed: int = 1) -> Iterator[Item]:
    """Yield up to `per_kind` distinct held-out items of each kind, in a fixed order."""
    for kind in KINDS:
        rng, seen = random.Random(f"{seed}:{kind}"), set[str]()
        for _ in range(20 * per_kind):
            item = draw(kind, rng, held_out=True)
            if item.prompt not in seen:
                seen.add(item.prompt)
                yield item
            if len(seen) == per_kind:
                break
