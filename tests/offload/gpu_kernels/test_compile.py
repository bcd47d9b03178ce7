"""Test that device kernels compile for other GPUs, and that a run on CPU never imports Triton."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def ended(*command, **environment):
    path = os.pathsep.join([os.fspath(ROOT), *sys.path])
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *command],
        env={**kept, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.full
def test_kernels_compile_for_every_generation_without_spilling(tmp_path):
    """Compile a few kernels; without a name the script compiles all."""
    run = ended(
        os.fspath(ROOT / "scripts" / "check_device_kernels.py"),
        "--only", "expert_inner q4 swiglu$|expert_down bf16|linear_rows mxfp4 16|gather_rows q8|"
        "gqa_row fp32 wide|choose_experts sigmoid 8",
        "sm_80", "sm_89", "sm_90", "sm_120",
        TRITON_CACHE_DIR=os.fspath(tmp_path),
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    lines = re.findall(r"^sm_(\d+) (\w+ \w+).* (\d+) registers +0 spilled", run.stdout, re.M)
    assert len(lines) == 24
    assert all(int(registers) <= 128 for *_, registers in lines)


@pytest.mark.full
def test_many_rows_go_through_tensor_cores_with_two_turns_of_loads_under_way(tmp_path):
    run = ended(
        os.fspath(ROOT / "scripts" / "check_device_kernels.py"),
        "--only", "grouped_inner q4 swiglu 64|grouped_down q8 32|linear_many mxfp4 16",
        "sm_80", "sm_90",
        TRITON_CACHE_DIR=os.fspath(tmp_path),
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    found = re.findall(r"^sm_\d+ .* +0 spilled .* (\d+) mma +(\d+) ahead", run.stdout, re.M)
    assert len(found) == 6
    for products, ahead in found:
        assert int(products) > 0
        assert int(ahead) >= 2 * 8  # a turn loads weights, codes and their scales, twice


def test_without_a_device_nothing_imports_triton():
    program = (
        "import sys, moeinf.runtime.engine.engine, moeinf.offload.store.expert_store\n"
        "import moeinf.runtime.dense.cpu_linear\n"
        "sys.exit('triton' in sys.modules)"
    )
    run = ended("-c", program)
    assert run.returncode == 0, run.stderr
