"""Files of models with several residual streams: what no other family's file has."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file

from moeinf.runtime.jobs.export_gguf import export_gguf
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.library.manifest import DamagedModel
from tests.conftest import ignore
from tests.exported import STREAMS, Model, exported
from tests.runtime.gguf.writing.test_architectures import described
from tests.tiny import save_tiny
from tests.tiny_families import Tiny

_STEM = "model.layers.0.ple.ple_embedding"


def made(tiny: Tiny, folder: Path, tag: str) -> tuple[Model, dict[str, Any]]:
    """Return an exported model, and the tensors of its checkpoint."""
    save_tiny(tiny, folder / "x", seed=3)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_CHECKPOINT / file, folder / "x")
    return exported(folder / "x", folder, tag), load_file(folder / "x" / "model.safetensors")


@pytest.mark.parametrize(
    ("tag", "width", "kind", "error"),
    [("f32", 36, "F32", 0), ("bf16", 36, "BF16", 2**-8), ("q8", 36, "F32", 0.02),
     ("q8", 128, "Q8_0", 0.02)],
)  # fmt: skip
def test_a_table_of_ngrams(tag: str, width: int, kind: str, error: float, tmp_path: Path) -> None:
    """Its rows and its hash functions are those of the checkpoint."""
    tiny = STREAMS["qwen4"].but(ple_embed_dim=width, hidden_size=width)
    model, theirs = made(tiny, tmp_path, tag)
    reader = GGUFReader(model.file)
    (table,) = (t for t in reader.tensors if t.name == "per_layer_token_embd.weight")
    assert table.tensor_type.name == kind
    shards = [theirs[f"{_STEM}.ngram_embedding.shard_{n}.weight"] for n in range(4)]
    rows = torch.cat(shards).numpy()
    found = dequantize(table.data, table.tensor_type)
    np.testing.assert_allclose(found, rows, error, error * np.abs(rows).max())
    buffers = {
        "layer_multipliers": "layer_multipliers",
        "head_offsets": "ngram_heads_offsets",
        "head_vocab_sizes": "ngram_heads_vocab_sizes",
    }
    for key, buffer in buffers.items():
        field = reader.get_field(f"qwen4exp.ple.{key}")
        assert field is not None
        assert field.contents() == theirs[f"{_STEM}.{buffer}"].flatten().tolist()


def test_a_table_of_experts(tmp_path: Path) -> None:
    model, theirs = made(STREAMS["deepseek-v4"], tmp_path, "q8")
    tensors = {tensor.name: tensor for tensor in GGUFReader(model.file).tensors}
    for layer in (0, 1):
        found = tensors[f"blk.{layer}.ffn_gate_tid2eid.weight"]
        assert found.tensor_type.name == "I32"
        (name,) = (n for n in theirs if f"layers.{layer}." in n and n.endswith("tid2eid"))
        assert np.array_equal(found.data, theirs[name].numpy())


def test_a_damaged_table_is_refused(tmp_path: Path) -> None:
    model, _ = made(STREAMS["qwen4"], tmp_path, "f32")
    folder = Library(model.settings).folder(model.manifest.model)
    path = folder / model.manifest.table_files(0)[0].path
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    again = tmp_path / "again.gguf"
    with pytest.raises(DamagedModel, match="is not what was pulled"):
        export_gguf(folder, model.manifest, again, ignore, ignore, force=False)
    assert not again.exists()


def test_the_budget_of_blocks_has_a_note() -> None:
    assert described(STREAMS["qwen4"]).notes == ()
    (note,) = described(STREAMS["qwen4"].but(indexer_compress_ratio=4)).notes
    assert "up to 3 tokens more" in note
