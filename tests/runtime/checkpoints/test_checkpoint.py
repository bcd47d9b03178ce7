"""Valid and hostile checkpoints: every bad file raises one BadCheckpoint that names it."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from moeinf.offload.format.direct_io import BLOCK_BYTES
from moeinf.runtime.checkpoints.checkpoint import (
    BadCheckpoint,
    blocks,
    open_checkpoint,
    read_header,
    read_json,
)


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def tensor(shape: list[Any], start: int, end: int, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = read_header(tmp_path / "x.safetensors")
    assert set(found) == {"a", "b"}
    assert found["a"].shape == (2, 3)
    assert b"".join(blocks(found["a"], "F32")) == tensors["a"].numpy().tobytes()
    as_bf16 = tensors["a"].to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert b"".join(blocks(found["a"], "BF16")) == as_bf16
    assert b"".join(blocks(found["b"], "F32")) == torch.ones(5).numpy().tobytes()


def test_blocks_are_bounded_and_rounded_to_nearest_even(tmp_path: Path) -> None:
    values = torch.randn(BLOCK_BYTES // 4 * 2 + 77, generator=torch.Generator().manual_seed(0))
    save_file({"a": values}, tmp_path / "x.safetensors")
    (found,) = read_header(tmp_path / "x.safetensors").values()
    parts = [bytes(block) for block in blocks(found, "BF16")]
    assert max(map(len, parts)) <= BLOCK_BYTES
    joined = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.bfloat16)
    assert torch.equal(joined, values.to(torch.bfloat16))


HOSTILE: dict[str, tuple[Any, bytes, int | None]] = {
    "empty object, data behind": ({}, b"x", None),
    "header longer than the file": ({}, b"", 1 << 20),
    "header length beyond 2^63": ({}, b"", (1 << 64) - 1),
    "not JSON": (b"{nonsense", b"", None),
    "not UTF-8": (b'{"\xff": 1}', b"", None),
    "not an object": ([1], b"", None),
    "deep nesting": (b"[" * 100_000, b"", None),
    "duplicate key": (
        b'{"a": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}, "a": {}}',
        b"x",
        None,
    ),
    "tensor is no object": ({"a": 7}, b"", None),
    "unknown dtype": ({"a": tensor([1], 0, 1, "F7")}, b"x", None),
    "dtype is no text": ({"a": {**tensor([1], 0, 1), "dtype": ["U8"]}}, b"x", None),
    "negative side": ({"a": tensor([-1], 0, 1)}, b"x", None),
    "boolean side": ({"a": tensor([True], 0, 1)}, b"x", None),
    "float side": ({"a": tensor([1.0], 0, 1)}, b"x", None),
    "overflowing shape": ({"a": tensor([1 << 40, 1 << 40], 0, 1)}, b"x", None),
    "huge empty shape": ({"a": tensor([1 << 60, 0], 0, 0)}, b"", None),
    "size differs from shape": ({"a": tensor([3], 0, 2)}, b"xx", None),
    "offsets backwards": ({"a": tensor([1], 1, 0)}, b"x", None),
    "one offset": ({"a": {**tensor([1], 0, 1), "data_offsets": [0]}}, b"x", None),
    "beyond the end": ({"a": tensor([9], 0, 9)}, b"x", None),
    "bytes behind the end": ({"a": tensor([1], 0, 1)}, b"xy", None),
    "hole": ({"a": tensor([1], 0, 1), "b": tensor([1], 2, 3)}, b"xyz", None),
    "overlap": ({"a": tensor([2], 0, 2), "b": tensor([2], 1, 3)}, b"xyz", None),
    "same bytes twice": ({"a": tensor([1], 0, 1), "b": tensor([1], 0, 1)}, b"x", None),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers(case: str, tmp_path: Path) -> None:
    header, data, length = HOSTILE[case]
    path = write(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors"):
        read_header(path)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_tile_the_file(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(data)
    try:
        tensors = read_header(path)
    except BadCheckpoint:
        return
    length = struct.unpack("<Q", data[:8])[0]
    assert sum(t.size_bytes for t in tensors.values()) == len(data) - 8 - length


def checkpoint(folder: Path, index: Any = None, config: Any = None) -> Path:
    (folder / "config.json").write_text(
        json.dumps({"model_type": "olmoe"} if config is None else config)
    )
    save_file({"a": torch.ones(2)}, folder / "model-1.safetensors")
    save_file({"b": torch.ones(2), "a": torch.zeros(2)}, folder / "model-2.safetensors")
    weight_map = (
        {"a": "model-1.safetensors", "b": "model-2.safetensors"} if index is None else index
    )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_index_decides_which_copy_counts(tmp_path: Path) -> None:
    tensors = open_checkpoint(checkpoint(tmp_path)).tensors
    assert set(tensors) == {"a", "b"}
    assert tensors["a"].path.name == "model-1.safetensors"


@pytest.mark.parametrize(
    "file",
    [
        "../model-1.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "x.bin",
        "",
        "no\0.safetensors",
        "C:\\x.safetensors",
        "a\u202eb.safetensors",
        ".x.safetensors",
        "x" * 250 + ".safetensors",
    ],
)
def test_index_cannot_name_files_elsewhere(file: str, tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="names an invalid file"):
        open_checkpoint(checkpoint(tmp_path, {"a": file}))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"config\.json is missing"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadCheckpoint, match="neither"):
        open_checkpoint(tmp_path)
    with pytest.raises(BadCheckpoint, match=r"model-9\.safetensors is missing"):
        open_checkpoint(checkpoint(tmp_path, {"a": "model-9.safetensors"}))
    with pytest.raises(BadCheckpoint, match="lacks the tensor 'c'"):
        open_checkpoint(checkpoint(tmp_path, {"c": "model-1.safetensors"}))
    with pytest.raises(BadCheckpoint, match="is not a folder"):
        open_checkpoint(tmp_path / "config.json")


def test_a_file_cut_while_reading(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1000)}, tmp_path / "x.safetensors")
    (found,) = read_header(tmp_path / "x.safetensors").values()
    with (tmp_path / "x.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(BadCheckpoint, match=r"x\.safetensors is truncated"):
        list(blocks(found, "F32"))


def test_a_duplicate_key_is_found_in_linear_time(tmp_path: Path) -> None:
    """A quadratic count of the keys would take half an hour for this file."""
    keys = ",".join(f'"{number}":0' for number in range(200_000))
    path = tmp_path / "config.json"
    path.write_text("{" + keys + ',"199999":1}')
    begin = time.monotonic()
    with pytest.raises(BadCheckpoint, match="the duplicate key '199999'"):
        read_json(path)
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("piece", [b"[]", b"{}", b"1", b'{"":1}', b'"",""'])
def test_json_is_refused_before_it_takes_memory(piece: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer_config.json"
    count = 5 << 20
    path.write_bytes(b'{"a":[' + (piece + b",") * count + b"1]}")
    tracemalloc.start()
    try:
        with pytest.raises(BadCheckpoint, match=r"too many JSON values|too large"):
            read_json(path)
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()


def test_a_header_is_as_large_as_its_tensors_allow(tmp_path: Path) -> None:
    many = {f"{n:0900d}": tensor([1], n, n + 1) for n in range(3000)}
    path = write(tmp_path / "x.safetensors", many, bytes(3000))
    assert len(read_header(path)) == 3000
    for about in ({"__metadata__": {"a": "x" * (2 << 20)}}, {"a": [[]] * 40_000}):
        with pytest.raises(BadCheckpoint, match=r"too few tensors|too many JSON values"):
            read_header(write(path, about))


def test_an_index_names_a_bounded_number_of_files(tmp_path: Path) -> None:
    index = {str(n): f"{n}.safetensors" for n in range(10_001)}
    with pytest.raises(BadCheckpoint, match="10001 files"):
        open_checkpoint(checkpoint(tmp_path, index))
