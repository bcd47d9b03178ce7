"""Test that no product code changes a module of a dependency, or how one is found."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.house.test_import_rings import FLOORS, ROOT

# Hooks and settings that Python and libraries document for programs.
DOCUMENTED = {
    "sys.unraisablehook",
    "constants.HF_HUB_DISABLE_TELEMETRY",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "torch.backends.cuda.matmul.allow_tf32",
}
FINDERS = ("sys.meta_path", "sys.path_hooks", "sys.path", "sys.modules")


def changes(text: str) -> Iterator[str]:
    """Yield the names in other modules that a file sets, deletes or inserts into."""
    tree = ast.parse(text)
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (alias.asname or alias.name).partition(".")[0].islower()  # a module
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(
            node.ctx, ast.Store | ast.Del
        ):
            root: ast.AST = node
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            if isinstance(root, ast.Name) and root.id in imported:
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith(FINDERS):
            yield ast.unparse(node.func)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            name = ast.unparse(node.args[0]).partition(".")[0]
            if name in imported:
                yield ast.unparse(node)


def test_no_dependency_is_changed() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for floor in FLOORS
        for path in (ROOT / floor).rglob("*.py")
        for name in changes(path.read_text())
        if name not in DOCUMENTED and not name.startswith("os.environ[")
    }
    assert found == set()


def test_changes_are_found() -> None:
    wrong = """
import inspect, sys, torch
from torch import nn
inspect.getmodule = None
torch.nn.Module.forward = None
setattr(nn, 'x', 1)
sys.meta_path.insert(0, None)
sys.modules['torch.fx'] = None
del torch.compile
"""
    assert sorted(changes(wrong)) == [
        "inspect.getmodule", "setattr(nn, 'x', 1)", "sys.meta_path.insert",
        "sys.modules['torch.fx']", "torch.compile", "torch.nn.Module.forward",
    ]  # fmt: skip
