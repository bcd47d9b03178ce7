"""No pattern has two open-ended parts that may give characters back: such a search is quadratic.

`a++` and `(?>…)` never give back. A pattern is found where a module keeps it compiled, and where
source has it as a constant of a call of `re`.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("cli", "server", "runtime", "models", "offload", "errors", "api")
REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)
OPTIONAL = ("triton",)  # modules behind it are read as source alone
RAY = ROOT / "server" / "cluster"  # also these: Ray warns when it is imported


def open_ended(pattern: str, flags: int = 0) -> int:
    """Return the most parts without a bound, on one way through a pattern, that may give back."""
    return _count(_parser.parse(pattern, flags))


def _count(node: Any) -> int:
    """Count in a tree of the parser: in a sequence they add up, of branches the most counts."""
    if isinstance(node, _parser.SubPattern):
        return sum(map(_count, node))
    if not isinstance(node, tuple):
        return 0
    kind, about = node
    if kind in REPEATS:
        most, inner = about[1], _count(about[2])
        return inner + (1 + inner if most == _constants.MAXREPEAT else 0)
    if kind in (_constants.POSSESSIVE_REPEAT, _constants.ATOMIC_GROUP):
        return 0
    if kind == _constants.BRANCH:
        return max(map(_count, about[1]))
    if kind in (_constants.ASSERT, _constants.ASSERT_NOT):
        return _count(about[1])
    if kind == _constants.SUBPATTERN:
        return _count(about[-1])
    return 0


def compiled() -> Iterator[tuple[str, re.Pattern[Any]]]:
    """Yield the patterns that modules keep, with their places."""
    for path in sources():
        if path.is_relative_to(RAY):
            continue
        name = ".".join(("moeinf", *path.relative_to(ROOT).with_suffix("").parts))
        try:
            module = importlib.import_module(name.removesuffix(".__init__"))
        except ImportError as error:
            if (error.name or "").partition(".")[0] not in OPTIONAL:
                raise
            continue
        for key, value in vars(module).items():
            for one in _patterns(value):
                yield f"{path.relative_to(ROOT)}: {key}", one


def _patterns(value: Any, depth: int = 3) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, dict | list | tuple) and depth:
        for one in value.values() if isinstance(value, dict) else value:
            yield from _patterns(one, depth - 1)


def sources() -> list[Path]:
    return [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]


def constants() -> Iterator[tuple[str, str]]:
    """Yield the constant patterns of calls such as re.compile("…"), with their places."""
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            of_re = isinstance(node.func.value, ast.Name) and node.func.value.id == "re"
            first = node.args[0] if node.args else None
            if of_re and isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", first.value


def test_the_rule() -> None:
    for bad in (r"\s*a*", "(a+)+", "(?:a|b+)*", ".*x.*", r"(.*?)</a>\s*<b>(.*?)</b>", "(?=a*).*"):
        assert open_ended(bad) > 1
    for good in ("a*", r"\s*+a*", "(a++)+", "a*|b*", "a{1,9}b*", "(?>a*)b*", "[a-z]"):
        assert open_ended(good) <= 1


def test_no_pattern_has_two_open_ended_parts() -> None:
    found = list(compiled())
    assert len(found) > 60
    wrong = {place for place, one in found if open_ended(one.pattern, one.flags) > 1}
    wrong |= {place for place, one in constants() if open_ended(one) > 1}
    assert sorted(wrong) == []
