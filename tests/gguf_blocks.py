"""Quantise weights to blocks of GGUF's types that the package gguf only reads, simply."""

import torch
from torch import Tensor
from torch.nn import functional

from moeinf.native import tile_columns
from moeinf.offload.format.retile import nvfp4_blocks, retile

FORMS = ["q4k", "q5k", "q6k", "nvfp4"]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def tiled(weights: Tensor, form: str) -> Tensor:
    """Return tiles (uint8) of values near float32 weights [N, K]."""
    columns = weights.shape[1]
    padded = functional.pad(weights, (0, -columns % tile_columns(form)))
    if form == "nvfp4":
        factors = 0.9 * weights.abs().amax(1).clamp(min=1e-6) / (6 * 448)
        blocks = nvfp4_blocks(*_nvfp4(padded / factors[:, None]))
        return retile(blocks, "NVFP4", columns, factors)
    return retile(packed(padded, form), form.upper(), columns)


def packed(weights: Tensor, form: str) -> Tensor:
    """Return float32 weights [N, K] as rows of blocks of a K type, uint8 [N, bytes of a row]."""
    blocks = _q6k(weights) if form == "q6k" else _with_minima(weights, form == "q5k")
    return blocks.flatten(1)


def nvfp4(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights [..., N, K] as rows of NVFP4, uint8 [..., N, 36 K / 64], and a factor each.

    The factors are float32 [...]: one per matrix.
    """
    factors = weights.abs().amax((-2, -1)) / (6 * 448)
    plain = (weights / factors[..., None, None]).flatten(0, -2)
    codes, scales = _nvfp4(plain)
    numbers = torch.stack((codes & 15, codes >> 4), -1).view(len(plain), -1, 4, 16)
    nibbles = numbers[..., :8] | numbers[..., 8:] << 4  # j beside j + 8
    sizes = scales.view(torch.uint8).view(len(plain), -1, 4)
    blocks = torch.cat((sizes, nibbles.flatten(2)), -1)
    return blocks.view(*weights.shape[:-1], -1), factors


def _halves(values: Tensor) -> Tensor:
    """Return the bytes of values [..., 1] as float16."""
    return values.half().view(torch.uint8)


def _codes(x: Tensor, scale: Tensor, most: int) -> Tensor:
    return (x / torch.where(scale == 0, 1, scale)).round().clamp(0, most).to(torch.uint8)


def _with_minima(weights: Tensor, five: bool) -> Tensor:
    """Return blocks [N, B, 144 or 176] of Q4_K or Q5_K."""
    most = 31 if five else 15
    groups = weights.view(len(weights), -1, 8, 32)
    low = groups.amin(-1).clamp(max=0)
    width = (groups.amax(-1).clamp(min=0) - low) / most
    d = (width.amax(-1, keepdim=True) / 63).half().float()  # [N, B, 1]
    least = (-low.amin(-1, keepdim=True) / 63).half().float()
    scales, minima = _codes(width, d, 63), _codes(-low, least, 63)  # [N, B, 8]
    codes = _codes(groups + (least * minima)[..., None], (d * scales)[..., None], most)
    low_4, high_4 = scales[..., :4], scales[..., 4:]
    packed = (
        low_4 | high_4 >> 4 << 6,
        minima[..., :4] | minima[..., 4:] >> 4 << 6,
        high_4 & 15 | (minima[..., 4:] & 15) << 4,
    )
    high = sum((codes[..., g, :] >> 4) << g for g in range(8))
    nibbles = (codes[..., ::2, :] & 15 | (codes[..., 1::2, :] & 15) << 4).flatten(2)
    parts = (_halves(d), _halves(least), *packed, *([high] if five else []), nibbles)
    return torch.cat(parts, -1)


def _q6k(weights: Tensor) -> Tensor:
    """Return blocks [N, B, 210] of Q6_K."""
    halves = weights.view(len(weights), -1, 16, 16)
    at = halves.abs().argmax(-1, keepdim=True)
    width = halves.gather(-1, at)[..., 0] / -32
    d = (width.abs().amax(-1, keepdim=True) / 127).half().float()
    scales = (width / torch.where(d == 0, 1, d)).round().clamp(-128, 127)
    scale = (d * scales)[..., None]
    codes = (halves / torch.where(scale == 0, 1, scale)).round().clamp(-32, 31) + 32
    groups = codes.to(torch.uint8).view(len(weights), -1, 2, 4, 32)
    low, high = groups & 15, groups >> 4
    ql = low[..., :2, :] | low[..., 2:, :] << 4
    qh = sum(high[..., i, :] << 2 * i for i in range(4))
    scale_bytes = scales.to(torch.int8).view(torch.uint8)
    return torch.cat((ql.flatten(2), qh.flatten(2), scale_bytes, _halves(d)), -1)


def _nvfp4(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [N, K/2] and scales [N, K/16] of NVFP4, without a factor."""
    halves = weights.view(len(weights), -1, 16)
    scales = (halves.abs().amax(-1) / 6).clamp(max=448).to(torch.float8_e4m3fn)
    sizes = scales.float()[..., None]
    near = (halves.abs() / torch.where(sizes == 0, 1, sizes))[..., None].sub(E2M1).abs().argmin(-1)
    codes = (near + 8 * (halves < 0)).to(torch.uint8).flatten(1)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales
