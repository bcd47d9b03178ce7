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
from moeinf.offload.format.layout import ITEM_BYTES, is_tiled, stored_bytes
from moeinf.offload.format.shards import padded_header
from moeinf.runtime.checkpoints.checkpoint import TORCH_DTYPE, BadCheckpoint, read_header
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.dense.cpu_backend import CpuMath
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.library.dense_views import DenseViews, read_dense_header
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import DENSE, Manifest
from moeinf.runtime.library.repacking import shard_writer
from moeinf.runtime.library.repacking.shard_writer import Slice, dense_header
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
        st.builds(
            Slice, st.sampled_from(["Q4", "Q8", "MXFP4"]), st.tuples(*[st.integers(1, 150)] * 2)
        ),
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
        assert start % (64 if (stop - start) % 64 == 0 else ITEM_BYTES.get(form, 32)) == 0
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


TILED = {
    "a.weight": Slice("MXFP4", (70, 45)),
    "b.weight": Slice("Q8", (70, 45)),
    "c.weight": Slice("Q4", (70, 45)),
    "d": Slice("BF16", (7,)),
}


def written(folder: Path, slices: dict[str, Slice]) -> Path:
    """Write a dense file of zeros."""
    header, _ = dense_header(slices, "Q4")
    size = sum(stored_bytes(*piece) for piece in slices.values())
    (folder / DENSE).write_bytes(header + bytes(size))
    return folder / DENSE


def views_of(path: Path) -> DenseViews:
    header, offset = read_dense_header(path), SHARD_DATA_OFFSET
    data = torch.frombuffer(bytearray(path.read_bytes()[offset:]), dtype=torch.uint8)
    buffer = data.clone()  # torch aligns it
    return DenseViews(header, buffer, offset, CpuMath())


def test_formats_are_named_where_sizes_do_not_tell_them_apart(tmp_path: Path) -> None:
    path = written(tmp_path, TILED)
    forms = {name: piece.form for name, piece in TILED.items() if is_tiled(piece.form)}
    assert read_dense_header(path).forms == forms
    views = views_of(path)
    assert {name: (views._tiles(name, 70, 45) or "")[1] for name in forms} == forms
    path = written(
        tmp_path, {n: p for n, p in TILED.items() if p.form != "MXFP4"}
    )  # as in models of the tags q4 and q8, also older ones
    assert read_dense_header(path).forms == {}
    views = views_of(path)
    assert [(views._tiles(f"{name}.weight", 70, 45) or "")[1] for name in "bc"] == ["Q8", "Q4"]


@pytest.mark.parametrize(
    "text",
    ['{"a.weight":"Q9"}', '{"a.weight":"BF16"}', '{"a.weight":1}', '["a.weight"]', "{", 7, None],
)
def test_hostile_names_of_formats(text: object, tmp_path: Path) -> None:
    path = written(tmp_path, {"a.weight": Slice("MXFP4", (64, 64))})
    raw = path.read_bytes()
    header = json.loads(raw[8:SHARD_DATA_OFFSET])
    header["__metadata__"]["forms"] = text
    path.write_bytes(padded_header(header, SHARD_DATA_OFFSET) + raw[SHARD_DATA_OFFSET:])
    with pytest.raises(BadCheckpoint, match="format"):
        read_dense_header(path)


def test_a_format_of_another_size_and_an_embedding_without_kernel(tmp_path: Path) -> None:
    path = written(tmp_path, {"a.weight": Slice("MXFP4", (64, 64))})
    with pytest.raises(ModelDataError, match=r"lacks a\.weight"):
        views_of(path).linear("a", 64, 128)
    with pytest.raises(ModelDataError, match=r"lacks a\.weight"):
        views_of(path).embedding("a", 64, 64)
    assert views_of(path).linear("a", 64, 64) is not None


def test_tiles_that_are_not_aligned_in_the_file_are_copied(tmp_path: Path) -> None:
    odd = Slice("MXFP4", (16, 64))  # one tile of 544 bytes
    views = views_of(written(tmp_path, {"a.weight": odd, "b.weight": odd, "c": Slice("F32", (3,))}))
    assert views._tensors["b.weight"].offset % 64 == 32
    for name in "ab":
        tiles, form = views._tiles(f"{name}.weight", 16, 64) or pytest.fail("not found")
        assert (form, len(tiles), tiles.data_ptr() % 64) == ("MXFP4", 544, 0)
    assert views.tensor("c", 3).tolist() == [0, 0, 0]
