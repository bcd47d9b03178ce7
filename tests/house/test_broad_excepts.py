"""Test that a fault of this program is never told as the fault of a file, a text or a hub."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.house.test_import_rings import ROOT

ROOMS = ("runtime", "models", "offload", "server")
RAYS = "server/cluster/launch.py"  # its client raises many kinds, and reads no file


def blaming(text: str) -> Iterator[int]:
    """Yield the lines of handlers that raise another error for any exception, ImportError too."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Try):
            continue
        spared = False
        for handler in node.handlers:
            caught = "" if handler.type is None else ast.unparse(handler.type)
            raises = any(
                isinstance(one, ast.Raise) and isinstance(one.exc, ast.Call)
                for one in ast.walk(handler)
            )
            if caught == "Exception" and raises and not spared:
                yield handler.lineno
            spared |= "ImportError" in caught


def test_import_errors_are_not_blamed_on_files() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        for line in blaming(path.read_text())
        if path != ROOT / RAYS
    }
    assert found == set()


def test_blaming_is_found() -> None:
    wrong = """
try:
    read()
except Exception as error:
    raise BadCheckpoint("the file") from error
"""
    spared = wrong.replace("except Exception", "except ImportError:\n    raise\nexcept Exception")
    assert (list(blaming(wrong)), list(blaming(spared))) == ([4], [])
