"""Read Hugging Face-style checkpoints: the config, the index, safetensors headers, tensor bytes.

Every file may be hostile: headers are checked against the file's real size before any allocation.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from moeinf.errors import UnusableInput, problem
from moeinf.models.quantisation import MOE_KEY
from moeinf.offload.format.direct_io import BLOCK_BYTES, DirectReader
from moeinf.runtime.bounded_json import MOST_NODES, BadJson, parse_json
from moeinf.runtime.files.regular import NotRegular, check_regular, read_contained

CONFIG = "config.json"
QUANTISED = "hf_quant_config.json"  # ModelOpt's; config.json may lack its quantization_config
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
BIN_INDEX = "pytorch_model.bin.index.json"
BIN_SINGLE = "pytorch_model.bin"
_MAX_JSON_BYTES = {CONFIG: 4 << 20, INDEX: 64 << 20, BIN_INDEX: 64 << 20}
# Limits of a header: 1 KiB and 32 JSON values per tensor, plus spare room for metadata.
MAX_HEADER_BYTES = 64 << 20
_TENSOR_BYTES, _TENSOR_NODES, _SPARE_TENSORS = 1 << 10, 32, 1 << 10
_MAX_FILES = 10_000
_DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8,
    "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.(safetensors|bin)")
TORCH_DTYPE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INTEGER_DTYPE = {"I64": torch.int64, "I32": torch.int32}  # of tables, which become floats


class BadCheckpoint(UnusableInput, ValueError):
    """A checkpoint cannot be used. The message names the file."""

    code = "bad_checkpoint"
    hint = "a folder with config.json, tokenizer.json and *.safetensors, or a whole GGUF file"


@dataclass(frozen=True)
class Packaging:
    """The file names of one weight format: a single file, or several files with an index."""

    index: str
    single: str
    suffix: str

    def given(self, has: Callable[[str], bool]) -> bool:
        """Return whether the index or the single file exists, by the test `has`."""
        return has(self.index) or has(self.single)


SAFETENSORS = Packaging(INDEX, SINGLE, ".safetensors")
BIN = Packaging(BIN_INDEX, BIN_SINGLE, ".bin")


@dataclass(frozen=True)
class Pick:
    """The part of a stored matrix or vector that forms a tensor.

    The stored matrix is transposed first, if `transposed`. Then the rows first, first + step, …
    are taken, up to the tensor's number of rows.
    """

    shape: tuple[int, ...]  # of the stored matrix or vector
    transposed: bool = False
    first: int = 0
    step: int = 1


@dataclass(frozen=True)
class SourceTensor:
    """The name, dtype, shape and place of one tensor in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int  # in the file
    size_bytes: int
    scales: SourceTensor | None = None  # see fp8.py: one factor per block of `block` weights
    block: tuple[int, int] = (1, 1)
    pick: Pick | None = None  # see fused_experts.py
    factor: SourceTensor | None = None  # see nvfp4.py: one factor of all weights
    zeros: SourceTensor | None = None  # see packed_integers.py: the code of 0 in every block
    stated: SourceTensor | None = None  # see packed_integers.py: holds the shape [R, C]
    recipe: Recipe | None = None  # then dtype and place are those of the first stored tensor


@dataclass(frozen=True)
class Recipe:
    """The stored tensors that a tensor is made of, and how.

    make takes each stored tensor as float32 in its shape and returns the tensor as float32. With
    `moves_rows` it only selects, joins and reorders whole rows: it takes matrices and vectors of
    any dtype, also stored rows of a quantised format. With `sliced` it makes equal runs of rows,
    one of each slice along the outermost side of the stored tensors.
    """

    stored: tuple[SourceTensor, ...]
    make: Callable[..., torch.Tensor]
    moves_rows: bool = False
    sliced: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: its config, and the place of each tensor by name.

    experts: the tensors of experts that have no names of their own, by (MoE layer, expert, role)
    made: the content of config, tokenizer and other small files that `folder` does not hold
    metadata: of a GGUF file
    """

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, SourceTensor]
    experts: Mapping[tuple[int, int, str], SourceTensor] = field(default_factory=dict)
    made: Mapping[str, bytes] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def all_stored(self) -> Iterator[SourceTensor]:
        """Yield every stored tensor, those of experts included."""
        for tensor in (*self.tensors.values(), *self.experts.values()):
            yield from (tensor,) if tensor.recipe is None else tensor.recipe.stored

    def small_file(self, name: str, most_bytes: int) -> bytes | None:
        """Return the content of a small file, or None if it is absent. Raises BadCheckpoint."""
        if self.made is not None:
            return self.made.get(name)
        path = self.folder / name
        return read_small(path, most_bytes) if os.path.lexists(path) else None

    def need_small_file(self, name: str) -> bytes:
        """Return the content of a small file. Raises BadCheckpoint, also if it is absent."""
        data = self.small_file(name, max_json_bytes(name))
        if data is None:
            raise BadCheckpoint(f"{self.folder / name} is missing")
        return data


Headers = Callable[[str], dict[str, SourceTensor]]  # file name -> its tensors


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the config, the index and the headers of a folder. Raises BadCheckpoint."""
    if not folder.is_dir():
        raise BadCheckpoint(f"{folder} is not a folder")
    config = read_config(folder)
    index = read_json(folder / INDEX) if (folder / INDEX).exists() else None
    if index is None and not (folder / SINGLE).exists():
        raise BadCheckpoint(f"{folder} has neither {INDEX} nor {SINGLE}")
    return make_checkpoint(folder, config, index, lambda name: read_header(folder / name))


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config of a folder, completed from hf_quant_config.json. Raises BadCheckpoint."""
    config, beside = read_json(folder / CONFIG), folder / QUANTISED
    return with_quantised(config, read_json(beside) if beside.exists() else None)


def with_quantised(config: dict[str, Any], beside: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the config with ModelOpt's quantisation method, if `beside` names an algorithm.

    beside: the content of hf_quant_config.json, which counts less than a config with MOE_KEY.
    """
    own = config.get("quantization_config")
    if beside is None or (isinstance(own, dict) and MOE_KEY in own):
        return config
    said = beside.get("quantization")
    algorithm = said.get("quant_algo") if isinstance(said, dict) else "an unnamed form"
    if algorithm is None:  # only the KV cache is quantised
        return config
    return {
        **config,
        "quantization_config": {"quant_method": "modelopt", "quant_algo": str(algorithm)[:40]},
    }


def make_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    index: Mapping[str, Any] | None,
    headers: Headers,
    packaging: Packaging = SAFETENSORS,
) -> Checkpoint:
    """Build a checkpoint from its parts. Without an index it has one file of weights.

    Raises BadCheckpoint if a file lacks a tensor of the index.
    """
    if index is None:
        return Checkpoint(folder, config, headers(packaging.single))
    weight_map = index.get("weight_map")
    files = indexed_files(folder, weight_map, packaging)
    assert isinstance(weight_map, dict)
    tensors: dict[str, SourceTensor] = {}
    for file in files:
        for name, tensor in headers(file).items():
            if weight_map.get(name) == file:  # else a duplicate that the index does not use
                tensors[name] = tensor
    missing = [name for name in weight_map if name not in tensors]
    if missing:
        file = weight_map[missing[0]]
        raise BadCheckpoint(f"{folder / file} lacks the tensor {missing[0]!r} of the index")
    return Checkpoint(folder, config, tensors)


def indexed_files(folder: Path, weight_map: object, packaging: Packaging) -> list[str]:
    """Return the files that an index names, sorted. Raises BadCheckpoint for invalid names."""
    path = folder / packaging.index
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadCheckpoint(f"{path} has no weight_map")
    files = sorted({str(file) for file in weight_map.values()})
    if len(files) > _MAX_FILES:
        raise BadCheckpoint(f"{path} names {len(files)} files, at most {_MAX_FILES}")
    for file in files:
        if not _FILE_NAME.fullmatch(file) or not file.endswith(packaging.suffix):
            raise BadCheckpoint(f"{path} names an invalid file: {file!r}")
    return files


def max_json_bytes(name: str) -> int:
    """Return the size limit of a JSON file of this name, in bytes."""
    return _MAX_JSON_BYTES.get(name, 64 << 20)


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object of bounded size, without duplicate keys. Raises BadCheckpoint."""
    return parse_object(read_small(path, max_json_bytes(path.name)), path)


def read_small(path: Path, most_bytes: int) -> bytes:
    """Return the bytes of a regular file in a checkpoint's folder. Raises BadCheckpoint."""
    with explained(path):
        return read_contained(path, most_bytes)


def parse_object(text: bytes, path: Path, most_nodes: int = MOST_NODES) -> dict[str, Any]:
    """Return text as a JSON object without duplicate keys. Raises BadCheckpoint."""
    try:
        value = parse_json(text, most_nodes)
    except BadJson as error:
        raise BadCheckpoint(f"{path} {error}") from error
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{path} does not hold a JSON object")
    return value


def check_weights(path: Path) -> None:
    """Raise BadCheckpoint unless a file of weights is a regular file, or a link to one."""
    with explained(path):
        check_regular(path)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Raise errors of the system about `path` as BadCheckpoint."""
    try:
        yield
    except FileNotFoundError as error:
        raise BadCheckpoint(f"{path} is missing") from error
    except NotRegular as error:
        raise BadCheckpoint(f"{path} is refused: {problem(error)}") from error
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {problem(error)}") from error


def read_header(path: Path) -> dict[str, SourceTensor]:
    """Return the tensors of one safetensors file.

    Raises BadCheckpoint unless they cover the file without holes or overlaps.
    """
    return read_described(path)[0]


def read_described(path: Path) -> tuple[dict[str, SourceTensor], object]:
    """Return the tensors of a safetensors file and the unchecked metadata. See `read_header`."""
    check_weights(path)
    with explained(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = header_length(path, size, file.read(8))
        return _parse_header(path, size, file.read(length))


def header_length(path: Path, size: int, start: bytes) -> int:
    """Return the length of the JSON header, in bytes, of a file of `size` bytes.

    start: the first 8 bytes of the file. Raises BadCheckpoint if the header cannot fit.
    """
    if len(start) < 8:
        raise BadCheckpoint(f"{path} is truncated: {size} bytes")
    length: int = struct.unpack("<Q", start)[0]
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise BadCheckpoint(f"{path} is truncated or damaged: its header of {length} bytes")
    return length


def parse_header(path: Path, size: int, text: bytes) -> dict[str, SourceTensor]:
    """Return the tensors that the JSON header `text` describes. Raises as `read_header`.

    size: of the file, in bytes.
    """
    return _parse_header(path, size, text)[0]


def _parse_header(path: Path, size: int, text: bytes) -> tuple[dict[str, SourceTensor], object]:
    tensors_at_most = text.count(b'"data_offsets"') + _SPARE_TENSORS
    if len(text) > tensors_at_most * _TENSOR_BYTES:
        raise BadCheckpoint(f"{path} has a header of {len(text)} bytes for too few tensors")
    header = parse_object(text, path, min(MOST_NODES, tensors_at_most * _TENSOR_NODES))
    metadata = header.pop("__metadata__", None)
    end = 8 + len(text)
    tensors = [_source_tensor(path, end, name, about) for name, about in header.items()]
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.size_bytes)):
        if tensor.offset != end:
            what = "overlaps another tensor" if tensor.offset < end else "leaves a hole before it"
            raise BadCheckpoint(f"{path}: {tensor.name!r} {what}")
        end += tensor.size_bytes
    if end != size:
        raise BadCheckpoint(f"{path} is {size} bytes, its header describes {end}")
    return {tensor.name: tensor for tensor in tensors}, metadata


def _source_tensor(path: Path, data_start: int, name: str, about: object) -> SourceTensor:
    if not isinstance(about, dict):
        raise BadCheckpoint(f"{path}: {name!r} is not described")
    dtype = about.get("dtype")
    shape, offsets = _naturals(about.get("shape")), _naturals(about.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        raise BadCheckpoint(f"{path}: {name!r} has the unknown dtype {dtype!r}")
    if shape is None or len(shape) > 8:
        raise BadCheckpoint(f"{path}: {name!r} has an invalid shape")
    if offsets is None or len(offsets) != 2:
        raise BadCheckpoint(f"{path}: {name!r} has invalid offsets")
    count = _DTYPE_BYTES[dtype]
    for side in shape:
        count *= side
    if offsets[1] - offsets[0] != count:
        raise BadCheckpoint(
            f"{path}: {name!r} is {shape} {dtype}, {count} bytes, but holds "
            f"{offsets[1] - offsets[0]}"
        )
    return SourceTensor(name, dtype, tuple(shape), path, data_start + offsets[0], count)


def _naturals(value: object) -> list[int] | None:
    """Return `value` if it is a list of integers from 0 to 2^48 - 1, else None."""
    if not isinstance(value, list):
        return None
    return value if all(type(item) is int and 0 <= item < 2**48 for item in value) else None


def blocks(tensor: SourceTensor, dtype: str) -> Iterator[memoryview]:
    """Yield the tensor's bytes in file order, converted to `dtype`, in blocks of bounded size.

    A block is valid until the next one is taken. Raises BadCheckpoint if the file ends early, or if
    the tensor's dtype is not in TORCH_DTYPE or INTEGER_DTYPE.
    """
    if tensor.dtype not in TORCH_DTYPE | INTEGER_DTYPE:
        named = f"{tensor.path}: {tensor.name!r}"
        raise BadCheckpoint(f"{named} is {tensor.dtype}; not a weight we read")
    with DirectReader(tensor.path) as file:
        for start in range(0, tensor.size_bytes, BLOCK_BYTES):
            count = min(BLOCK_BYTES, tensor.size_bytes - start)
            view = file.read(tensor.offset + start, count)
            if len(view) < count:
                raise BadCheckpoint(f"{tensor.path} is truncated")
            yield view if tensor.dtype == dtype else _converted(view, tensor.dtype, dtype)


def read_exactly(descriptor: int, view: memoryview, offset: int, path: Path) -> None:
    """Fill `view` with the bytes at `offset`. Raises BadCheckpoint if the file ends early."""
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise BadCheckpoint(f"{path} is truncated")
        done += count


def _converted(view: memoryview, source: str, target: str) -> memoryview:
    known = TORCH_DTYPE | INTEGER_DTYPE
    return memory_of(torch.frombuffer(view, dtype=known[source]).to(known[target]))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, without a copy."""
    return tensor.view(torch.uint8).numpy().data
