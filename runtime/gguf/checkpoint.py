"""Build a checkpoint from a GGUF file: our family's config, dense tensors by name, experts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from moeinf.models.config import MAX_EXPERTS
from moeinf.runtime.checkpoints.checkpoint import (
    CONFIG,
    BadCheckpoint,
    Checkpoint,
    Recipe,
    SourceTensor,
)
from moeinf.runtime.checkpoints.quantised.ggml import dtype_of
from moeinf.runtime.checkpoints.quantised.nvfp4 import NVFP4
from moeinf.runtime.checkpoints.torch_bin import open_folder
from moeinf.runtime.gguf.architectures import ARCHITECTURES, Architecture
from moeinf.runtime.gguf.families.delta_net import minus_one
from moeinf.runtime.gguf.header import FACTORS, GgufTensor
from moeinf.runtime.gguf.keys import Keys
from moeinf.runtime.gguf.made import Made
from moeinf.runtime.gguf.reader import SUFFIX, GgufFile, read_gguf
from moeinf.runtime.gguf.vocabulary import tokenizer_files

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "token_embd_norm.weight": "model.norm.weight",  # so named in lfm2moe
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
}
_BLOB = re.compile(r"sha256-[0-9a-f]{64}")
_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,8})\.(.+)")
_STACKED = re.compile(r"ffn_(gate|up|down|gate_up)_exps\.(weight|bias)")
_ALONE = re.compile(r"ffn_(gate|up|down)\.(0|[1-9]\d{0,8})\.weight")  # files of 2024
_NULL = ("q_lora_rank", "linear_lower_bound")  # null has a meaning
# Factors of NVFP4 matrices, and of activations, which have more bits here.
_SCALE, _INPUT_SCALE = ".scale", ".input_scale"
_MAX_PIECES = 1 << 19  # tensors of experts; Kimi K3 has 250,000
_NEXTN = "nextn."


def open_local(path: Path) -> Checkpoint:
    """Open a GGUF file or a checkpoint folder. Raises BadCheckpoint."""
    return open_gguf(path) if is_gguf(path) else open_folder(path)


def is_gguf(path: Path) -> bool:
    """Return True for the name of a GGUF file, also in Ollama's store."""
    return path.name.lower().endswith(SUFFIX) or _BLOB.fullmatch(path.name) is not None


def open_gguf(path: Path) -> Checkpoint:
    """Read the headers of a GGUF file as a checkpoint. Raises BadCheckpoint."""
    return checkpoint_of(read_gguf(path))


def checkpoint_of(file: GgufFile) -> Checkpoint:
    """Build the checkpoint of a file whose headers are known. Raises BadCheckpoint."""
    name = file.metadata.get("general.architecture")
    known = ARCHITECTURES.get(name) if isinstance(name, str) else None
    keys = Keys(str(name)[:40], file)
    if known is None:
        raise keys.bad(
            f"has the architecture {keys.name!r}, which is not supported; "
            f"supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    if not keys.get("expert_count"):
        raise keys.bad("is a dense model; moeinf runs mixture-of-experts models")
    config = known.config(keys) | {"tie_word_embeddings": "output.weight" not in file.tensors}
    config = {key: value for key, value in config.items() if value is not None or key in _NULL}
    try:
        made = {CONFIG: json.dumps(config).encode(), **tokenizer_files(file.metadata)}
    except BadCheckpoint as error:
        raise keys.bad(f"has a tokenizer that cannot be used: {error}") from None
    tensors, experts = _sorted(keys, known)
    return Checkpoint(file.paths[0].parent, config, tensors, experts, made, file.metadata)


def _sorted(
    keys: Keys, known: Architecture
) -> tuple[dict[str, SourceTensor], dict[tuple[int, int, str], SourceTensor]]:
    """Return dense tensors by their names in our family, and experts by place and role.

    Blocks after the last layer predict further tokens. Their experts have names.
    """
    tensors: dict[str, SourceTensor] = {}
    experts: dict[tuple[int, int, str], SourceTensor] = {}
    sparse, top = _sparse_layers(keys), {**_TOP, **known.top(keys)}
    pieces = 0  # of stacked tensors
    for name, tensor in keys.file.tensors.items():
        if name in FACTORS or _belongs(name, keys):  # in the config, or read with a matrix
            continue
        match = _BLOCK.fullmatch(name)
        if match is None:
            if name.startswith(("model.", "lm_head.")):  # of another format
                raise keys.bad(f"has {name[:80]!r}, which is no name of a GGUF tensor")
            tensors[top.get(name, name)] = _outside(keys, known, source_tensor(keys, tensor))
            continue
        block, inner = int(match[1]), match[2]
        pieces += _count_stack(keys, tensor, inner)
        if pieces > _MAX_PIECES:
            raise keys.bad(f"has more than {_MAX_PIECES} tensors of experts")
        if block >= keys.layers:
            tensors |= _of_module(keys, known, block, inner, tensor)
            continue
        layer = sparse.get(block, len(sparse))
        found = list(_experts_of(keys, tensor, inner))
        experts |= {(layer, expert, role): piece for expert, role, piece in found}
        if not found and inner not in known.used:
            named, made = _dense(keys, known, block, inner, tensor)
            tensors[named] = made
    for block in range(keys.layers):
        tensors |= _made(keys, known.made, block, f"model.layers.{block}.")
    if known.modules is not None:
        for block in range(keys.layers, keys.layers + keys.modules):
            start, stem = known.modules.starts(keys, block)
            tensors |= _made(keys, known.made, block, start)
            tensors |= _made(keys, known.modules.made, block, stem)
    return tensors, experts


def _count_stack(keys: Keys, tensor: GgufTensor, inner: str) -> int:
    """Return the number of tensors that stacked experts become.

    Raises BadCheckpoint for another number of experts than the file has.
    """
    stack = _STACKED.fullmatch(inner)
    if stack is None:
        return 0
    fits = len(tensor.shape) == (3 if stack[2] == "weight" else 2)
    fits = fits and tensor.shape[0] == keys.count("expert_count") <= MAX_EXPERTS
    if not fits or (stack[1] == "gate_up" and tensor.shape[1] % 2):
        raise keys.bad(f"has {tensor.name[:80]!r} of a shape that does not fit expert_count")
    return tensor.shape[0] * (2 if stack[1] == "gate_up" else 1)


def _of_module(
    keys: Keys, known: Architecture, block: int, inner: str, tensor: GgufTensor
) -> dict[str, SourceTensor]:
    """Return what a tensor of a module holds, by name. The model's own tensors are left out."""
    if known.modules is None or block >= keys.layers + keys.modules:
        return {}
    layer, stem = known.modules.starts(keys, block)
    experts = _experts_of(keys, tensor, inner)
    found = {f"{layer}mlp.experts.{n}.{role}_proj.weight": piece for n, role, piece in experts}
    if found or inner in known.used:
        return found
    name, dot, end = inner.rpartition(".")
    if name in known.modules.names:
        return {f"{stem}{known.modules.names[name]}{dot}{end}": source_tensor(keys, tensor)}
    if name.startswith(_NEXTN):
        return {}
    named, made = _dense(keys, known, block, inner, tensor)
    return {layer + named.removeprefix(f"model.layers.{block}."): made}


def _made(keys: Keys, known: Mapping[str, Made], block: int, start: str) -> dict[str, SourceTensor]:
    """Return the tensors of a block that are made of stored ones, by name after `start`."""
    found: dict[str, SourceTensor] = {}
    for named, made in known.items():
        stored = [keys.file.tensors.get(f"blk.{block}.{part}") for part in made.parts]
        parts = tuple(source_tensor(keys, tensor) for tensor in stored if tensor is not None)
        if len(parts) == len(stored):
            shape, make = made.how(keys, *(part.shape for part in parts))
            found[start + named] = replace(
                parts[0], shape=shape, recipe=Recipe(parts, make, made.moves_rows, made.sliced)
            )
    return found


def _sparse_layers(keys: Keys) -> Mapping[int, int]:
    """Return the index of every MoE layer by its block: the blocks that have a router."""
    blocks = [
        block for block in range(keys.layers) if keys.has_tensor("ffn_gate_inp.weight", block)
    ]
    return {block: layer for layer, block in enumerate(blocks)}


def _outside(keys: Keys, known: Architecture, tensor: SourceTensor) -> SourceTensor:
    """Return a tensor outside the blocks as our families have it."""
    if tensor.name not in known.centred:
        return tensor
    return replace(tensor, recipe=Recipe((tensor,), minus_one(keys, tensor.shape)[1]))


def _dense(
    keys: Keys, known: Architecture, block: int, inner: str, tensor: GgufTensor
) -> tuple[str, SourceTensor]:
    """Return the name in our family of a tensor of a block, and the tensor in our order of rows."""
    stem, dot, end = inner.rpartition(".")
    made = source_tensor(keys, tensor)
    named = known.names.get(inner)
    if named is None:
        named = known.names[stem] + dot + end if stem in known.names else None
    if named is None:
        return tensor.name, made
    if stem in known.moves:
        recipe = Recipe((made,), known.moves[stem](keys), moves_rows=True)
        made = replace(made, recipe=recipe)
    if stem == "ffn_gate_inp_shexp":  # one row, also where a file has a vector
        made = replace(made, shape=(1, tensor.shape[-1]))
    return f"model.layers.{block}.{named}", made


def _belongs(name: str, keys: Keys) -> bool:
    """Return True for a scale beside a matrix."""
    stem = name.removesuffix(_INPUT_SCALE).removesuffix(_SCALE)
    beside = stem != name and f"{stem}.weight" in keys.file.tensors
    return beside and not _is_named(name, keys)


def _is_named(scale: str, keys: Keys) -> bool:
    """Return True for a scale that is a tensor of the model: a router's, not a matrix's factor."""
    match = _BLOCK.fullmatch(scale)
    return match is not None and match[2] in ARCHITECTURES[keys.name].names


def source_tensor(keys: Keys, tensor: GgufTensor) -> SourceTensor:
    """Return a stored tensor with the dtype that encode.py knows, and its factor.

    Raises BadCheckpoint for a factor of another type or shape, or beside another type.
    """
    stem, _, end = tensor.name.rpartition(".")
    beside = keys.file.tensors.get(stem + _SCALE) if end == "weight" else None
    if beside is not None and _is_named(beside.name, keys):
        if tensor.type == NVFP4:  # its factors hold the model's scales, too
            raise keys.bad(f"has {tensor.name[:80]!r} in NVFP4, which is not supported here")
        beside = None
    factor = None if beside is None else _stored(beside)
    if factor is not None:
        count = tensor.shape[0] if stem.endswith("_exps") else 1
        if (factor.dtype, factor.shape) != ("F32", (count,)) or tensor.type != NVFP4:
            raise keys.bad(
                f"has {factor.name[:80]!r} of type {factor.dtype} and shape {list(factor.shape)} "
                f"beside {tensor.type} of shape {list(tensor.shape)}, which is not supported"
            )
    return replace(_stored(tensor), factor=factor)


def _stored(tensor: GgufTensor) -> SourceTensor:
    return SourceTensor(
        tensor.name, dtype_of(tensor.type), tensor.shape, tensor.path, tensor.offset,
        tensor.size_bytes,
    )  # fmt: skip


def _experts_of(
    keys: Keys, tensor: GgufTensor, inner: str
) -> Iterator[tuple[int, str, SourceTensor]]:
    """Yield (expert, role, tensor) for each expert that a tensor of a block holds."""
    whole = source_tensor(keys, tensor)
    if match := _ALONE.fullmatch(inner):
        yield int(match[2]), match[1], whole
        return
    match = _STACKED.fullmatch(inner)
    if match is None:
        return
    suffix = "_bias" if match[2] == "bias" else ""
    roles = ("gate", "up") if match[1] == "gate_up" else (match[1],)
    for expert in range(tensor.shape[0]):
        mine = _share(whole, expert, tensor.shape[0], tensor.shape[1:])
        if whole.factor is not None:
            mine = replace(mine, factor=_share(whole.factor, expert, tensor.shape[0], (1,)))
        for number, role in enumerate(roles):
            rows = (mine.shape[0] // len(roles), *mine.shape[1:])
            yield expert, role + suffix, _share(mine, number, len(roles), rows)


def _share(tensor: SourceTensor, number: int, count: int, shape: tuple[int, ...]) -> SourceTensor:
    """Return share `number` of `count` equal shares along the outermost side."""
    size = tensor.size_bytes // count
    at = tensor.offset + number * size
    factor = tensor.factor
    return SourceTensor(tensor.name, tensor.dtype, shape, tensor.path, at, size, factor=factor)
