"""The quantisation methods of checkpoints: those that are read, and the names of the others.

A quantised checkpoint names its method in config.json as quantization_config.quant_method. Older
ones of compressed-tensors have compression_config instead.
"""

from __future__ import annotations

from moeinf.models.base import ModelDataError
from moeinf.models.config import Fields

READ = ("fp8", "mxfp4")  # in blocks, which the loader widens or keeps
KEYS = ("quantization_config", "compression_config")
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
    hint = "`moeinf pull ORG/NAME:q4` of a repository whose weights have 16 bits"

    def __init__(self, method: str, key: str = KEYS[0]) -> None:
        super().__init__(
            f"the weights are quantised by {method}, which is not supported ({key}). Pull the "
            "repository that they were made of: the tags q4 and q8 quantise it here"
        )
        self.method = method


def refuse_quantised(fields: Fields) -> None:
    """Raise UnsupportedQuantisation unless the weights are floats, or blocks that are read."""
    for key in KEYS:
        section = fields.section(key)
        if section is None:
            continue
        if key == KEYS[0] and any(section.is_word("quant_method", word) for word in READ):
            continue
        raise UnsupportedQuantisation(_method(section, key), key)


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
    if detail.startswith("nvfp4"):  # nvfp4-pack-quantized
        detail = "NVFP4"
    return f"{name} ({detail} bits)" if detail.isdigit() else f"{name} ({detail})"
