"""Quantising to q4k, q5k and q6k: the same bytes on every path, and small errors."""

from collections.abc import Iterator

import pytest
import torch

from moeinf.native import _native
from moeinf.offload.format.quantise import dequantise, quantise

FORMS = ("Q4K", "Q5K", "Q6K")


def error_of(form: str, weights: torch.Tensor) -> float:
    found = dequantise(quantise(weights, form), form, *weights.shape)
    return float((found - weights).norm() / weights.norm())


@pytest.fixture
def fastest_path() -> Iterator[None]:
    yield
    assert _native._use_kernels("")


@pytest.mark.parametrize("form", FORMS)
def test_every_path_writes_the_same_bytes(form: str, fastest_path: None) -> None:
    x = torch.randn(37, 600, generator=torch.Generator().manual_seed(5))
    x[3], x[4], x[5] = 0, 0.25, -0.25
    x[6] *= 1e-6
    x[7] *= 1e4
    x[:, 9] *= 30
    x[8, 300] = torch.nan
    found = [
        [quantise(rows, form) for rows in (x, x.bfloat16())]
        for path in ("portable", "avx2", "avx512")
        if _native._use_kernels(path)
    ]
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize(("form", "most"), [("Q4K", 0.072), ("Q5K", 0.036), ("Q6K", 0.0185)])
def test_errors_of_normal_weights_are_small(form: str, most: float) -> None:
    weights = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1))
    assert error_of(form, weights) < most


def test_q4k_is_closer_than_q4_where_channels_stand_out() -> None:
    draw = torch.Generator().manual_seed(2)
    weights = torch.randn(64, 1024, generator=draw) + 2 * torch.randn(64, 1, generator=draw)
    weights[:, ::97] *= 8
    assert error_of("Q4K", weights) < 0.9 * error_of("Q4", weights)


@pytest.mark.parametrize("form", FORMS)
def test_constant_rows_and_zeros_stay(form: str) -> None:
    weights = torch.zeros(5, 256)
    weights[1], weights[2] = 0.5, -0.5
    found = dequantise(quantise(weights, form), form, 5, 256)
    assert torch.allclose(found, weights, rtol=0.02)
    assert not found[0].any()


@pytest.mark.parametrize("form", FORMS)
def test_nan_and_infinity_stay_in_their_block(form: str) -> None:
    weights = torch.ones(3, 512)
    weights[0, 3], weights[1, 300] = torch.nan, torch.inf
    found = dequantise(quantise(weights, form), form, 3, 512)
    assert found[0, :256].isnan().any()
    assert found[0, 256:].isfinite().all()
    assert found[1, 256:].isnan().any()
    assert found[1, :256].isfinite().all()
    assert found[2].isfinite().all()
