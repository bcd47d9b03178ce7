"""Test that the tables of msgspec's types are built at import, where one thread runs.

msgspec builds a type's tables at its first use, without a lock: two threads at once crash.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.test_import_rings import FLOORS, ROOT

FIRST_READS = """
import sys, threading
from pathlib import Path
from moeinf.runtime.library.manifest import read_manifest

folder, barrier = Path(sys.argv[1]), threading.Barrier(16)

def read():
    barrier.wait()
    read_manifest(folder)

sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=read) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("read")
"""


def late(text: str) -> Iterator[str]:
    """Yield the calls that may be the first use of a type, inside functions or by a type."""
    tree = ast.parse(text)
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        typed = any(keyword.arg == "type" for keyword in node.keywords)
        if name.startswith("msgspec.") and (
            (name.endswith(".decode") and typed)
            or (name.endswith("Decoder") and id(node) in inside)
            or (name == "msgspec.convert" and ast.unparse(node.args[1]) not in ("str", "int"))
        ):
            yield ast.unparse(node)


def test_decoders_are_made_at_import() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {call}"
        for floor in FLOORS
        for path in (ROOT / floor).rglob("*.py")
        for call in late(path.read_text())
    }
    assert found == set()


def test_late_calls_are_found() -> None:
    wrong = """
A = msgspec.json.Decoder(A)
def f(x):
    msgspec.json.decode(x, type=A)
    msgspec.msgpack.Decoder(A)
    msgspec.convert(x, A)
    msgspec.convert(x, str)
"""
    assert sorted(late(wrong)) == [
        "msgspec.convert(x, A)", "msgspec.json.decode(x, type=A)", "msgspec.msgpack.Decoder(A)",
    ]  # fmt: skip


@pytest.mark.parametrize("count", [3, pytest.param(60, marks=pytest.mark.full)])
def test_first_reads_of_many_threads(count: int, demo_home: Path) -> None:
    folder = demo_home / "models/demo/bf16"
    for _ in range(count):
        done = subprocess.run(
            [sys.executable, "-c", FIRST_READS, str(folder)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, "read\n"), done.stderr
