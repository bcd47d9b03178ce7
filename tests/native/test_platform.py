"""native/platform: it alone names what differs by system, and compiles for each."""

from __future__ import annotations

import importlib.util
import platform
import re
from pathlib import Path

import pytest

from moeinf.native import _native, attention_path
from scripts import check_systems

OF_ONE_SYSTEM = re.compile(
    r"#include <(sys/\w+|unistd|fcntl|pthread|sched|signal|dlfcn|io|windows|process)(\.h)?>"
)
PLACES = {"kernels/amx/kernels.cpp"}  # asks Linux for the registers of AMX


def test_headers_of_one_system_are_included_in_platform_only() -> None:
    native = check_systems.NATIVE
    found = {
        str(path.relative_to(native))
        for path in native.rglob("*.*")
        if path.suffix in (".cpp", ".h") and OF_ONE_SYSTEM.search(path.read_text())
    }
    assert {name for name in found if not name.startswith("platform/")} == PLACES


@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="pip install ziglang")
@pytest.mark.parametrize("target", check_systems.TARGETS)
def test_platform_compiles_for_a_system(target: str, tmp_path: Path) -> None:
    headers = sorted((check_systems.NATIVE / "platform").iterdir())
    source = tmp_path / "all.cpp"
    source.write_text("".join(f'#include "platform/{path.name}"\n' for path in headers))
    assert check_systems.compiled(target, None, tmp_path, source) == ""
    source.write_text(source.read_text() + "int broken = moeinf::platform::none;\n")
    assert "no member named 'none'" in check_systems.compiled(target, None, tmp_path, source)


@pytest.mark.linux("reads /proc")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="asks x86-64's features")
def test_kernels_are_those_that_the_processor_has() -> None:
    """Compare with the system's list. A compiler's own answer may be no for every feature."""
    flags = set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text()))
    avx512 = {"avx512f", "avx512bw", "avx512vl", "avx512_vnni"}
    try:
        assert _native._use_kernels("avx2") == ({"avx2", "fma", "f16c"} <= flags)
        assert _native._use_kernels("avx512") == ({"avx2", "fma", "f16c", *avx512} <= flags)
    finally:
        assert _native._use_kernels("")
    assert (attention_path() != "portable") == ({"avx2", "fma"} <= flags)
