"""Quantised models as a whole: tiled embeddings, and bits per weight compared with GGUF.

test_quantised.py measures the quality.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.shapes import shape, tensors_of
from moeinf.models.families import family_of
from moeinf.native import gather_rows
from moeinf.offload.format.layout import stored_bytes
from moeinf.offload.format.quantise import dequantise, quantise
from moeinf.runtime.checkpoints.checkpoint import (
    Checkpoint,
    SourceTensor,
    open_checkpoint,
    read_header,
)
from moeinf.runtime.checkpoints.inventory import take_inventory
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.loader import DenseWeights
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import DENSE, read_manifest
from moeinf.runtime.library.repacking.repack import repack
from moeinf.runtime.library.sources import LocalSource
from moeinf.runtime.machine.measurements import DEFAULT_READING
from moeinf.runtime.names import ModelName
from scripts.make_checkpoint import byte_tokenizer
from tests.tiny import save_tiny


@pytest.mark.parametrize("form", ["Q4", "Q8"])
@pytest.mark.parametrize("sides", [(40, 100), (3, 32), (97, 64)])
def test_rows_are_gathered_bit_for_bit(sides, form):
    tiles = quantise(torch.randn(sides, generator=torch.Generator().manual_seed(4)), form)
    wanted = dequantise(tiles, form, *sides)
    ids = torch.tensor([2, 0, sides[0] - 1, 2])
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(4, sides[1], dtype=dtype)
        gather_rows(tiles.data_ptr(), form.lower(), *sides, ids.data_ptr(), 4, out.data_ptr(),
                    dtype == torch.float32)  # fmt: skip
        assert torch.equal(out, wanted[ids].to(dtype))
    ids[1] = sides[0]
    with pytest.raises(IndexError, match=f"row {sides[0]} of {sides[0]}"):
        gather_rows(tiles.data_ptr(), form.lower(), *sides, ids.data_ptr(), 4, out.data_ptr(), True)


def test_a_tied_embedding_is_stored_once_and_read_both_ways(tmp_path):
    save_tiny("granite-bare", tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"]
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    library = Library(Settings(home=tmp_path / "home"))
    source = LocalSource(open_checkpoint(tmp_path), "tiny")
    name = ModelName("tied", "q4")
    repack(source, library, name, lambda *_: None, lambda _: None)
    folder = library.folder(name)
    dense = read_header(folder / DENSE)
    assert "lm_head.weight" not in dense
    weight = next(
        t for n, t in source.checkpoint.tensors.items() if n.endswith("embed_tokens.weight")
    )
    assert dense["model.embed_tokens.weight"].size_bytes == stored_bytes("Q8", weight.shape)
    parts = DenseWeights(folder, read_manifest(folder), EngineConfig(), DEFAULT_READING)
    rows = parts.embedding("model.embed_tokens", *weight.shape).rows(torch.tensor([96, 0, 17]))
    plain = load_file(weight.path)["model.embed_tokens.weight"][[96, 0, 17]].double()
    assert 0 < (rows.double() - plain).norm() / plain.norm() < 0.01
    head = parts.linear("model.embed_tokens", *weight.shape)
    x = torch.randn(2, weight.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.allclose(head(x)[:, 17].float(), x.float() @ rows[2].float(), rtol=0.05, atol=0.05)


def bits(config: dict[str, object], tag: str) -> tuple[float, float]:
    """Return the bits per weight of a real shape: ours, and those of llama.cpp's Q4_0 or Q8_0."""
    tensors = {
        n: SourceTensor(n, "BF16", s, Path(n), 0, 2 * math.prod(s)) for n, s in tensors_of(config)
    }
    inventory = take_inventory(family_of(config), Checkpoint(Path(), config, tensors))
    theirs = 0.0
    for name, tensor in tensors.items():
        plain = len(tensor.shape) == 1 or name.endswith("mlp.gate.weight")
        head = name == "lm_head.weight" and tag == "q4"
        width = 32 if plain else 210 / 32 if head else {"q4": 4.5, "q8": 8.5}[tag]
        theirs += width * math.prod(tensor.shape)
    weights = sum(math.prod(tensor.shape) for tensor in tensors.values())
    return 8 * inventory.disk_bytes(tag.upper()) / weights, theirs / weights


@pytest.mark.parametrize("tag", ["q4", "q8"])
@pytest.mark.parametrize("shape_name", ["olmoe", "deepseek-v2-lite", "qwen3-30b-a3b"])
def test_bits_per_weight_are_those_of_gguf_files(shape_name, tag):
    ours, theirs = bits(shape(shape_name), tag)
    assert ours == pytest.approx(theirs, rel=0.05)
