"""Test that each test that needs Linux has the mark `linux(reason)`: other systems skip it."""

from __future__ import annotations

from pathlib import Path

from tests.other_systems.only_linux import unmarked

ROOT = Path(__file__).parents[2]

EXAMPLE = '''
import os
from pathlib import Path
import pytest
from tests.helper import guarded, pages

TREE = {"proc/meminfo": ""}
CODE = """
print(open("/proc/self/smaps"))
"""

def threads():
    return list(Path("/proc/self/task").iterdir())

@pytest.fixture
def files():
    return threads()

def test_a_fixture(files): ...
def test_a_constant(): run(CODE)
def test_an_import(): pages()
def test_a_part(pid): Path(f"/proc/{pid}/stat").read_text()
def test_an_attribute(): os.open("x", os.O_DIRECT)
def test_a_conftest(shared): ...
def test_a_guard(): guarded()
def test_a_generated_tree(): TREE["proc/meminfo"]
def test_a_guarded_attribute(): getattr(os, "O_DIRECT", 0)

@pytest.mark.linux("reads /proc")
def test_a_mark(files): ...
'''
HELPER = """
import sys
import pytest

def pages():
    return open("/proc/self/statm").read()

def guarded():
    if sys.platform != "linux":
        pytest.skip("needs Linux: reads /proc")
    return open("/proc/self/statm").read()
"""
CONFTEST = 'import os\n\ndef shared():\n    return os.access("/dev/shm", os.W_OK)\n'


def test_each_way_to_need_linux_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    for name, text in (("test_it", EXAMPLE), ("helper", HELPER), ("conftest", CONFTEST)):
        (folder / f"{name}.py").write_text(text)
    ways = ("fixture", "constant", "import", "part", "attribute", "conftest")
    wanted = [f"test_{'an' if way[0] in 'ai' else 'a'}_{way}" for way in ways]
    assert unmarked(folder / "test_it.py", tmp_path) == wanted
    (folder / "test_it.py").with_name("test_all.py").write_text(
        EXAMPLE + 'pytestmark = pytest.mark.linux("reads /proc")\n'
    )
    assert unmarked(folder / "test_all.py", tmp_path) == []


def test_the_tests_that_need_linux_are_marked() -> None:
    paths = set((ROOT / "tests").rglob("test_*.py")) - {Path(__file__)}
    assert len(paths) > 300
    wrong = {str(path.relative_to(ROOT)): unmarked(path, ROOT) for path in sorted(paths)}
    assert {path: tests for path, tests in wrong.items() if tests} == {}
