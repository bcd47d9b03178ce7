"""Compare rope frequencies with transformers, and rotations with complex numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moeinf.models.base import ModelDataError
from moeinf.models.config import Fields
from moeinf.models.layers.rope import (
    Rope,
    inverse_frequencies,
    parse_rope,
    rotate_half,
    rotate_pairs,
)

_YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096}
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("theta", [500.0, 1e4, 1e6])
@pytest.mark.parametrize(
    "settings",
    [
        {"rope_type": "linear", "factor": 2.5},
        {**_YARN, "factor": 40.0},
        {**_YARN, "factor": 4, "truncate": False},
        {**_YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
        {**_YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5},
        {**_YARN, "factor": 40.0, "mscale": 1.0},
        {**_YARN, "factor": 40.0, "mscale_all_dim": 1.0},
        {**_YARN, "factor": 8.0, "attention_factor": 1.25, "beta_fast": 16, "beta_slow": 2},
        {**_YARN, "factor": 1.0},
        {**_YARN, "factor": None},
        {**_YARN, "factor": 4.0, "beta_fast": 1, "beta_slow": 1},
        {**_LLAMA3, "factor": 8.0, "original_max_position_embeddings": 512},
    ],
)
def test_scaled_frequencies(settings: dict[str, Any], theta: float) -> None:
    dim, context = 20, 65536
    config = transformers.MixtralConfig(
        head_dim=dim, max_position_embeddings=context, rope_parameters=None
    )
    config.rope_parameters = {**settings, "rope_theta": theta}
    expected, factor = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config)
    rope = parse_rope(Fields({"rope_parameters": {**settings, "rope_theta": theta}}), context, 1e4)
    torch.testing.assert_close(inverse_frequencies(rope, dim), expected, rtol=1e-6, atol=0)
    cos, _ = Rope(rope, dim, torch.device("cpu"))(torch.tensor([0]))
    torch.testing.assert_close(cos, torch.full((1, dim // 2), factor))


def test_default_angles() -> None:
    rope = Rope(parse_rope(Fields({"rope_theta": 100}), 64, 1e4), 4, torch.device("cpu"))
    cos, sin = rope(torch.tensor([0, 3]))
    torch.testing.assert_close(cos, torch.tensor([[0.0, 0.0], [3.0, 0.3]]).cos())
    torch.testing.assert_close(sin, torch.tensor([[0.0, 0.0], [3.0, 0.3]]).sin())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotations(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, angles = torch.randn(5, 3, 8).to(dtype), torch.randn(5, 4)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]  # [5, 1, 4]
    halves = torch.complex(x[..., :4].float(), x[..., 4:].float()) * turn
    pairs = torch.complex(x[..., 0::2].float(), x[..., 1::2].float()) * turn
    by_halves = rotate_half(x, angles.cos(), angles.sin())
    by_pairs = rotate_pairs(x, angles.cos(), angles.sin())
    assert by_halves.dtype == by_pairs.dtype == dtype
    torch.testing.assert_close(by_halves, torch.cat((halves.real, halves.imag), -1).to(dtype))
    torch.testing.assert_close(by_pairs, torch.view_as_real(pairs).flatten(-2).to(dtype))


_LONG = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 2.0],
    "long_factor": [4.0, 8.0],
}


def test_longrope_by_hand() -> None:
    """Angle = position / (factor · theta^(2i/dim)), and sqrt(1 + ln 4 / ln 16) on cos and sin."""
    rope = Rope(parse_rope(Fields({"rope_parameters": _LONG}), 64, 1e4), 4, torch.device("cpu"))
    cos, sin = rope(torch.tensor([3, 3, 40]), [16, 17, 64])
    angles = torch.tensor([[3 / 1, 3 / 20], [3 / 4, 3 / 80], [40 / 4, 40 / 80]])
    factor = (1 + 0.5) ** 0.5
    torch.testing.assert_close(cos, angles.cos() * factor)
    torch.testing.assert_close(sin, angles.sin() * factor)


def test_longrope_with_given_factors() -> None:
    values = {**_LONG, "short_mscale": 1.25, "long_mscale": 1.5}
    rope = Rope(parse_rope(Fields({"rope_scaling": values}), 64, 1e4), 4, torch.device("cpu"))
    cos, _ = rope(torch.tensor([0, 0]), [16, 17])
    torch.testing.assert_close(cos, torch.tensor([[1.25, 1.25], [1.5, 1.5]]))
    with pytest.raises(ModelDataError, match="2 longrope factors for 3 pairs"):
        Rope(parse_rope(Fields({"rope_scaling": values}), 64, 1e4), 6, torch.device("cpu"))
