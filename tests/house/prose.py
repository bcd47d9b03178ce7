"""Read the prose of a file: sentences of Markdown, docstrings and comments of Python and C++.

Code, quotations and link targets are omitted. A heading is prose, but not a sentence.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

Line = tuple[int, str]  # line number, text
_FENCE = re.compile(r"^\s*(```|~~~)")
_NOT_PROSE = re.compile(r"``.*?``|`[^`]*`|\"[^\"]*\"|“[^”]*”|\]\([^)]*\)|<[^>]*>|https?://\S+")
_START = re.compile(r"^[\s>#|*\-]*(?:\d+\.\s+)?")
_END = re.compile(r"(?<=[.!:])[)*\"]*\s+(?=[A-Z])|\s\|\s")


def markdown(text: str) -> Iterator[Line]:
    """Yield the lines outside code blocks."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if _FENCE.match(line):
            inside = not inside
        elif not inside and not line.startswith("    "):
            yield number, line


def python(text: str) -> Iterator[Line]:
    """Yield the lines of docstrings and comments."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and ast.get_docstring(node, clean=False):
                lines = (ast.get_docstring(node, clean=False) or "").splitlines()
                yield from ((first.lineno + at, line) for at, line in enumerate(lines))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def cpp(text: str) -> Iterator[Line]:
    """Yield the lines of comments that begin with two slashes."""
    for number, line in enumerate(text.splitlines(), 1):
        _, slashes, comment = line.partition("//")
        if slashes:
            yield number, comment


READERS: dict[str, Callable[[str], Iterator[Line]]] = {
    ".md": markdown,
    ".py": python,
    ".cpp": cpp,
    ".h": cpp,
}


@cache
def prose(path: Path) -> tuple[Line, ...]:
    """Return the numbered lines of a file's prose, without code and quotations."""
    lines = READERS[path.suffix](path.read_text(encoding="utf-8"))
    return tuple((number, _NOT_PROSE.sub("…", line)) for number, line in lines)


def sentences(path: Path) -> Iterator[Line]:
    """Yield the beginnings of sentences with their lines.

    A sentence begins after a full stop, or with a paragraph or list item.
    """
    before, ended = -1, True
    for number, line in prose(path):
        if line.startswith("#") and path.suffix == ".md":
            continue
        text = _START.sub("", line)
        fresh = ended or number != before + 1 or _begins_item(line)
        for at, part in enumerate(_END.split(text)):
            if part and (at or fresh):
                yield number, part.strip("*_| ")
        before, ended = number, not text or text.rstrip().endswith((".", "!", "?", ":", "|"))


def _begins_item(line: str) -> bool:
    return bool(re.match(r"\s*(?:[-*#>|]|\d+\.\s)", line))
