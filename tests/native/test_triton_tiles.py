"""A Triton kernel reads the very tiles that the native kernels read, and gives the same bits.

Runs in Triton's interpreter, which needs no GPU; skipped where Triton is not installed.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAM = """
import torch
from moeinf.native import LinearKernel
from moeinf.offload.quantise import aligned, dequantise, quantise
from tests.native.triton_tiles import product

torch.manual_seed(3)
for form in ("Q4", "Q8"):
    for rows, columns in ((48, 128), (37, 70), (5, 200)):
        tiles = quantise(torch.randn(rows, columns) * 0.02, form)
        data = aligned(len(tiles))
        data.copy_(tiles)
        kernel = LinearKernel(form.lower(), rows, columns, data.data_ptr())
        for count in (1, 3, 16):
            x = torch.randn(count, columns)
            ours = torch.empty(count, rows)
            kernel.run(x.data_ptr(), count, ours.data_ptr(), True)
            found = product(data, form, rows, columns, x)
            exact = x.double() @ dequantise(data, form, rows, columns).double().T
            error = float((found.double() - exact).norm() / exact.norm())
            worst = float((found - ours).abs().max() / ours.abs().max())
            print(form, rows, columns, count, torch.equal(found, ours), error, worst)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_same_bits_as_the_native_kernels():
    root = Path(__file__).parents[2]
    path = os.pathsep.join([os.fspath(root), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert len(lines) == 18
    for form, _, _, _, same, error, _ in lines:
        assert same == "True", (form, lines)
        assert float(error) < 0.012, (form, lines)
