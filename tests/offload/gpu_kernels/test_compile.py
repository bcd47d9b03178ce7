"""Test that device kernels compile for other GPUs, and that a run on CPU never imports Triton.

tools/kernels.py compiles them in a process of its own: here Triton's interpreter replaces the
compiler. `python -m tools kernels --triton 3.6.0` installs the lowest release, once.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is built for Linux only")
import triton

ROOT = Path(__file__).parents[3]
LOWEST = "3.6.0"  # in pyproject.toml
RELEASES = (LOWEST, triton.__version__)
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
KINDS, FRONTS, VARIANTS = 18, 91, 399  # kernels, kernels with a format, all
LARGE = 64  # variants of 64 rows, which sm_100 does not get


def ended(*command, **environment):
    path = os.pathsep.join([os.fspath(ROOT), *sys.path])
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *command],
        env={**kept, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


def compiled(release, folder, *arguments):
    """Return the lines that tools/kernels.py prints, without the last; nothing may be wrong."""
    run = ended(
        "-m", "tools", "kernels", "--triton", release, *arguments,
        TRITON_CACHE_DIR=os.fspath(folder),
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    *lines, last = run.stdout.splitlines()
    count = re.fullmatch(rf"Triton {re.escape(release)}: (\d+) compiled, 0 wrong", last)
    assert count, last
    return lines, int(count[1])


def test_the_lowest_release_is_the_one_that_the_package_allows():
    assert f'"triton>={LOWEST.removesuffix(".0")};' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("release", RELEASES)
def test_every_kernel_passes_the_front_end(release, tmp_path):
    """Most faults of another release show there."""
    if release == LOWEST and not (ROOT / "build" / f"triton-{release}").exists():
        pytest.skip("the lowest Triton is not installed: python -m tools kernels --triton 3.6.0")
    _, count = compiled(release, tmp_path, "--front", "sm_90")
    assert count == FRONTS


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("release", RELEASES)
def test_each_kernel_and_format_compiles_for_one_architecture(release, tmp_path):
    lines, count = compiled(release, tmp_path, "--few", *ARCHITECTURES)
    assert len(lines) == count == FRONTS


@pytest.mark.interpreter  # half an hour of two cores
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("release", RELEASES)
def test_every_variant_compiles_without_spilling(release, architecture, tmp_path):
    lines, count = compiled(release, tmp_path, architecture)
    assert len(lines) == count == (VARIANTS if architecture != "sm_100" else VARIANTS - LARGE)
    registers = {
        name: int(found)
        for name, found in re.findall(r"^sm_\d+ (.+?) +(\d+) registers", "\n".join(lines), re.M)
    }
    assert len({name.split()[0] for name in registers}) == KINDS
    assert registers["expert_inner q4 swiglu"] <= 128
    assert registers["expert_down bf16"] <= 128


@pytest.mark.full
def test_many_rows_go_through_tensor_cores_with_two_turns_of_loads_under_way(tmp_path):
    lines, count = compiled(
        triton.__version__, tmp_path,
        "--only", "grouped_inner q4 swiglu 64|grouped_down q8 32|linear_many mxfp4 16",
        "sm_80", "sm_90",
    )  # fmt: skip
    assert count == 6
    for line in lines:
        found = re.search(r" +0 spilled .* (\d+) mma +(\d+) ahead", line)
        assert found, line
        assert int(found[1]) > 0
        assert int(found[2]) >= 2 * 8  # a turn loads weights, codes and their scales, twice


def test_without_a_device_nothing_imports_triton():
    program = (
        "import sys, moeinf.runtime.engine.engine, moeinf.offload.store.expert_store\n"
        "import moeinf.runtime.dense.cpu_linear\n"
        "sys.exit('triton' in sys.modules)"
    )
    run = ended("-c", program)
    assert run.returncode == 0, run.stderr
