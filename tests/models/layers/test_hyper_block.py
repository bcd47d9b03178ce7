"""Test hyper-connections against transformers' modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
)

from moeinf.models.layers.hyper_block import HyperConnection, HyperHead, HyperShape, expanded

_D = 24


def drawn(module: torch.nn.Module, seed: int) -> list[Tensor]:
    """Fill a module's parameters with numbers that decide; return them in order."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.7, generator=generator)
    return [parameter.detach() for parameter in module.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("streams", "iterations"), [(4, 20), (3, 1), (1, 2)])
def test_as_transformers(streams: int, iterations: int, dtype: torch.dtype) -> None:
    """Eps are large, so that a wrong one or a wrong place shows."""
    config = DeepseekV4Config(
        hidden_size=_D, hc_mult=streams, hc_sinkhorn_iters=iterations, hc_eps=0.03,
        rms_norm_eps=0.1,
    )  # fmt: skip
    shape = HyperShape(streams, iterations, 0.03, 0.1)
    theirs, their_head = DeepseekV4HyperConnection(config), DeepseekV4HyperHead(config)
    ours = HyperConnection(shape, *drawn(theirs, 0))
    head = HyperHead(shape, *drawn(their_head, 1))
    x = torch.randn(5, streams, _D, generator=torch.Generator().manual_seed(2)).to(dtype)
    with torch.inference_mode():
        one, mix = ours(x)
        post, comb, collapsed = theirs(x[None])
        change = one.flip(-1)
        expected = post.to(dtype).unsqueeze(-1) * change[None].unsqueeze(-2)
        expected = expected + comb.to(dtype).transpose(-1, -2) @ x[None]
        torch.testing.assert_close(one, collapsed[0])
        torch.testing.assert_close(expanded(x, mix, change), expected[0])
        torch.testing.assert_close(head(x), their_head(x[None])[0])
