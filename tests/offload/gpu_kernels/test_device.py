"""Test our calls of torch's CUDA, with a fake CUDA."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from moeinf.offload.gpu_kernels.device import CudaDevice


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Give the list of memory fractions set for torch, on a device of 1000 bytes."""
    told: list[float] = []
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=7))
    about = SimpleNamespace(total_memory=1000)
    monkeypatch.setattr(cuda, "get_device_properties", lambda _: about)
    monkeypatch.setattr(
        cuda, "set_per_process_memory_fraction", lambda share, _: told.append(share)
    )
    monkeypatch.setattr(cuda, "Stream", lambda _: None)
    return told


def test_engines_share_what_torch_may_have(shares: list[float]) -> None:
    first, second = CudaDevice(), CudaDevice()
    assert first.stream == 7
    first.limit(300)
    assert first.graphs()._alone()
    second.limit(400)
    assert not first.graphs()._alone()
    first.limit(200)
    second.limit(0)
    assert second.graphs()._alone()
    first.limit(0)
    assert shares == pytest.approx([0.3, 0.7, 0.6, 0.2, 1.0])


def test_products_keep_their_bits(shares: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Products keep full precision for every setting of the environment."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32, matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_tf32 = matmul.allow_bf16_reduced_precision_reduction = True
    torch.backends.cuda.enable_cudnn_sdp(True)
    CudaDevice()
    found = matmul.allow_tf32, matmul.allow_bf16_reduced_precision_reduction
    assert found == (False, False)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    matmul.allow_tf32, matmul.allow_bf16_reduced_precision_reduction = before
