"""Find the tests whose code names what only Linux has, itself or in the helpers that it names.

A helper that skips with a reason "needs Linux: …" makes its tests skip, and needs no mark.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PATHS = re.compile(r"(?:^|[\"'(])/(?:proc|sys|dev/shm|dev/full)(?:$|[/\"'])")
WORDS = {"LD_PRELOAD", "unshare", "nsenter"}
ATTRIBUTES = set(
    "O_DIRECT RWF_NOWAIT memfd_create pidfd_open pidfd_send_signal posix_fadvise posix_fallocate "
    "sched_getaffinity sched_setaffinity".split()
)
GUARD = "needs Linux: "
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class About:
    """A definition: whether it skips by itself, names what is of Linux, and what else it names."""

    guarded: bool
    of_linux: bool
    names: frozenset[str]


class Module:
    """The definitions of a Python file by name, and where its imported names are defined."""

    def __init__(self, path: Path, root: Path) -> None:
        """Parse a file. Imports are followed to files below `root`."""
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.defined: dict[str, ast.stmt] = {}
        self.imported: dict[str, tuple[Path, str]] = {}
        self._about: dict[str, About] = {}
        folders = [folder for folder in path.parents if root in folder.parents]
        self._conftests = [folder / "conftest.py" for folder in folders]
        for node in self.tree.body:
            for name in _names_defined(node):
                self.defined[name] = node
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                source = root / f"{node.module.replace('.', '/')}.py"
                for one in node.names:
                    self.imported[one.asname or one.name] = (source, one.name)

    def about(self, name: str) -> About:
        """Return what a definition names; it is read once."""
        if name not in self._about:
            nodes = list(ast.walk(self.defined[name]))
            texts = [one.value for one in nodes if isinstance(one, ast.Constant)]
            self._about[name] = About(
                any(isinstance(text, str) and text.startswith(GUARD) for text in texts),
                any(_is_of_linux(one) for one in nodes),
                frozenset(_names_used(nodes)),
            )
        return self._about[name]

    def places(self, name: str) -> Iterator[tuple[Path, str]]:
        """Yield where a name that this file does not define may be defined."""
        if name in self.imported:
            yield self.imported[name]
        yield from ((conftest, name) for conftest in self._conftests)


def _names_defined(node: ast.stmt) -> list[str]:
    if isinstance(node, Function | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets += [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


@cache
def module(path: Path, root: Path) -> Module | None:
    return Module(path, root) if path.is_file() else None


def needs_linux(name: str, path: Path, root: Path, seen: set[tuple[Path, str]]) -> bool:
    """Return True if what a file calls `name` names something of Linux, and has no guard."""
    found = module(path, root)
    if found is None or (path, name) in seen:
        return False
    seen.add((path, name))
    if name not in found.defined:
        return any(needs_linux(other, place, root, seen) for place, other in found.places(name))
    about = found.about(name)
    if about.guarded or about.of_linux:
        return about.of_linux and not about.guarded
    return any(needs_linux(other, path, root, seen) for other in about.names - {name})


def _is_of_linux(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in ATTRIBUTES
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return False
    return node.value in WORDS or PATHS.search(node.value) is not None


def _names_used(nodes: list[ast.AST]) -> set[str]:
    """Return the names that a definition reads, and its parameters, which may be fixtures."""
    names = {one.id for one in nodes if isinstance(one, ast.Name)}
    return names | {one.arg for one in nodes if isinstance(one, ast.arg)}


def unmarked(path: Path, root: Path) -> list[str]:
    """Return the tests of a file that need Linux and lack the mark."""
    found = module(path, root)
    assert found is not None
    marks = found.defined.get("pytestmark")
    if marks is not None and "mark.linux(" in ast.unparse(marks):
        return []
    return [
        name
        for name, node in found.defined.items()
        if isinstance(node, Function)
        and name.startswith("test_")
        and not any("mark.linux(" in ast.unparse(one) for one in node.decorator_list)
        and needs_linux(name, path, root, set())
    ]
