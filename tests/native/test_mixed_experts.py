"""Experts whose down has another format than gate and up."""

import pytest
import torch

from moeinf.native import ExpertKernel, LinearKernel, _native, matrix_bytes
from tests.native.test_kernels import PATHS, aligned, experts_of, use


@pytest.fixture(autouse=True)
def fastest_path():
    yield
    assert _native._use_kernels("")


@pytest.mark.parametrize(("form", "down"), [("q4", "q8"), ("q8", "q4"), ("q8", "mxfp4")])
@pytest.mark.parametrize("path", PATHS)
def test_an_expert_has_the_bits_of_its_matrices_alone(form, down, path):
    """Without a gate, relu and the biases are exact in torch, so that both sides are comparable."""
    if not use(path):
        pytest.skip(f"this processor lacks {path}")
    hidden, inner, tokens = 70, 45, 11
    (whole,), _ = experts_of(form, 1, hidden, inner, False, 0.5, down)
    kernel = ExpertKernel(form, hidden, inner, "relu", True, down)
    assert kernel.expert_bytes == len(whole)
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(2))
    up_bytes = matrix_bytes(form, inner, hidden)
    biases = whole[up_bytes + matrix_bytes(down, hidden, inner) :].view(torch.bfloat16).float()
    middle, wanted = torch.empty(tokens, inner), torch.empty(tokens, hidden)
    up, last = whole[:up_bytes], whole[up_bytes:].clone(memory_format=torch.contiguous_format)
    last = aligned(len(last)).copy_(last)
    LinearKernel(form, inner, hidden, up.data_ptr()).run(
        x.data_ptr(), tokens, middle.data_ptr(), True
    )
    middle = (middle + biases[:inner]).relu()
    LinearKernel(down, hidden, inner, last.data_ptr()).run(
        middle.data_ptr(), tokens, wanted.data_ptr(), True
    )
    out = torch.empty_like(wanted)
    kernel.run(
        [whole.data_ptr()], [list(range(tokens))], x.data_ptr(), tokens, 1, out.data_ptr(), True
    )
    assert torch.equal(out, wanted + biases[inner:])


def test_formats_that_one_expert_cannot_have():
    for form, down in (("bf16", "q8"), ("q4", "bf16"), ("q4", "q5")):
        with pytest.raises(ValueError, match=r"bf16 does not mix|no kernel"):
            ExpertKernel(form, 32, 32, down=down)
    with pytest.raises(ValueError, match="multiple of 64"):
        ExpertKernel("mxfp4", 64, 16, "relu", down="q8")  # one tile of 544 bytes before it
