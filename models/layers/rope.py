"""Rotary position embedding: six kinds of frequencies, two ways to pair.

Positions become angles, and vectors are rotated by them. Formulas as in transformers 5.23,
modeling_rope_utils.py.

longrope (arXiv 2402.13753) has two sets of frequencies: one for texts up to the length of the
original training, one for longer texts. Keys in a cache cannot change sets when a text grows beyond
that length, and a text may come in chunks. So the capacity of a state decides, once. Every token
of a state with a larger capacity than the original length rotates by the long set. llama.cpp
decides by its context size in the same way. The paper's formula depends on the text's length, so a
short text in a long context differs from it. Therefore the original length is the model's usual
context.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeinf.models.config import MAX_CONTEXT, Fields, require

_KINDS = ("default", "linear", "yarn", "llama3", "longrope", "proportional")
_STILL = "still"
_MAX_PAIRS = 1 << 16


@dataclass(frozen=True)
class RopeConfig:
    """The keys of `rope_parameters` (or `rope_theta` and `rope_scaling`)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0  # yarn, llama3, longrope
    attention_factor: float | None = None  # yarn, longrope
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    short: tuple[float, ...] = ()  # longrope: divisors of the frequencies, up to original_context
    long: tuple[float, ...] = ()  # the same beyond it
    short_mscale: float | None = None  # longrope: attention factors, where a config has them
    long_mscale: float | None = None
    partial: float = 1.0  # share of a head's dimensions that rotate
    alpha: float = 1.0  # Hunyuan: stretches theta, whatever the length of the text

    def __post_init__(self) -> None:
        require(self.kind in (*_KINDS, _STILL), f"rope type {self.kind!r} is not supported")
        require(
            self.beta_fast >= self.beta_slow,
            f"beta_fast {self.beta_fast:g} is below beta_slow {self.beta_slow:g}",
        )
        require(
            self.high_freq_factor > self.low_freq_factor,
            f"high_freq_factor {self.high_freq_factor:g} is not above "
            f"low_freq_factor {self.low_freq_factor:g}",
        )

        require(
            self.kind != "longrope" or self.original_context > 1,
            f"original_max_position_embeddings must be above 1, got {self.original_context}",
        )

    def turning(self, head_dim: int) -> int:
        """Return the rotated dimensions of a head; raise ModelDataError unless they form pairs."""
        if self.kind == "proportional":  # the other pairs turn by 0
            return head_dim
        count = int(head_dim * self.partial)
        require(count > 0 and count % 2 == 0, f"{count} of {head_dim} dimensions cannot be rotated")
        return count

    @property
    def softmax_factor(self) -> float:
        """The factor on DeepSeek's softmax scale: the mscale of mscale_all_dim, squared."""
        if self.kind == "default" or not self.mscale_all_dim:
            return 1.0
        return _mscale(self.factor, self.mscale_all_dim) ** 2


STILL = RopeConfig(1e4, _STILL)  # nothing rotates: all angles are 0, with the same bits (NoPE)


def without_rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without the keys of rope, for a family that reads them itself."""
    keys = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
    return {key: value for key, value in values.items() if key not in keys}


def parse_rope(
    fields: Fields, max_context: int, default_theta: float, default_partial: float | None = None
) -> RopeConfig:
    """Read both spellings; `rope_scaling` wins over `rope_parameters`, as in transformers.

    default_partial: None for a family whose heads always rotate as a whole. Raises ModelDataError
    for an unknown type, an unsupported partial rotation, or an absurd value.
    """
    rope = fields.section("rope_scaling") or fields.section("rope_parameters") or Fields({})
    kind = rope.choice("rope_type", "type", default="default", known=_KINDS)
    partial = 1.0
    if default_partial is None:
        for place in (fields, rope):
            place.refuse("partial_rotary_factor", 1.0, 1)
    else:
        partial = fields.number("partial_rotary_factor", low=0.0, high=1.0, default=default_partial)
        partial = rope.number("partial_rotary_factor", low=0.0, high=1.0, default=partial)
    theta = fields.number("rope_theta", low=2.0, high=1e12, default=default_theta)
    theta = rope.number("rope_theta", low=2.0, high=1e12, default=theta)
    if kind == "default":
        return RopeConfig(theta, partial=partial)
    if kind == "proportional":
        factor = rope.number("factor", low=1.0, high=1e6, default=1.0)
        return RopeConfig(theta, kind, factor, partial=partial)
    original = rope.integer(
        "original_max_position_embeddings", high=MAX_CONTEXT, default=max_context
    )
    if kind != "linear":  # transformers reads it only in the section
        fields.refuse("original_max_position_embeddings", original)
    # longrope may omit the factor, yarn may set null: then it is the ratio of both contexts.
    ratio = max(max_context / original, 1.0) if kind in ("yarn", "longrope") else None
    if kind == "yarn":
        rope.expect("factor")
    low_high = {
        name: rope.number(name, low=1e-3, high=1e6)
        for name in (("low_freq_factor", "high_freq_factor") if kind == "llama3" else ())
    }
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    if kind == "longrope":
        short, long = (
            rope.numbers(name, low=1e-3, high=1e6, most=_MAX_PAIRS)
            for name in ("short_factor", "long_factor")
        )
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=rope.number("factor", low=1.0, high=1e6, default=ratio),
        original_context=original,
        attention_factor=rope.optional_number("attention_factor", low=1e-6, high=1e6),
        beta_fast=rope.number("beta_fast", low=1e-3, high=1e6, default=32.0),
        beta_slow=rope.number("beta_slow", low=1e-3, high=1e6, default=1.0),
        mscale=rope.optional_number("mscale", low=0.0, high=1e3),
        mscale_all_dim=rope.optional_number("mscale_all_dim", low=0.0, high=1e3),
        truncate=rope.flag("truncate", default=True),
        short=short,
        long=long,
        short_mscale=rope.optional_number("short_mscale", low=1e-3, high=1e3),
        long_mscale=rope.optional_number("long_mscale", low=1e-3, high=1e3),
        partial=partial,
        **low_high,
    )


class Rope:
    """The angles of one model: positions -> cos and sin, computed once per pass."""

    def __init__(self, config: RopeConfig, dim: int, device: torch.device) -> None:
        """Prepare the frequencies of `dim` rotated dimensions of a head; dim must be even.

        Raises ModelDataError when longrope does not have one factor for each pair.
        """
        assert dim % 2 == 0, dim
        self._frequencies = inverse_frequencies(config, dim).to(device)
        self._factor = attention_factor(config)
        self._original = config.original_context
        self._long: tuple[Tensor, float] | None = None
        if config.kind == "longrope":
            long = inverse_frequencies(config, dim, beyond_original=True).to(device)
            self._long = long, attention_factor(config, beyond_original=True)

    def __call__(self, positions: Tensor, contexts: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Map positions [T] to (cos, sin), each [T, dim/2] float32, times the attention factor.

        contexts [T]: the capacity of each row's state; only longrope uses it.
        """
        frequencies: Tensor = self._frequencies
        factor: Tensor | float = self._factor
        beyond_original = {context > self._original for context in contexts}
        if self._long is not None and beyond_original == {True}:
            frequencies, factor = self._long  # no upload: the pass may be under capture
        elif self._long is not None and len(beyond_original) > 1:
            beyond = torch.tensor(contexts, device=positions.device)[:, None] > self._original
            frequencies = torch.where(beyond, self._long[0], frequencies)  # [T, dim/2]
            factor = torch.where(beyond, self._long[1], self._factor)  # [T, 1]
        angles = positions[:, None].float() * frequencies  # [T, dim/2]
        return angles.cos() * factor, angles.sin() * factor


def inverse_frequencies(config: RopeConfig, dim: int, beyond_original: bool = False) -> Tensor:
    """Return [dim/2] float32: the angle per position of each pair."""
    theta = config.theta
    if config.alpha != 1.0:
        theta *= config.alpha ** (dim / (dim - 2))
    periods = theta ** (torch.arange(0, dim, 2).float() / dim)  # [dim/2]
    if config.kind == _STILL:
        return torch.zeros_like(periods)
    if config.kind == "longrope":
        factors = config.long if beyond_original else config.short
        require(len(factors) == dim // 2, f"{len(factors)} longrope factors for {dim // 2} pairs")
        return 1.0 / (torch.tensor(factors) * periods)
    if config.kind == "yarn":
        return _yarn(config, dim, periods)
    if config.kind == "llama3":
        return _llama3(config, 1.0 / periods)
    if config.kind == "proportional":  # the first pairs of the whole head
        turning = torch.arange(dim // 2) < int(config.partial * dim // 2)
        return torch.where(turning, 1.0 / periods / config.factor, 0.0)
    return 1.0 / periods / config.factor


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, dim], pairing i with i + dim/2, in float32; cos and sin [T, dim/2].

    With fewer angles only the first 2·angles dimensions rotate (partial rotary).
    """
    turning = 2 * cos.shape[-1]
    if turning < x.shape[-1]:
        turned = rotate_half(x[..., :turning], cos, sin)
        return torch.cat((turned, x[..., turning:]), -1)
    a, b = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, dim], pairing 2i with 2i + 1, in float32; cos and sin [T, dim/2]."""
    if not x.shape[-1]:
        return x
    a, b = torch.unflatten(x.float(), -1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


def _mscale(factor: float, mscale: float = 1.0) -> float:
    """Return yarn's temperature (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def attention_factor(config: RopeConfig, beyond_original: bool = False) -> float:
    """Return the factor on cos and sin."""
    if config.kind == "longrope":
        given = config.long_mscale if beyond_original else config.short_mscale
        return _longrope_factor(config) if given is None else given
    if config.kind != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return _mscale(config.factor, config.mscale) / _mscale(config.factor, config.mscale_all_dim)
    return _mscale(config.factor)


def _longrope_factor(config: RopeConfig) -> float:
    """Return LongRoPE's temperature (arXiv 2402.13753, as in Phi-3's configuration)."""
    if config.attention_factor is not None:
        return config.attention_factor
    if config.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(config.factor) / math.log(config.original_context))


def _yarn(config: RopeConfig, dim: int, periods: Tensor) -> Tensor:
    """Keep the frequency of fast pairs and stretch slow ones, with a ramp between."""

    def pair_with(rotations: float) -> float:
        """Return the (fractional) pair with this number of rotations over the original context."""
        turns = config.original_context / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = pair_with(config.beta_fast), pair_with(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(dim // 2).float() - low) / (high - low)).clamp(0, 1)
    return (1.0 / (config.factor * periods)) * stretched + (1.0 / periods) * (1 - stretched)


def _llama3(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Stretch long waves by the factor and keep short ones, with a blend between."""
    low, high = config.low_freq_factor, config.high_freq_factor
    turns = config.original_context * frequencies / (2 * math.pi)  # over the original context
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies / config.factor * (1 - blend) + frequencies * blend
