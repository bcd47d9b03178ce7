"""Every dense tensor begins at a multiple of its item size, and `pull` opens its own output."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeinf.models.base import ModelDataError
from moeinf.native import SHARD_DATA_OFFSET
from moeinf.offload.format.layout import ITEM_BYTES, is_tiled
from moeinf.runtime.checkpoints.checkpoint import TORCH_DTYPE, read_header
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.library import shard_writer
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import DENSE, Manifest
from moeinf.runtime.library.shard_writer import Slice, dense_header
from scripts.make_checkpoint import byte_tokenizer
from tests.conftest import pull
from tests.tiny import TINY, save_tiny

EXACT = {  # families with F32 vectors beside bfloat16 ones, and a width that gives odd sizes
    "deepseek-v3": {"hidden_size": 37},
    "glm4": {"hidden_size": 37},
    "glm4-lite": {"hidden_size": 37, "kv_lora_rank": 19},
    "qwen3.5": {"hidden_size": 37, "linear_value_head_dim": 9},
}
slices = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=6),
    st.one_of(
        st.builds(
            Slice,
            st.sampled_from(["F32", "BF16"]),
            st.lists(st.integers(1, 75), min_size=1, max_size=2).map(tuple),
        ),
        st.builds(Slice, st.sampled_from(["Q4", "Q8"]), st.tuples(*[st.integers(1, 150)] * 2)),
    ),
    min_size=1,
    max_size=12,
)


@given(slices)
def test_every_tensor_is_aligned(wanted: dict[str, Slice]) -> None:
    header, order = dense_header(wanted, "BF16")
    assert len(header) == SHARD_DATA_OFFSET
    told = json.loads(header[8:])
    assert sorted(order) == sorted(wanted)
    end = 0
    for name in order:
        form = wanted[name].form
        start, stop = told[name]["data_offsets"]
        assert start == end  # safetensors allows no holes
        assert start % (64 if (stop - start) % 64 == 0 else ITEM_BYTES[form]) == 0
        assert not is_tiled(form) or start % 64 == 0
        end = stop


def odd(name: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Callable[[str], Manifest]:
    """Write a checkpoint of odd widths; return a function that pulls it as a tag."""
    settings: dict[str, Any] = {**TINY[name].settings, **EXACT[name]}
    monkeypatch.setitem(TINY, name, replace(TINY[name], settings=settings))
    save_tiny(name, folder / "checkpoint", dtype=torch.bfloat16)
    byte_tokenizer().save(str(folder / "checkpoint" / "tokenizer.json"))
    return lambda tag: pull(folder / "checkpoint", Settings(folder / "home"), f"odd:{tag}")


def logits(manifest: Manifest, home: Path) -> torch.Tensor:
    settings = Settings(home)
    folder = Library(settings).folder(manifest.model)
    with Engine.open(manifest, folder, EngineConfig(), settings) as engine:
        return torch.from_numpy(engine.extend(engine.new_state(), [1, 2, 3]))


@pytest.mark.parametrize("tag", ["bf16", "q8", "q4"])
@pytest.mark.parametrize("name", EXACT)
def test_odd_vectors_before_exact_ones(
    name: str, tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = odd(name, monkeypatch, tmp_path)
    manifest = make(tag)
    found = logits(manifest, tmp_path / "home")
    for tensor in read_header(tmp_path / "home/models/odd" / tag / DENSE).values():
        assert tensor.dtype == "U8" or tensor.offset % TORCH_DTYPE[tensor.dtype].itemsize == 0
    with monkeypatch.context() as patch:  # the order of version 0.1, which models on disk have
        patch.setattr(shard_writer, "ITEM_BYTES", defaultdict(int))
        manifest = make(tag)
    tensors = read_header(tmp_path / "home/models/odd" / tag / DENSE).values()
    assert any(tensor.dtype == "F32" and tensor.offset % 4 for tensor in tensors)
    assert torch.equal(logits(manifest, tmp_path / "home"), found)


def test_pull_opens_what_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = odd("glm4", monkeypatch, tmp_path)

    def renamed(wanted: dict[str, Slice], dtype: str) -> tuple[bytes, list[str]]:
        header, order = dense_header(wanted, dtype)
        return header.replace(b'"model.norm.weight"', b'"model.mron.weight"'), order

    with monkeypatch.context() as patch:
        patch.setattr(shard_writer, "dense_header", renamed)
        with pytest.raises(ModelDataError, match=r"lacks model\.norm\.weight"):
            make("q8")
    assert not Library(Settings(tmp_path / "home")).installed()
