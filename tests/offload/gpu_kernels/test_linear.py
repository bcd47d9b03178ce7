"""Compare dense layers and embeddings on the device with runtime/dense/cpu_linear.py, bit for bit.

Without a GPU, Triton's interpreter runs the kernels (tests/conftest.py).
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")

from moeinf.native import LinearKernel, _native
from moeinf.offload.gpu_kernels import linear as on_device
from moeinf.runtime.dense import cpu_linear as on_cpu
from tests import gguf_blocks
from tests.native.test_kernels import relative, stored
from tests.offload.device import DEVICE

pytestmark = pytest.mark.kernel("large")


def matrix(form, rows, columns):
    """Return the same matrix for the CPU and for the device, and its values."""
    generator = torch.Generator().manual_seed(3)
    data, values = stored(torch.randn(rows, columns, generator=generator) * 0.05, form)
    return data, data.clone().to(DEVICE), values


@pytest.mark.parametrize("form", ["q4", "q8", "q3", "q2", "mxfp4", *gguf_blocks.FORMS, "bf16"])
@pytest.mark.parametrize(("rows", "columns"), [(37, 70), (5, 33), (40, 320)])
def test_up_to_16_rows_get_the_cpus_bits_in_any_company(form, rows, columns):
    data, there, values = matrix(form, rows, columns)
    if form == "bf16":
        ours = on_device.plain_linear(there.view(torch.bfloat16).view(rows, columns), None)
    else:
        ours = on_device.tiled_linear(there, form.upper(), rows, columns, None)
    x = torch.randn(17, columns, generator=torch.Generator().manual_seed(4)).bfloat16()
    wanted = torch.empty(17, rows, dtype=torch.bfloat16)
    assert _native._use_kernels("portable")
    LinearKernel(form, rows, columns, data.data_ptr()).run(
        x.data_ptr(), 17, wanted.data_ptr(), False
    )
    assert _native._use_kernels("")
    for count in (1, 2, 5, 16):
        assert torch.equal(ours(x[:count].to(DEVICE)).cpu(), wanted[:count]), count
    many = ours(x.to(DEVICE)).cpu()
    if form != "bf16":  # torch computes more rows of bf16
        assert torch.equal(many, wanted)
    assert relative(many, x.double() @ values.double().T) < 0.02


def test_shapes_types_and_biases_are_those_of_the_cpus_face():
    data, there, _ = matrix("q8", 20, 40)
    bias = torch.randn(20, generator=torch.Generator().manual_seed(5))
    x = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(4))
    wanted = on_cpu.tiled_linear(data, "Q8", 20, 40, bias)(x)
    found = on_device.tiled_linear(there, "Q8", 20, 40, bias.to(DEVICE))(x.to(DEVICE))
    assert torch.equal(found.cpu(), wanted)
    assert found.dtype == torch.float32
    weight = torch.randn(20, 40, generator=torch.Generator().manual_seed(6))
    plain = on_device.plain_linear(weight.to(DEVICE), None)(x.to(DEVICE))
    torch.testing.assert_close(plain.cpu(), x @ weight.T)


@pytest.mark.parametrize("form", ["q4", "q8", *gguf_blocks.FORMS])
def test_an_embedding_reads_the_rows_that_the_cpu_reads(form):
    data, there, _ = matrix(form, 40, 550)
    ids = torch.tensor([39, 0, 17, 17])
    wanted = on_cpu.tiled_embedding(data, form.upper(), 40, 550)(ids)
    found = on_device.tiled_embedding(there, form.upper(), 40, 550)(ids.to(DEVICE))
    assert torch.equal(found.cpu(), wanted)
