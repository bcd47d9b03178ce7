"""Read config.json values that may be absent, absurd or hostile.

Nothing read here is ever imported or executed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moeinf.models.base import ModelDataError

# Published models are far below these limits. Larger sizes are typing errors or attacks.
MAX_LAYERS = 4096
MAX_HEADS = 1 << 14
MAX_EXPERTS = 1 << 16
MAX_WIDTH = 1 << 20  # any vector: hidden, intermediate, rank, head_dim
MAX_CONTEXT = 1 << 27
MAX_VOCAB = 1 << 24


class Fields:
    """One JSON object of a config. A null key counts as absent, unless a method says otherwise.

    An absent key takes the default of the family's config class in transformers, or is refused:
    see tests/models/test_config_defaults.py. Every method raises ModelDataError naming the key.
    Several names given to one method are spellings of one key. All that are present must agree.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        if not isinstance(values, Mapping):
            raise ModelDataError(f"{where} must be an object, not {_shown(values)}")
        self._values = values
        self._where = where

    def integer(self, *names: str, high: int, low: int = 1, default: int | None = None) -> int:
        """Return an integer in low … high; it is required when there is no default."""
        value = self.optional_integer(*names, high=high, low=low)
        if value is None:
            value = default
        if value is None:
            raise ModelDataError(f"{self._where} lacks {' or '.join(names)}")
        return value

    def optional_integer(self, *names: str, high: int, low: int = 1) -> int | None:
        """Return an integer in low … high, or None when absent."""
        name, value = self._find(names)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self._error(name, value, f"must be an integer from {low} to {high}")
        return value

    def integers(self, name: str, *, high: int, low: int = 0) -> tuple[int, ...]:
        """Return a list of at most `high` integers in low … high; empty when absent."""
        value = self._values.get(name)
        if value is None:
            return ()
        if (
            not isinstance(value, list | tuple)
            or len(value) > high
            or any(type(item) is not int or not low <= item <= high for item in value)
        ):
            raise self._error(name, value, f"must be a list of integers from {low} to {high}")
        return tuple(value)

    def one_or_more(self, name: str, *, high: int) -> tuple[int, ...]:
        """Return a list of integers in 0 … high, or the only one; empty when absent."""
        if isinstance(self._values.get(name), list | tuple):
            return self.integers(name, high=high)
        one = self.optional_integer(name, low=0, high=high)
        return () if one is None else (one,)

    def words(self, name: str, *, known: tuple[str, ...], count: int) -> tuple[str, ...] | None:
        """Return a list of `count` of the known words, or None when absent."""
        value = self._values.get(name)
        if value is not None and (not isinstance(value, list | tuple) or len(value) != count):
            raise self._error(name, value, f"must be a list of {count} words")
        return self.any_words(name, known=known, high=count)

    def any_words(self, name: str, *, known: tuple[str, ...], high: int) -> tuple[str, ...] | None:
        """Return a list of 1 … `high` of the known words, or the letters of a text of them."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple | str) or not 1 <= len(value) <= high:
            raise self._error(name, value, f"must be a list of 1 to {high} words")
        if any(not isinstance(word, str) or word not in known for word in value):
            raise self._error(name, value, f"has an unknown word (expected {', '.join(known)})")
        return tuple(value)

    def numbers(self, name: str, *, low: float, high: float, most: int) -> tuple[float, ...]:
        """Return a list of 1 … `most` numbers in low … high; it is required."""
        value = self._values.get(name)
        if value is None:
            raise ModelDataError(f"{self._where} lacks {name}")
        if (
            not isinstance(value, list | tuple)
            or not 1 <= len(value) <= most
            or any(type(item) not in (int, float) or not low <= item <= high for item in value)
        ):
            raise self._error(name, value, f"must be a list of numbers from {low:g} to {high:g}")
        return tuple(map(float, value))

    def number(self, name: str, *, low: float, high: float, default: float | None = None) -> float:
        """Return a finite number in low … high; it is required when there is no default."""
        value = self.optional_number(name, low=low, high=high)
        if value is None:
            value = default
        if value is None:
            raise ModelDataError(f"{self._where} lacks {name}")
        return value

    def optional_number(self, name: str, *, low: float, high: float) -> float | None:
        """Return a finite number in low … high, or None when absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not low <= value <= high
        ):
            raise self._error(name, value, f"must be a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self._values.get(name)
        if value is None:
            if default:
                self.refuse_null(name)  # null is false in Python
            return default
        if not isinstance(value, bool):
            raise self._error(name, value, "must be true or false")
        return value

    def choice(self, *names: str, default: str, known: tuple[str, ...]) -> str:
        """Return one of the `known` words; any other is an unsupported feature."""
        name, value = self._find(names)
        if value is None:
            return default
        if not isinstance(value, str) or value not in known:
            raise self._error(name, value, f"is not supported; known: {', '.join(known)}")
        return value

    def section(self, name: str) -> Fields | None:
        """Return a nested object, or None when it is absent or empty."""
        value = self._values.get(name)
        if value is None or value == {}:
            return None
        return Fields(value, f"{self._where}: {name}")

    def sections(self) -> list[Fields]:
        """Return all values as nested objects."""
        return [Fields(value, f"{self._where}: {name}") for name, value in self._values.items()]

    def is_word(self, name: str, word: str) -> bool:
        """Return True if the key's value is this word."""
        value = self._values.get(name)
        return isinstance(value, str) and value == word

    def text(self, name: str) -> str | None:
        """Return a word or a whole number as text to print; None for anything else."""
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | str):
            return None
        printed = str(value) if isinstance(value, str) else _shown(value)
        return "".join(char for char in printed[:40] if char.isprintable())

    def has(self, name: str) -> bool:
        """Return True if the key is present and not null."""
        return self._values.get(name) is not None

    def refuse(self, name: str, *harmless: object) -> None:
        """Refuse a key whose value is present and not among the harmless ones."""
        value = self._values.get(name)
        if value is None or any(type(value) is type(x) and value == x for x in harmless):
            return
        raise self._error(name, value, "is not supported")

    def refuse_null(self, *names: str) -> None:
        """Refuse keys that are present and null.

        For these keys transformers reads null as another value than the default.
        """
        for name in names:
            if name in self._values and self._values[name] is None:
                raise self._error(name, None, "is not supported")

    def expect(self, *names: str) -> None:
        """Require that keys are present, null or not: their default is the size of one model."""
        for name in names:
            if name not in self._values:
                raise ModelDataError(f"{self._where} lacks {name}")

    def _find(self, names: tuple[str, ...]) -> tuple[str, Any]:
        found = [(name, self._values[name]) for name in names if self.has(name)]
        for name, value in found[1:]:
            if value != found[0][1]:
                raise self._error(name, value, f"disagrees with {found[0][0]}")
        return found[0] if found else (names[0], None)

    def _error(self, name: str, value: object, problem: str) -> ModelDataError:
        return ModelDataError(f"{self._where}: {name} = {_shown(value)} {problem}")


def require(holds: bool, problem: str) -> None:
    """Raise ModelDataError with the problem unless the condition holds."""
    if not holds:
        raise ModelDataError(f"config.json: {problem}")


def _shown(value: object) -> str:
    """Return a hostile value as text, short enough to print."""
    if isinstance(value, str):
        return repr(value[:40])
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return f"{value:g}" if math.isfinite(value) else str(value)
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 64 else "a huge integer"
    return f"a {type(value).__name__}"
