"""The quantisation methods of checkpoints: those that are read, and the names of the others.

A quantised checkpoint names its method in config.json as quantization_config.quant_method. Older
ones of compressed-tensors have compression_config instead. compressed-tensors describes its forms
in config_groups (github.com/vllm-project/compressed-tensors), ModelOpt in quant_algo.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moeinf.models.base import ModelDataError
from moeinf.models.config import MAX_WIDTH, Fields

KEYS = ("quantization_config", "compression_config")
# Experts in another form than the rest, as in NVIDIA's DeepSeek-V4-Flash-NVFP4 and V4-Pro-NVFP4.
MOE_KEY, MOE_NVFP4 = "moe_quant_algo", "NVFP4"
_READ = ("fp8", "mxfp4")  # in blocks, which the loader widens or keeps
_COMPRESSED, _MODELOPT = "compressed-tensors", "modelopt"
_PACKED, _MIXED = "pack-quantized", "mixed-precision"
_FORMS = (_PACKED, "nvfp4-pack-quantized", "float-quantized")
_ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MIXED_PRECISION")
_BITS = (4, 8)  # of packed integers
_NAMES = {
    "auto-round": "AutoRound",
    "autoround": "AutoRound",
    "awq": "AWQ",
    "compressed-tensors": "compressed-tensors",
    "compressed_tensors": "compressed-tensors",
    "gptq": "GPTQ",
    "hqq": "HQQ",
    "modelopt": "ModelOpt",
    "nvfp4": "NVFP4",
}
_DETAILS = ("quant_algo", "format", "bits")  # keys that distinguish the forms of a method


class UnsupportedQuantisation(ModelDataError):
    """The weights are quantised by a method that is not supported."""

    code = "unsupported_quantisation"
    hint = (
        "`moeinf pull ORG/NAME:q4` of a repository whose weights have 16 bits, or are FP8, NVFP4 "
        "or packed by compressed-tensors"
    )

    def __init__(self, method: str, key: str = KEYS[0]) -> None:
        super().__init__(
            f"the weights are quantised by {method}, which is not supported ({key}). Pull the "
            "unquantised repository: the tags q4 and q8 quantise it here"
        )
        self.method = method


@dataclass(frozen=True)
class IntegerScheme:
    """One group of a compressed-tensors config whose weights are packed integers."""

    bits: int
    group: int  # weights of a row that share a scale; 0: all of them
    symmetric: bool

    def groups(self, columns: int) -> int:
        """Return the scales of a row; 0 if groups do not divide it."""
        if self.group == 0:
            return 1
        return 0 if columns % self.group else columns // self.group


def refuse_quantised(fields: Fields) -> None:
    """Raise UnsupportedQuantisation unless the weights are floats, or of a form that is read."""
    for key in KEYS:
        section = fields.section(key)
        if section is None:
            continue
        if key != KEYS[0] or not _is_read(section):
            raise UnsupportedQuantisation(_method(section, key), key)


def quantised_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return quantization_config of config.json or of its text_config; empty if both lack it."""
    inner = config.get("text_config")
    for values in (config, inner):
        section = values.get(KEYS[0]) if isinstance(values, Mapping) else None
        if isinstance(section, Mapping) and section:
            return section
    return {}


def integer_schemes(section: Mapping[str, Any]) -> frozenset[IntegerScheme]:
    """Return the schemes of packed integers in a quantization_config.

    Raises ModelDataError for values that are absent, absurd or not supported.
    """
    fields = Fields(section, f"config.json: {KEYS[0]}")
    if not fields.is_word("quant_method", _COMPRESSED):
        return frozenset()
    return frozenset(_scheme(weights) for form, weights in _groups(fields) if form == _PACKED)


def _is_read(section: Fields) -> bool:
    """Return whether the loader reads the method. Raises ModelDataError for a part of it."""
    if section.is_word("quant_method", _COMPRESSED):
        return _is_compressed(section)
    if section.is_word("quant_method", _MODELOPT):
        return (section.text("quant_algo") or "").upper() in _ALGORITHMS
    section.choice(MOE_KEY, default=MOE_NVFP4, known=(MOE_NVFP4,))
    return any(section.is_word("quant_method", word) for word in _READ)


def _is_compressed(section: Fields) -> bool:
    sparse = section.section("sparsity_config")
    if sparse is not None and not sparse.is_word("format", "dense"):
        raise UnsupportedQuantisation("compressed-tensors (sparse)")
    if not any(section.is_word("format", form) for form in (*_FORMS, _MIXED)):
        return False
    for form, weights in _groups(section):
        if form not in _FORMS:
            raise UnsupportedQuantisation(f"compressed-tensors ({form})")
        if form == _PACKED:
            _scheme(weights)
        for word in ("group", "dynamic"):
            if weights.is_word("actorder", word):
                raise UnsupportedQuantisation(f"compressed-tensors (actorder {word})")
        if any(side & (side - 1) for side in weights.integers("block_structure", high=1 << 20)):
            raise UnsupportedQuantisation("compressed-tensors (odd blocks)")
    return True


def _groups(section: Fields) -> Iterator[tuple[str, Fields]]:
    """Yield the form and the weights of each group. Raises ModelDataError."""
    groups = section.section("config_groups")
    if groups is None:
        raise ModelDataError(f"config.json: {KEYS[0]} lacks config_groups")
    for group in groups.sections():
        weights = group.section("weights")
        if weights is not None:
            yield group.text("format") or section.text("format") or "", weights


def _scheme(weights: Fields) -> IntegerScheme:
    bits = weights.integer("num_bits", low=1, high=32)
    if bits not in _BITS:
        raise UnsupportedQuantisation(f"compressed-tensors ({bits} bits)")
    weights.choice("type", default="int", known=("int",))
    strategy = weights.choice("strategy", default="group", known=("group", "channel"))
    group = weights.optional_integer("group_size", low=-1, high=MAX_WIDTH) or 0
    symmetric = weights.flag("symmetric", default=True)
    return IntegerScheme(bits, 0 if strategy == "channel" else max(group, 0), symmetric)


def _method(section: Fields, key: str) -> str:
    """Return the method's name, and its form where it has several: "ModelOpt (NVFP4)"."""
    said = section.text("quant_method")
    if said is None:
        bitsandbytes = section.has("load_in_4bit") or section.has("load_in_8bit")
        said = "bitsandbytes" if bitsandbytes else "an unnamed method"
        said = "compressed-tensors" if key == KEYS[1] else said
    name = _NAMES.get(said.lower(), said)
    details = [text for text in map(section.text, _DETAILS) if text is not None]
    if not details:
        return name
    detail = details[0]
    return f"{name} ({detail} bits)" if detail.isdigit() else f"{name} ({detail})"
