"""Parse JSON of a client: bounded before it is parsed, and without NaN.

A parsed value takes more memory than its text: `[],` is 3 bytes, the list 64, a checked object
some 3 KiB. So the length of a text limits its objects, lists and strings, beside some that are
free.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

MOST_DEPTH = 100
MOST_VALUES = 1 << 20  # beside objects, lists and their first values: commas
FREE_CONTAINERS, BYTES_EACH_CONTAINER = 8192, 128
FREE_STRINGS, BYTES_EACH_STRING = 65_536, 64
# A string, which may lack its end, or a bracket. Possessive: time is linear in any text.
_MARK = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)


class BadJson(ValueError):
    """The text is not JSON, or has more values than its length allows."""


def parse(text: str, admit: Callable[[int], None] | None = None) -> Any:
    """Return the value. Raises BadJson, for NaN and infinite numbers too.

    admit: takes the number of objects and lists before they are made; it may raise.
    """
    containers = count_containers(text)
    if admit is not None:
        admit(containers)
    return load(text)


def load(text: str) -> Any:
    """Return the value of a text whose containers were counted. Raises BadJson."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite_number)
    except json.JSONDecodeError as error:
        raise BadJson(f"the JSON is invalid at character {error.pos}: {error.msg}") from error
    except ValueError as error:  # a number of more than 4,300 digits
        raise BadJson(f"the JSON is invalid: {error}"[:200]) from error


def count_containers(text: str) -> int:
    """Count objects and lists.

    Raises BadJson for text that would take much more memory than its length, or nests deeply.
    """
    most_containers = FREE_CONTAINERS + len(text) // BYTES_EACH_CONTAINER
    most_strings = FREE_STRINGS + len(text) // BYTES_EACH_STRING
    depth = containers = strings = values = end = 0
    for mark in _MARK.finditer(text):
        start = mark.start()
        values += text.count(",", end, start)
        end, first = mark.end(), text[start]
        if first == '"':
            strings += 1
        elif first in "[{":
            containers += 1
            depth += 1
        else:
            depth -= 1
        if depth > MOST_DEPTH:
            raise BadJson(f"the JSON nests more than {MOST_DEPTH} levels deep")
        if containers > most_containers:
            raise BadJson(f"the JSON has more than {most_containers} objects and lists")
        if strings > most_strings:
            raise BadJson(f"the JSON has more than {most_strings} strings")
    if values + text.count(",", end) > MOST_VALUES:
        raise BadJson(f"the JSON has more than {MOST_VALUES} values")
    return containers


def _refuse(name: str) -> NoReturn:
    raise BadJson(f"{name} is not a JSON number")


def _finite_number(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise BadJson(f"{text[:20]} is too large a number")
    return number
