"""Test shards: valid safetensors whose data begins at byte 4096, hashed during the write."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moeinf.native import crc32c
from moeinf.offload.format.layout import ExpertKey, ExpertLayout, largest_slot_bytes
from moeinf.offload.format.shards import shard_header, shard_path, write_file

LAYOUT = ExpertLayout(hidden=6, intermediate=5, dtype="BF16")


def test_the_safetensors_library_reads_a_shard(tmp_path: Path) -> None:
    gate_up = torch.randn(10, 6, generator=torch.Generator().manual_seed(1)).bfloat16()
    down = torch.randn(6, 5, generator=torch.Generator().manual_seed(2)).bfloat16()
    data = [memoryview(t.view(torch.uint8).numpy().tobytes()) for t in (gate_up, down)]
    key = ExpertKey(3, 17)
    record = write_file(tmp_path, shard_path(key), shard_header(key, LAYOUT), data)
    path = tmp_path / "experts/L003/E017.safetensors"
    found = load_file(path)
    assert torch.equal(found["gate_up"], gate_up)
    assert torch.equal(found["down"], down)
    raw = path.read_bytes()
    assert record.size_bytes == len(raw) == 4096 + LAYOUT.data_bytes
    assert record.sha256 == hashlib.sha256(raw).hexdigest()
    assert record.crc32c == crc32c(raw[4096:])
    assert record.data_offset == 4096
    assert raw[4096:] == b"".join(data)


def test_slots_are_whole_pages() -> None:
    assert LAYOUT.data_bytes == 3 * 6 * 5 * 2
    assert LAYOUT.slot_bytes == 4096
    assert ExpertLayout(128, 64, "BF16").slot_bytes == 49152
    assert ExpertLayout(128, 65, "F32").slot_bytes == 102400


def test_what_an_expert_consists_of() -> None:
    biased = ExpertLayout(70, 45, "Q4", "clamped_swiglu", biased=True)
    spans = {span.name: (span.dtype, span.size_bytes) for span in biased.spans}
    assert spans == {
        "gate": ("U8", 3 * 2 * 576),
        "up": ("U8", 3 * 2 * 576),
        "down": ("U8", 5 * 576),
        "gate_up_bias": ("BF16", 180),
        "down_bias": ("BF16", 140),
    }
    ungated = ExpertLayout(6, 5, "F32", "relu", biased=True)
    assert [(s.name, s.shape, s.offset_bytes) for s in ungated.spans] == [
        ("up", (5, 6), 0), ("down", (6, 5), 120), ("up_bias", (5,), 240), ("down_bias", (6,), 260),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="activation 'gelu'"):
        ExpertLayout(6, 5, "F32", "gelu")


def test_a_down_of_another_format() -> None:
    mixed = ExpertLayout(70, 45, "Q4", "clamped_swiglu", biased=True, down="Q8")
    assert [(s.name, s.offset_bytes, s.size_bytes) for s in mixed.spans] == [
        ("gate", 0, 3456), ("up", 3456, 3456), ("down", 6912, 5 * 1088),
        ("gate_up_bias", 12352, 180), ("down_bias", 12532, 140),
    ]  # fmt: skip
    assert (mixed.version, mixed.forms, mixed.slot_bytes) == (2, ("Q4", "Q8"), 16384)
    assert 8 * ExpertLayout(64, 64, "Q4", down="Q8").data_bytes / (3 * 64 * 64) == 35 / 6
    plain = ExpertLayout(70, 45, "Q4", "clamped_swiglu", biased=True)
    assert plain == ExpertLayout(70, 45, "Q4", "clamped_swiglu", biased=True, down="Q4")
    assert largest_slot_bytes([plain, mixed, plain]) == 16384
    key = ExpertKey(0, 0)
    assert b'"formats":"Q4 Q8"' in shard_header(key, mixed)
    assert b"formats" not in shard_header(key, plain)


@pytest.mark.parametrize(
    ("form", "activation", "down"),
    [("BF16", "swiglu", "Q8"), ("Q4", "swiglu", "F32"), ("Q4", "swiglu", "Q9"),
     ("MXFP4", "relu", "Q8")],
)  # fmt: skip
def test_formats_that_one_expert_cannot_have(form: str, activation: str, down: str) -> None:
    with pytest.raises(ValueError, match=r"no expert layout|cannot have both|not be aligned"):
        ExpertLayout(64, 16, form, activation, down=down)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def data() -> Iterator[memoryview]:
        yield memoryview(b"abc")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_file(tmp_path, "experts/L000/E000.safetensors", b"header", data())
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
