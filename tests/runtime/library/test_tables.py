"""Tables of rows from a checkpoint to files: their rows, their checks, and what a pull holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor

from moeinf.models.families import family_of
from moeinf.models.layers import kv_q8
from moeinf.native import PAGE_BYTES
from moeinf.offload.format.row_table import RowTable, is_intact, table_path
from moeinf.runtime.checkpoints import table_blocks
from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint, open_checkpoint
from moeinf.runtime.checkpoints.inventory import take_inventory
from moeinf.runtime.config import Settings
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import (
    DamagedModel,
    Manifest,
    NewerModel,
    read_manifest,
    write_manifest,
)
from moeinf.runtime.library.repacking.repack import measure_source
from moeinf.runtime.library.sources import LocalSource
from moeinf.runtime.library.verify import LocalRepair, repair, verify
from scripts.make_checkpoint import byte_tokenizer
from tests.conftest import ignore, pull
from tests.tiny import save_tiny

STEM = "model.layers.0.ple.ple_embedding.ngram_embedding"


def pulled(folder: Path, tag: str = "bf16") -> tuple[Manifest, Path, Tensor]:
    """Pull a tiny model; return its manifest, its folder, and the rows of its table."""
    checkpoint = folder / "checkpoint"
    if not checkpoint.exists():
        save_tiny("qwen4", checkpoint, seed=4)
        byte_tokenizer().save(str(checkpoint / "tokenizer.json"))
    settings = Settings(folder / "home")
    manifest = pull(checkpoint, settings, f"tiny:{tag}")
    (path,) = checkpoint.glob("*.safetensors")
    tensors = load_file(path)
    pieces = [tensors[f"{STEM}.shard_{n}.weight"] for n in range(4)]
    return manifest, Library(settings).folder(manifest.model), torch.cat(pieces)


def rows_of(folder: Path, table: RowTable) -> np.ndarray:
    """Return the rows of a table [n, row_bytes] as its files have them, all blocks checked."""
    found = []
    for number, count in enumerate(table.rows):
        data = memoryview((folder / table_path(0, number)).read_bytes())[PAGE_BYTES:]
        assert len(data) == table.blocks(number) * table.block_bytes
        mine = []
        for block in range(table.blocks(number)):
            some = data[block * table.block_bytes : (block + 1) * table.block_bytes]
            assert is_intact(some, block)
            rows = np.frombuffer(some, np.uint8)[: table.block_rows * table.row_bytes]
            mine.append(rows.reshape(table.block_rows, table.row_bytes))
        found.append(np.concatenate(mine)[:count])
    return np.concatenate(found)


@pytest.mark.parametrize("tag", ["f32", "bf16", "q8", "q4"])
def test_rows_are_those_of_the_checkpoint(
    tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_blocks, "_STEP_BYTES", 1)  # one block at a time
    manifest, folder, weight = pulled(tmp_path, tag)
    (table,) = manifest.tables
    assert (table.name, table.width, table.rows) == (STEM, 5, (60, 60, 60, 60))
    rows = torch.from_numpy(rows_of(folder, table))
    if tag in ("f32", "bf16"):
        dtype = torch.float32 if tag == "f32" else torch.bfloat16
        assert torch.equal(rows.view(dtype), weight.to(dtype))
    else:
        assert torch.equal(rows, kv_q8.quantised(weight))
    assert read_manifest(folder) == manifest
    assert manifest.dense_bytes == manifest.file("dense.safetensors").data_bytes
    sizes = measure_source(LocalSource(open_checkpoint(tmp_path / "checkpoint"), "x"))
    assert sizes.disk_bytes[tag] >= sum(f.size_bytes for f in manifest.files if f.data_offset)


def test_a_damaged_file_is_found_and_made_again(tmp_path: Path) -> None:
    manifest, folder, weight = pulled(tmp_path)
    (table,) = manifest.tables
    path = folder / table_path(0, 2)
    data = bytearray(path.read_bytes())
    data[PAGE_BYTES + 3] ^= 1
    path.write_bytes(data)
    (folder / table_path(0, 3)).unlink()
    damages = verify(folder, manifest, ignore)
    assert [d.path for d in damages] == [table_path(0, 2), table_path(0, 3)]
    source = LocalRepair(open_checkpoint(tmp_path / "checkpoint"))
    repair(folder, manifest, damages, source, ignore)
    assert verify(folder, manifest, ignore) == []
    rows = torch.from_numpy(rows_of(folder, table))
    assert torch.equal(rows.view(torch.bfloat16), weight.bfloat16())


def test_a_manifest_with_wrong_tables_is_damaged(tmp_path: Path) -> None:
    manifest, folder, _ = pulled(tmp_path)
    (table,) = manifest.tables
    for wrong, error, words in (
        (replace(table, rows=(60, 60, 60, 90000)), DamagedModel, "not of the size of its rows"),
        (replace(table, rows=(60,) * 5), DamagedModel, "lacks tables/T000/0004.rows"),
        (replace(table, layout=2), NewerModel, "table layout 2"),
    ):
        write_manifest(folder, replace(manifest, tables=(wrong,)))
        with pytest.raises(error, match=words):
            read_manifest(folder)


@pytest.mark.parametrize("change", ["a piece lacks", "a piece is short", "in one tensor"])
def test_the_pieces_of_a_table(change: str, tmp_path: Path) -> None:
    save_tiny("qwen4", tmp_path, seed=4)
    (path,) = tmp_path.glob("*.safetensors")
    tensors = load_file(path)
    pieces = [tensors.pop(f"{STEM}.shard_{n}.weight") for n in range(4)]
    if change == "in one tensor":
        tensors[f"{STEM}.weight"] = torch.cat(pieces)
    else:
        pieces[1] = pieces[1][:-1].clone()
        kept = pieces[:1] if change == "a piece lacks" else pieces
        tensors |= {f"{STEM}.shard_{n}.weight": piece for n, piece in enumerate(kept)}
    save_file(tensors, path, metadata={"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    family = family_of(checkpoint.config)
    if change == "in one tensor":
        (table,) = take_inventory(family, checkpoint).row_tables("BF16")
        assert table.rows == (240,)
        return
    with pytest.raises(BadCheckpoint, match=r"pieces of .* the config says 240"):
        take_inventory(family, checkpoint)
