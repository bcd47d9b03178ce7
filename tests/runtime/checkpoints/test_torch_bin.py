"""`.bin` files: tables are read without loading, and pickles that execute code are refused."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint, blocks
from moeinf.runtime.checkpoints.torch_bin import open_folder, read_torch_file


def test_every_byte_is_where_the_table_says(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    whole = torch.randn(10, 4, generator=random)
    tensors = {
        "a": torch.randn(3, 5, generator=random),
        "b": torch.randn(7, generator=random).bfloat16(),
        "c": torch.randn(2, 2, generator=random).half(),
        "rows": whole[4:6],  # shares a storage with `whole`
        "whole": whole,
    }
    torch.save(tensors, tmp_path / "x.bin")
    found = read_torch_file(tmp_path / "x.bin")
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        assert b"".join(blocks(found[name], found[name].dtype)) == raw
        assert found[name].shape == tuple(tensor.shape)


class Canary:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch canary-ran",)


def test_a_pickle_that_would_run_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Canary()}, "evil.bin")
    (tmp_path / "plain.bin").write_bytes(pickle.dumps(Canary()))
    with pytest.raises(BadCheckpoint, match=r"evil\.bin holds more than tensors"):
        read_torch_file(tmp_path / "evil.bin")
    with pytest.raises(BadCheckpoint, match=r"plain\.bin is not a PyTorch zip file"):
        read_torch_file(tmp_path / "plain.bin")
    assert not (tmp_path / "canary-ran").exists()


def test_other_things_that_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(3, 4).T}, tmp_path / "transposed.bin")
    torch.save({"a": torch.zeros(3, dtype=torch.int64)}, tmp_path / "integers.bin")
    torch.save([torch.zeros(3)], tmp_path / "list.bin")
    torch.save({"a": torch.zeros(300)}, tmp_path / "whole.bin")
    cut = (tmp_path / "whole.bin").read_bytes()[:-200]
    (tmp_path / "cut.bin").write_bytes(cut)
    with (
        zipfile.ZipFile(tmp_path / "whole.bin") as source,
        zipfile.ZipFile(tmp_path / "packed.bin", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in source.infolist():
            packed.writestr(entry.filename, source.read(entry))
    for name, words in {
        "transposed": "does not lie in one piece",
        "integers": "is not a float tensor",
        "list": "does not hold a state dict",
        "cut": "is not a PyTorch zip file",
        "packed": "is compressed",
        "absent": "is missing",
    }.items():
        with pytest.raises(BadCheckpoint, match=words):
            read_torch_file(tmp_path / f"{name}.bin")


def test_a_folder_of_bin_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-1.bin")
    torch.save({"b": torch.ones(3)}, tmp_path / "pytorch_model-2.bin")
    names = {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    found = open_folder(tmp_path).tensors
    assert {name: (t.shape, t.path.name) for name, t in found.items()} == {
        "a": ((2,), "pytorch_model-1.bin"),
        "b": ((3,), "pytorch_model-2.bin"),
    }
    index.write_text(json.dumps({"weight_map": {"a": "../x.bin"}}))
    with pytest.raises(BadCheckpoint, match="names an invalid file"):
        open_folder(tmp_path)
    index.unlink()
    with pytest.raises(BadCheckpoint, match="neither"):
        open_folder(tmp_path)
