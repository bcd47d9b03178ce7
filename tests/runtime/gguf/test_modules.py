"""Modules of multi-token prediction of a GGUF file are those of its checkpoint, and draft."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file as load

from moeinf.models.families import family_of
from moeinf.runtime.checkpoints.checkpoint import Checkpoint, open_checkpoint
from moeinf.runtime.checkpoints.inventory import take_inventory
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.engine.mtp_engine import MtpEngine
from moeinf.runtime.gguf.checkpoint import checkpoint_of, open_gguf
from moeinf.runtime.gguf.reader import read_gguf
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.library.repacking.repack import repack
from moeinf.runtime.library.sources import LocalSource
from moeinf.runtime.library.verify import verify
from moeinf.runtime.names import parse_name
from tests.conftest import endless, ignore
from tests.generating import answering
from tests.gguf_files import matrices, write_gguf
from tests.tiny_modules import add_second, checkpoint

FAMILIES = ["deepseek-v3", "glm4", "qwen3.5", "qwen3-next"]
PROMPT = [1 + 7 * n % 40 for n in range(24)]


def pulled(opened: Checkpoint, home: Path, tag: str, mtp: bool = True) -> tuple[Manifest, Path]:
    library, name = Library(Settings(home)), parse_name(f"tiny:{tag}")
    manifest = repack(LocalSource(opened, "x"), library, name, ignore, ignore, mtp=mtp)
    return manifest, library.folder(name)


def weights(folder: Path) -> dict[str, np.ndarray]:
    """Return all tensors of the modules by file and name."""
    return {
        f"{path.relative_to(folder)}/{name}": values
        for path in sorted((folder / "mtp").rglob("*.safetensors"))
        for name, values in load(path).items()
    }


def heard(manifest: Manifest, folder: Path, home: Path) -> tuple[list[int], list[int]]:
    """Return a greedy answer, and what the module predicts after each of 8 beginnings."""
    with Engine.open(manifest, folder, EngineConfig(context=64), Settings(home)) as engine:
        draft, found = engine.draft, list[int]()
        assert isinstance(draft, MtpEngine) == (manifest.mtp is not None)
        for size in range(16, 24) if draft is not None else ():
            assert draft is not None
            engine.extend(engine.new_state(), PROMPT[: size - 1])
            found.append(draft.extend(draft.text(PROMPT[:size]), lambda: False)[0])
        endless(engine)
        answer = answering(engine, PROMPT, 30)
        list(answer)
        return list(answer.tokens), found


@pytest.mark.parametrize("name", FAMILIES)
def test_a_files_module_is_the_checkpoints(name: str, tmp_path: Path) -> None:
    checkpoint(name, tmp_path / "x")
    file = write_gguf(tmp_path / "x", tmp_path / "x.gguf")
    both = [
        pulled(opened, tmp_path / number, "f32")
        for number, opened in (("a", open_checkpoint(tmp_path / "x")), ("b", open_gguf(file)))
    ]
    (theirs, folder), (ours, place) = both
    assert ours.modules is not None
    assert theirs.modules is not None
    assert (ours.modules.layers, ours.modules.experts) == (1, ours.experts)
    mine, others = weights(place), weights(folder)
    assert mine.keys() == others.keys()
    for file_name, values in others.items():  # Qwen's norms were stored plus 1, which rounds
        rounds = name.startswith("qwen") and "norm" in file_name
        np.testing.assert_allclose(mine[file_name], values, rtol=0, atol=1e-6 * rounds)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_files_module_drafts(name: str, tmp_path: Path) -> None:
    checkpoint(name, tmp_path / "x")
    file = write_gguf(tmp_path / "x", tmp_path / "x.gguf")
    found = []
    for home, opened in (("a", open_checkpoint(tmp_path / "x")), ("b", open_gguf(file))):
        found.append(heard(*pulled(opened, tmp_path / home, "bf16"), tmp_path / home))
    assert found[0] == found[1]
    assert len(set(found[0][1])) > 1
    alone, folder = pulled(open_gguf(file), tmp_path / "c", "bf16", mtp=False)
    assert alone.mtp is None
    assert heard(alone, folder, tmp_path / "c") == (found[0][0], [])


@pytest.mark.parametrize("tag", ["q8", "bf16"])
def test_a_quantised_file(tag: str, tmp_path: Path) -> None:
    """Its module gets the tag of the model, and passes a check of all files."""
    checkpoint("glm4", tmp_path / "x")
    file = write_gguf(tmp_path / "x", tmp_path / "x.gguf", matrices(Kind.Q8_0))
    manifest, folder = pulled(open_gguf(file), tmp_path, tag)
    assert manifest.modules is not None
    assert manifest.modules.dtype == manifest.dtype
    assert len(manifest.modules.shards()) == manifest.experts
    assert verify(folder, manifest, ignore) == []


def test_two_modules(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    checkpoint("glm4", folder)
    add_second(folder)
    opened = open_gguf(write_gguf(folder, tmp_path / "x.gguf"))
    assert opened.config["num_nextn_predict_layers"] == 2
    (theirs, _), (ours, _) = (
        pulled(o, tmp_path / str(n), "f32") for n, o in enumerate((open_checkpoint(folder), opened))
    )
    assert ours.modules is not None
    assert ours.modules.layers == 2
    assert theirs.modules is not None
    assert ours.modules.files == theirs.modules.files


@pytest.mark.parametrize("lacks", ["nextn.eh_proj.", "nextn.hnorm.", "ffn_up_exps."])
def test_a_module_without_all_its_tensors(lacks: str, tmp_path: Path) -> None:
    """A file whose maker left the module out has the key still; no other one is complete."""
    checkpoint("glm4", tmp_path / "x")
    file = read_gguf(write_gguf(tmp_path / "x", tmp_path / "x.gguf"))
    layers = json.loads((tmp_path / "x/config.json").read_text())["num_hidden_layers"]
    last = f"blk.{layers}.{lacks}"
    kept = {name: one for name, one in file.tensors.items() if not name.startswith(last)}
    assert len(kept) == len(file.tensors) - 1
    opened = checkpoint_of(replace(file, tensors=kept))
    alone = lacks == "nextn.eh_proj."
    assert opened.config["num_nextn_predict_layers"] == (0 if alone else 1)
    inventory = take_inventory(family_of(opened.config), opened)
    assert inventory.mtp is None
    assert bool(inventory.unused) != alone
