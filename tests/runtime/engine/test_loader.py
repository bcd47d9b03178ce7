"""Read the dense weights in pieces of any form, without errors."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moeinf.models.base import ModelDataError
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine import loader
from moeinf.runtime.engine.loader import DenseWeights, LoadProgress
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import DENSE, DamagedModel, Manifest
from moeinf.runtime.machine.measurements import DEFAULT_READING


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_PIECE", 3 * 4096)


def _demo(home: Path) -> tuple[Manifest, Path]:
    return Library(Settings(home)).read("demo:bf16")


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("direct", [None, False, True])
def test_pieces_make_the_whole(demo_home: Path, direct: bool | None) -> None:
    manifest, folder = _demo(demo_home)
    assert manifest.file(DENSE).data_bytes > 10 * 3 * 4096  # many pieces
    config, progress = EngineConfig(direct_io=direct), LoadProgress()
    weights = DenseWeights(folder, manifest, config, DEFAULT_READING, progress=progress)
    size = manifest.file(DENSE).data_bytes
    assert progress == LoadProgress(size, size)
    for name, expected in load_file(folder / DENSE).items():
        assert torch.equal(weights.tensor(name, *expected.shape), expected)
    with pytest.raises(ModelDataError, match=r"lacks nothing of shape \[3\]"):
        weights.tensor("nothing", 3)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("damage", ["first", "last", "short"])
def test_damage_anywhere_is_found(demo_home: Path, tmp_path: Path, damage: str) -> None:
    manifest, folder = _demo(demo_home)
    shutil.copytree(folder, tmp_path / "demo")
    path = tmp_path / "demo" / DENSE
    data = bytearray(path.read_bytes())
    if damage == "short":
        del data[-1]
    else:
        data[4096 if damage == "first" else -1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedModel, match=r"demo:bf16: .*dense\.safetensors"):
        DenseWeights(tmp_path / "demo", manifest, EngineConfig(), DEFAULT_READING)
