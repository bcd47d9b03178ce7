"""Give random weights clear margins, as training does: a rounding changes figures, not choices.

With plain random weights a rounded activation often chooses another expert, and logits 17 wide turn
1 % of a logit into another token. The comparison then measures chance, in any engine.

Every token carries a code in the first columns of the residual stream, which routers read and no
block overwrites. So experts are chosen with wide margins. The rest of a router reads the context,
so the experts' weights depend on it. Attention is neither uniform nor sharp, and logits have a
standard deviation of about 1. Where the head is the embedding, the final norm has random signs, so
that a token does not predict itself.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

_WRITERS = re.compile(r"(o_proj|out_proj|down_proj|\.w2)(\.weight|\.bias|_bias)?$")
_ROUTERS = re.compile(r"\.(gate|router|gate\.wg|router\.proj)\.weight$")
_CALM = 1 / 1.6  # undoes the gain of tests/tiny.py on attention
_WRITTEN = 0.5  # a block's output, beside an embedding of 1
_CODE = 3.0  # from the least to the greatest level
_READ = 2.0  # a router's weight on the code
_CONTEXT = 0.04  # a router's weight on the rest


def steady(model: Any, family: str) -> None:
    """Change the weights of a model of tests/tiny.py in place."""
    draw = torch.Generator().manual_seed(5)
    named = {**dict(model.named_parameters()), **_buffers(model)}
    experts = max(len(value) for name, value in named.items() if _ROUTERS.search(name))
    groups = getattr(model.config, "n_group", None) or 1
    levels = torch.linspace(-_CODE / 2, _CODE / 2, experts)
    with torch.no_grad():
        for name, value in named.items():
            if ".self_attn." in name and value.dim() == 2:
                value *= _CALM
            if _WRITERS.search(name):
                value *= _WRITTEN
                _outputs(name, value, family)[..., :experts] = 0
            elif _ROUTERS.search(name):
                value *= _CONTEXT
                value[:, :experts] = _READ * torch.eye(experts)[_order(experts, groups, draw)]
            elif name.endswith("embed_tokens.weight"):
                codes = [levels[_order(experts, groups, draw)] for _ in value]
                value[:, :experts] = torch.stack(codes)
            elif name == "model.norm.weight" and "lm_head.weight" not in named:
                signs = torch.randint(2, value.shape, generator=draw) * 2 - 1
                centre = 1 if family == "qwen3_5_moe" else 0
                value.add_(centre).mul_(signs / len(value) ** 0.5).sub_(centre)  # see above
            elif name.endswith("router.bias"):
                value *= 0.1
            elif name.endswith("e_score_correction_bias"):
                value *= 0.03
                value[0] += 2  # always chosen, whatever its score


def _buffers(model: Any) -> dict[str, Tensor]:
    return dict(model.named_buffers()) if hasattr(model, "named_buffers") else {}


def _outputs(name: str, value: Tensor, family: str) -> Tensor:
    """Return a view of a matrix or a bias with the columns of the residual stream last."""
    written_last = name.endswith("bias") or (family == "gpt_oss" and value.dim() == 3)
    return value if written_last else value.mT


def _order(count: int, groups: int, draw: torch.Generator) -> Tensor:
    """Return a random order of experts in which the members of a group stay neighbours."""
    size = count // groups
    first = size * torch.randperm(groups, generator=draw)
    return torch.cat([at + torch.randperm(size, generator=draw) for at in first])
