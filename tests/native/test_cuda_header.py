"""Our declarations of the CUDA driver's calls, against NVIDIA's own header (a PyPI package)."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECK = Path(__file__).with_name("cuda_header.cpp")


def compiled(include: Path, native: Path) -> str:
    """Return the compiler's errors; empty if the declarations match."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the header with")
    where = ["-isystem", str(include), "-I", str(native)]
    line = [compiler, "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", *where]
    return subprocess.run([*line, str(CHECK)], capture_output=True, text=True, check=False).stderr


@pytest.fixture(scope="module")
def include() -> Path:
    spec = importlib.util.find_spec("nvidia")
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    found = [path.parent for place in places for path in Path(place).glob("*/include/cuda.h")]
    if not found:
        pytest.skip("the package nvidia-cuda-runtime is not installed")
    return found[0]


def test_every_call_and_value(include: Path) -> None:
    assert compiled(include, ROOT / "native") == ""


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("cuMemAlloc_v2, DevicePointer*, std::size_t", "cuMemAlloc_v2, DevicePointer*, unsigned"),
        ("cuMemFree_v2, DevicePointer", "cuMemFree_v2, DevicePointer*"),
        ("cuStreamCreate, StreamHandle*, unsigned", "cuStreamCreate, StreamHandle, unsigned"),
        ("const void*, std::size_t, StreamHandle", "void*, std::size_t, StreamHandle"),
        ("CopyAttributes*, std::size_t*, std::size_t, StreamHandle", "StreamHandle"),
        ("kNotReady = 600", "kNotReady = 601"),
        ("    int type;  // 0: no hint\n    int id;", "    int id;\n    int type;"),
    ],
)
def test_the_check_would_see(right: str, wrong: str, include: Path, tmp_path: Path) -> None:
    for name in ("device/cuda_calls.h", "device/cuda_driver.h"):
        text = (ROOT / "native" / name).read_text()
        if name == "device/cuda_calls.h":
            text = re.sub(r"\s*\\\n\s*", " ", text)  # one line per list
            assert right in text
            text = text.replace(right, wrong)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert "static assertion failed" in compiled(include, tmp_path)
