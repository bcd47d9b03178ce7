"""GGUF's NVFP4 with its factors: kept without loss, widened, exported, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader

from moeinf.models.families import family_of
from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint
from moeinf.runtime.checkpoints.inventory import take_inventory
from moeinf.runtime.config import Settings
from moeinf.runtime.gguf.checkpoint import open_gguf
from moeinf.runtime.gguf.writing.description import CannotExport
from moeinf.runtime.hub.resolve import find_source
from moeinf.runtime.jobs.export_gguf import export_gguf
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.repacking.repack import in_tag, repack
from tests.conftest import ignore
from tests.exported import checkpoint
from tests.gguf_files import matrices, write_gguf
from tests.gguf_wide import widened
from tests.runtime.gguf.test_architectures import stored
from tests.runtime.gguf.test_kept_types import all_bytes
from tests.runtime.gguf.test_pulls import contents, pull
from tests.tiny_packed import compressed, nvfp4, save_packed


def written(name: str, folder: Path) -> Path:
    """Write a family's checkpoint as llama.cpp's converter writes NVFP4."""
    made = checkpoint(name, folder / "checkpoint")
    return write_gguf(made, folder / f"{name}.gguf", matrices(Kind.NVFP4))


def full(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.full)


# Rows in another order; two factors in one tensor; value heads; a matrix that is computed.
@pytest.mark.parametrize(
    "name", ["granite-shared", "qwen3.5", *map(full, ("qwen3", "mixtral", "deepseek-lite"))]
)
def test_weights_are_those_of_gguf_times_the_factor(name: str, tmp_path: Path) -> None:
    file = written(name, tmp_path)
    opened = open_gguf(file)
    assert stored(opened) == stored(open_gguf(widened(file)))
    inventory, form = in_tag(take_inventory(family_of(opened.config), opened), "nvfp4")
    assert form == "NVFP4"
    found = all_bytes(inventory, form)
    assert sum(form == "NVFP4" for form, _, _ in found) > len(found) / 2
    for form, kept, wide in found:
        assert form != "NVFP4" or torch.equal(kept, wide)


def tensors(file: Path) -> dict[str, tuple[Kind, bytes]]:
    """Return type and bytes of the matrices and their factors, by name."""
    return {
        tensor.name: (tensor.tensor_type, tensor.data.tobytes())
        for tensor in GGUFReader(file).tensors
        if tensor.tensor_type == Kind.NVFP4 or tensor.name.endswith(".scale")
    }


def exported(manifest: Any, settings: Settings, file: Path) -> Path:
    export_gguf(
        Library(settings).folder(manifest.model), manifest, file, ignore, ignore, force=False
    )
    return file


def test_exported_and_pulled_again(tmp_path: Path) -> None:
    """The file has the bytes of llama.cpp's converter, but for an embedding without a factor."""
    file, settings, notes = written("qwen3", tmp_path), Settings(tmp_path / "home"), ["first"]
    manifest = pull(file, settings, notes)
    assert (manifest.tag, manifest.dtype, notes) == ("nvfp4", "NVFP4", ["first"])
    again = exported(manifest, settings, tmp_path / "again.gguf")
    theirs = tensors(file)
    embedding = {name for name in theirs if name.startswith("token_embd.")}
    assert len(embedding) == 2
    ours = tensors(again)
    assert ours == {name: data for name, data in theirs.items() if name not in embedding}
    experts = [len(data) for name, (_, data) in ours.items() if name.endswith("_exps.scale")]
    assert experts == [4 * manifest.experts] * 3 * manifest.layers


@pytest.mark.parametrize("divides", [False, True])
def test_a_checkpoint_of_modelopt_exported_and_pulled_again(divides: bool, tmp_path: Path) -> None:
    form = "nvfp4-pack-quantized" if divides else "pack-quantized"
    config = compressed({"num_bits": 4, "type": "float", "strategy": "tensor_group"}, form=form)
    if not divides:
        config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    save_packed(
        tmp_path / "x",
        config,
        lambda name: nvfp4(divides) if ".experts." in name or "q_proj" in name else None,
        "qwen3_moe",
    )
    settings = Settings(tmp_path / "home")
    name, source = find_source(str(tmp_path / "x"), "x", settings, ignore)
    made = repack(source, Library(settings), name, ignore, ignore)
    assert made.tag == "nvfp4"
    file = exported(made, settings, tmp_path / "x.gguf")
    found = tensors(file)
    assert found["blk.0.attn_q.weight"][0] == Kind.NVFP4
    assert len(found["blk.0.ffn_down_exps.scale"][1]) == 4 * made.experts
    name, source = find_source(str(file), "y", settings, ignore)
    again = repack(source, Library(settings), name, ignore, ignore)
    assert again.tag == "nvfp4"
    assert contents(again) == contents(made)


def test_experts_whose_factor_llama_cpp_ignores(tmp_path: Path) -> None:
    file, settings = written("olmoe", tmp_path), Settings(tmp_path / "home")
    manifest = pull(file, settings)
    with pytest.raises(CannotExport, match="ignores the factor of NVFP4 experts in olmoe"):
        exported(manifest, settings, tmp_path / "again.gguf")
    assert not (tmp_path / "again.gguf").exists()


def renamed(file: Path, old: str, new: str) -> Path:
    """Change the name of a tensor, whose length stays."""
    data = file.read_bytes()
    assert len(old) == len(new)
    assert data.count(old.encode()) == 1
    file.write_bytes(data.replace(old.encode(), new.encode()))
    return file


def test_factors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    file = renamed(written("olmoe", tmp_path), "blk.0.attn_output.scale", "blk.0.attn_q_norm.scale")
    with pytest.raises(BadCheckpoint, match=r"attn_q_norm.scale' of .* shape \[1\] beside F32"):
        open_gguf(file)
    renamed(file, "blk.0.attn_q_norm.scale", "blk.0.attn_other0.scale")
    renamed(file, "blk.0.ffn_up_exps.scale", "blk.0.attn_output.scale")
    with pytest.raises(BadCheckpoint, match=r"attn_output.scale' of .* shape \[7\] beside NVFP4"):
        open_gguf(file)
