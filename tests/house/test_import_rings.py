"""Test that no module, imported first, leads back to itself: such a ring breaks under threads.

A module inside a package imports the package first. A package that imports modules of its own is
therefore a ring, too: two threads that enter it at two ends get half a module each.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = ("cli", "server", "api", "runtime", "offload", "models", "native", "errors")
# Programs import `moeinf.api` before any of its modules; `_native` is imported by no other package.
FRONT_DOORS = {"moeinf.api", "moeinf.native"}


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Return each module's name and file."""
    found = {}
    for floor in FLOORS:
        for path in (root / floor).rglob("*.py"):
            parts = ["moeinf", *path.relative_to(root).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports when it is itself imported."""
    waiting: list[ast.AST] = list(ast.parse(path.read_text()).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting.extend(ast.iter_child_nodes(node))


def edges(files: dict[str, Path]) -> dict[str, set[str]]:
    """Return what each module imports, its own package included."""
    known = set(files)
    found = {name: set(imported(path)) & known for name, path in files.items()}
    for name in known:
        package = name.rpartition(".")[0]
        if package in known and package not in FRONT_DOORS:
            found[name].add(package)
    return found


def rings(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules that reach themselves: what is left when all leaves are taken away."""
    left = {name: set(targets) for name, targets in graph.items()}
    while leaves := {name for name, targets in left.items() if not targets}:
        left = {name: targets - leaves for name, targets in left.items() if name not in leaves}
    importers = {name: {one for one in left if name in left[one]} for name in left}
    while tops := {name for name, above in importers.items() if not above}:
        importers = {name: above - tops for name, above in importers.items() if name not in tops}
    return sorted(importers)


def test_no_ring() -> None:
    assert rings(edges(modules())) == []


@pytest.mark.parametrize(
    ("init", "inner", "found"),
    [
        ("", "", []),
        ("from moeinf.models import inner", "", ["moeinf.models", "moeinf.models.inner"]),
        ("import os", "from moeinf.models.inner import x", ["moeinf.models.inner"]),
        ("def f():\n    import moeinf.models.inner", "from moeinf.models import y", []),
    ],
)
def test_rings_are_found(init: str, inner: str, found: list[str], tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text(init)
    (tmp_path / "models" / "inner.py").write_text(inner)
    assert rings(edges(modules(tmp_path))) == found
