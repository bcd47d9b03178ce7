"""Choose the files of one quantisation in a repository of GGUF files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from moeinf.runtime.checkpoints.checkpoint import BIN, SAFETENSORS, BadCheckpoint
from moeinf.runtime.gguf.reader import SUFFIX, parts_of
from moeinf.runtime.hub.download import RemoteFile
from moeinf.runtime.hub.listing import Repository, in_top_folder

_QUANT = re.compile(
    r"(?:^|[-._/])((?:UD-)?I?Q\d(?:_[A-Z0-9]++)*+|BF16|F16|FP16|F32|MXFP4(?:_MOE)?|NVFP4|TQ\d_0)"
    r"(?:-\d{5}-of-\d{5})?\.gguf",
    re.IGNORECASE,
)
# Files for vision, for measurements, for further tokens.
_NOT_A_MODEL = re.compile(r"(^|[-._])(mmproj|imatrix|mtp)[-._]", re.IGNORECASE)
# Without a wish: what most people take, then more bits before fewer.
_ORDER = [
    "Q4_K_M", "UD-Q4_K_XL", "Q4_K_S", "Q4_0", "MXFP4_MOE", "MXFP4", "NVFP4", "IQ4_XS", "IQ4_NL",
    "Q5_K_M", "Q5_K_S", "Q6_K", "Q8_0", "BF16", "F16", "Q3_K_M",
]  # fmt: skip
_ORDER_OF_TAG = {
    "q4": _ORDER,
    "q4k": ["Q4_K_M", "Q4_K_S", "UD-Q4_K_XL"],
    "q5k": ["Q5_K_M", "Q5_K_S", "UD-Q5_K_XL"],
    "q6k": ["Q6_K", "UD-Q6_K_XL"],
    "q8": ["Q8_0", "Q6_K", "Q5_K_M"],
    "mxfp4": ["MXFP4_MOE", "MXFP4"],
    "nvfp4": ["NVFP4"],
    "bf16": ["BF16", "F16", "Q8_0"],
    "f32": ["F32", "BF16", "F16"],
}


def has_gguf(repository: Repository) -> bool:
    """Return True if a repository has GGUF files of a model."""
    return bool(_by_quant(repository.files))


def source_files(
    everything: Repository, quant: str | None, tag: str | None
) -> tuple[Repository, str | None]:
    """Return a repository with the files that a source may use, and their GGUF quantisation.

    Safetensors and `.bin` files are preferred unless `quant` names a quantisation. For them the
    second result stays None. quant, tag: see quant_files. Raises BadCheckpoint.
    """
    found = in_top_folder(everything)
    folder = SAFETENSORS.given(found.files.__contains__) or BIN.given(found.files.__contains__)
    if quant is None and (folder or not has_gguf(everything)):
        return found, None
    quant, files = quant_files(everything, quant, tag)
    return replace(found, files={file.name: file for file in files}), quant


def quant_files(
    repository: Repository, quant: str | None, tag: str | None
) -> tuple[str, list[RemoteFile]]:
    """Return the name of a quantisation and its files, in order.

    quant: its name, in any case; None for the best one for `tag`, or for the usual one. Raises
    BadCheckpoint if the repository lacks it, and names what is there.
    """
    found = _by_quant(repository.files)
    order = [quant] if quant is not None else [*_ORDER_OF_TAG.get(tag or "", []), *_ORDER]
    there = {name.upper(): name for name in found}
    chosen = next((there[name.upper()] for name in order if name.upper() in there), None)
    if chosen is None and quant is None and found:
        chosen = min(found)
    if chosen is None:
        has = ", ".join(sorted(found)) or "no GGUF files"
        raise BadCheckpoint(f"{repository.name} lacks {quant or 'a GGUF file'}; it has {has}")
    return chosen, _parts(repository, found[chosen])


def _by_quant(files: Mapping[str, RemoteFile]) -> dict[str, list[str]]:
    """Return the paths of GGUF files by quantisation, sorted."""
    found: dict[str, list[str]] = {}
    for path in sorted(files):
        name = files[path].name
        match = _QUANT.search(name)
        if name.lower().endswith(SUFFIX) and not _NOT_A_MODEL.search(name):
            found.setdefault(match[1].upper() if match else name, []).append(path)
    return found


def _parts(repository: Repository, paths: list[str]) -> list[RemoteFile]:
    """Return all parts of the first file. Raises BadCheckpoint if one is missing."""
    folder = paths[0].rpartition("/")[0]
    wanted = [f"{folder}/{name}".lstrip("/") for name in parts_of(repository.files[paths[0]].name)]
    for path in wanted:
        if path not in repository.files:
            raise BadCheckpoint(f"{repository.name} lacks {path}, a part of a split GGUF file")
    return [repository.files[path] for path in wanted]
