"""Test the error tree: codes, hints, exit codes, statuses, and its table in docs/errors.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="imports each module, GPU kernels too")

from moeinf.errors import MoeinfError
from tests.errors.tree import FLOORS, coded, exceptions, in_tree

ROOT = Path(__file__).parents[2]

# Caught before they reach a user: ends of work, retries, and errors that are converted.
CAUGHT = set(
    """Abandoned BadAnswer BadFile BadJson BadRanks BadTokenizer BadVocabulary ClientGone Differs
    InvalidBody NotFused SecondInterrupt Leave LimitExceeded Lost NotRegular RetryLater
    Refused Stopped TooSlow Unfinished _Before""".split()
)
BUGS = {"Panic"}  # shown as a bug


def test_every_exception_is_in_the_tree_or_is_caught() -> None:
    outside = {kind.__name__ for kind in exceptions() if not issubclass(kind, MoeinfError)}
    assert outside == CAUGHT | BUGS


def test_every_leaf_has_a_code_of_its_own() -> None:
    parents = {base for kind in in_tree() for base in kind.__bases__}
    own = [kind for kind in in_tree() if "code" in vars(kind)]
    assert [kind for kind in in_tree() if kind not in parents and kind not in own] == []
    codes = [kind.code for kind in own if kind.code]
    assert len(codes) == len(set(codes))
    assert [code for code in codes if not re.fullmatch(r"[a-z]+(_[a-z]+)*", code)] == []
    assert set(own) - {MoeinfError} == set(coded()), "a class inherits the code of another"


@pytest.mark.parametrize("kind", coded(), ids=lambda kind: kind.__name__)
def test_what_follows_from_an_error(kind: type[MoeinfError]) -> None:
    assert kind.exit_code in (1, 2)
    assert kind.http_status in (400, 401, 403, 404, 405, 408, 409, 413, 431, 500, 503)
    assert kind.hint or "hint" in (kind.__init__.__code__.co_names), "nothing to try"
    assert not kind.hint.endswith(".")


def test_no_class_is_looked_up_by_its_name() -> None:
    """Outside `__all__`, a string with a class name would be a lookup key or a comparison."""
    names = {kind.__name__ for kind in exceptions()}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for package in FLOORS
        for path in (ROOT / package.__name__.rpartition(".")[2]).rglob("*.py")
        for statement in ast.parse(path.read_text()).body
        if not (isinstance(statement, ast.Assign) and ast.unparse(statement).startswith("__all__"))
        for node in ast.walk(statement)
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert found == []


def row(kind: type[MoeinfError]) -> str:
    meaning = str(kind.__doc__).partition("\n")[0].split(". ")[0].rstrip(".")
    return f"| `{kind.code}` | {kind.exit_code} | {kind.http_status} | {meaning} |"


def test_the_table_of_codes() -> None:
    text = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    told = [line for line in text.splitlines() if line.startswith("| `")]
    assert told == sorted(row(kind) for kind in coded())


def test_a_text_without_end_is_cut() -> None:
    error = MoeinfError("x" * 10_000 + " is invalid")
    assert len(str(error)) < 4100
    assert str(error).endswith("x is invalid")
    assert str(MoeinfError("short")) == "short"
