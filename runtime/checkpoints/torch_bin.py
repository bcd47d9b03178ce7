"""Read the table of a PyTorch `.bin` file, for checkpoints without safetensors.

A `.bin` is a zip of a pickle and raw storages. state_pickle.py checks the pickle first. Then
torch's weights-only unpickler reads it; it constructs only tensors. FakeTensorMode gives them no
memory. The result is the offset of each tensor's bytes in the file.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moeinf.errors import reason
from moeinf.runtime.checkpoints.checkpoint import (
    BIN,
    BIN_INDEX,
    SAFETENSORS,
    TORCH_DTYPE,
    BadCheckpoint,
    Checkpoint,
    SourceTensor,
    check_weights,
    make_checkpoint,
    open_checkpoint,
    read_config,
    read_json,
)
from moeinf.runtime.checkpoints.state_pickle import check_pickle

MAX_PICKLE_BYTES = 64 << 20  # with all other records that are no storages
_MOST_DIRECTORY_BYTES = 16 << 20  # of the zip; a tensor needs some 100
_STORAGE = re.compile(r"[^/]++/data/[0-9]++")
_NAME = {dtype: name for name, dtype in TORCH_DTYPE.items()}


def read_torch_file(path: Path) -> dict[str, SourceTensor]:
    """Return the tensors of a `.bin` file. Raises BadCheckpoint unless it is a plain state dict."""
    _check_zip(path)
    try:
        _check_pickles(path)
        with FakeTensorMode():
            state = torch.load(path, weights_only=True)
    except pickle.UnpicklingError as error:
        raise BadCheckpoint(f"{path} holds more than tensors: {_first_line(error)}") from error
    except (ImportError, MemoryError):  # not the file's fault
        raise
    except Exception as error:  # an invalid pickle can raise nearly any exception
        raise BadCheckpoint(f"{path} cannot be read: {_first_line(error)}") from error
    if not isinstance(state, dict):
        raise BadCheckpoint(f"{path} does not hold a state dict")
    size = path.stat().st_size
    return {str(name): _source_tensor(path, size, str(name), t) for name, t in state.items()}


def open_folder(folder: Path) -> Checkpoint:
    """Open a checkpoint folder; without safetensors its `.bin` files. Raises BadCheckpoint."""

    def has(name: str) -> bool:
        return (folder / name).exists()

    if SAFETENSORS.given(has) or not BIN.given(has):
        return open_checkpoint(folder)  # its error names the missing file
    config = read_config(folder)
    index = read_json(folder / BIN_INDEX) if (folder / BIN_INDEX).exists() else None
    return make_checkpoint(folder, config, index, lambda name: read_torch_file(folder / name), BIN)


def is_storage(name: str) -> bool:
    """Return True for the name of a record that holds weights."""
    return _STORAGE.fullmatch(name) is not None


def _check_zip(path: Path) -> None:
    """Raise BadCheckpoint unless the file is an uncompressed zip with a pickle of bounded size.

    torch would decompress others, or read them as an old-format pickle without a bound.
    """
    check_weights(path)
    left = MAX_PICKLE_BYTES
    try:
        with _Directory(path) as file, zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED:
                    raise BadCheckpoint(f"{path}: {entry.filename} is compressed")
                left -= 0 if is_storage(entry.filename) else entry.file_size
                if left < 0:
                    raise BadCheckpoint(f"{path}: {entry.filename} has {entry.file_size} bytes")
    except FileNotFoundError as error:
        raise BadCheckpoint(f"{path} is missing") from error
    except BadCheckpoint:
        raise
    except (zipfile.BadZipFile, RuntimeError, ValueError, OSError) as error:
        raise BadCheckpoint(f"{path} is not a PyTorch zip file: {reason(error)}") from error


class _Directory(io.FileIO):
    """A file of which no long piece is read: the zip's directory is one."""

    def read(self, count: int | None = -1) -> bytes:
        if count is not None and count > _MOST_DIRECTORY_BYTES:
            raise zipfile.BadZipFile(f"its directory has {count} bytes")
        return super().read(count)


def _check_pickles(path: Path) -> None:
    """Check every pickle of the zip, whichever torch reads. Raises as check_pickle."""
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.filename.lower().endswith(".pkl"):  # torch's look-up ignores case
                entry.CRC = None  # type: ignore[assignment]  # torch can write it as 0
                check_pickle(archive.read(entry))


def _source_tensor(path: Path, size: int, name: str, tensor: object) -> SourceTensor:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _NAME:
        raise BadCheckpoint(f"{path}: {name!r} is not a float tensor")
    if not tensor.is_contiguous():
        raise BadCheckpoint(f"{path}: {name!r} does not lie in one piece")
    offset, item = tensor.untyped_storage()._checkpoint_offset, tensor.element_size()
    if offset is None:
        raise BadCheckpoint(f"{path}: {name!r} does not lie in this file")
    start = int(offset) + int(tensor.storage_offset()) * item
    count = int(tensor.numel()) * item
    if start < 0 or start + count > size:
        raise BadCheckpoint(f"{path}: {name!r} reaches beyond the end of the file")
    return SourceTensor(name, _NAME[tensor.dtype], tuple(tensor.shape), path, start, count)


def _first_line(error: BaseException) -> str:
    return (reason(error).splitlines() or [type(error).__name__])[0][:200]
