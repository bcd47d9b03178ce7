"""The modules of multi-token prediction are kept at pull, as a small model of their own."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeinf.models.base import MoeShape
from moeinf.models.families import family_of
from moeinf.runtime.checkpoints.checkpoint import open_checkpoint
from moeinf.runtime.checkpoints.inventory import take_inventory
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.engine.mtp_engine import MtpEngine
from moeinf.runtime.library.dense_views import read_dense_header
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import MANIFEST, DamagedModel, Manifest, read_manifest
from moeinf.runtime.library.repacking.repack import measure_source, repack
from moeinf.runtime.library.sources import LocalSource
from moeinf.runtime.library.verify import LocalRepair, repair, verify
from moeinf.runtime.names import parse_name
from tests.conftest import endless, ignore
from tests.generating import answering
from tests.runtime.checkpoints.quantised.test_fp8 import FP8, quantise, write_config
from tests.tiny_modules import add_second, checkpoint

FAMILIES = ["deepseek-v3", "glm4", "qwen3-next", "qwen3.5"]
JOINED = {"embedding_norm", "hidden_norm", "joining", "norm"}


def pulled(
    folder: Path, home: Path, tag: str = "q4", mtp: bool = True
) -> tuple[Manifest, Path, list[str]]:
    """Return the manifest, the model's folder and the notes of a pull."""
    notes: list[str] = []
    library = Library(Settings(home))
    source = LocalSource(open_checkpoint(folder), str(folder))
    name = parse_name(f"tiny:{tag}")
    manifest = repack(source, library, name, ignore, notes.append, mtp=mtp)
    return manifest, library.folder(name), notes


def parts(folder: Path, inside: str) -> dict[str, tuple[int, ...]]:
    tensors = read_dense_header(folder / inside / "dense.safetensors").tensors
    return {name: tensor.shape for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_module_is_kept_with_its_experts(name: str, tmp_path: Path) -> None:
    layer = checkpoint(name, tmp_path / "checkpoint")
    manifest, folder, notes = pulled(tmp_path / "checkpoint", tmp_path)
    modules = manifest.modules
    assert modules is not None
    assert (modules.layers, modules.experts) == (1, manifest.experts)
    assert read_manifest(folder) == manifest
    assert any("--no-mtp" in note for note in notes)
    # Its block is the copied layer: the same tensors, and the same experts.
    prefix = f"model.layers.{layer}."
    copied = {
        n.removeprefix(prefix): shape
        for n, shape in parts(folder, "").items()
        if n.startswith(prefix)
    }
    own = parts(folder, "mtp")
    assert copied == {
        n.removeprefix("model.layers.0."): shape
        for n, shape in own.items()
        if n.startswith("model.layers.0.")
    }
    assert {n for n in own if not n.startswith("model.")} == {
        f"mtp.0.{part}.weight" for part in JOINED
    }
    dense = manifest.layers if name.startswith("qwen") else layer + 1
    flat = manifest.layers - (dense - layer)
    mine = [s for s in manifest.shards() if f"/L{flat:03d}/" in s.path]
    assert [s.crc32c for s in modules.shards()] == [s.crc32c for s in mine]
    assert len(mine) == manifest.experts
    assert manifest.size_bytes > sum(file.size_bytes for file in modules.files) > 0


def test_a_dense_network_is_the_modules_only_expert(tmp_path: Path) -> None:
    checkpoint("mimo", tmp_path / "checkpoint")
    (path,) = (tmp_path / "checkpoint").glob("*.safetensors")
    tensors = load_file(path)
    other = {n.replace("mtp.layers.0.", "mtp.layers.1."): t.clone() for n, t in tensors.items()}
    save_file({**other, **tensors}, path, metadata={"format": "pt"})  # the second one is left
    manifest, folder, notes = pulled(tmp_path / "checkpoint", tmp_path)
    modules = manifest.modules
    assert modules is not None
    width = json.loads((tmp_path / "checkpoint" / "config.json").read_text())["intermediate_size"]
    assert (modules.layers, modules.experts, modules.top_k, modules.intermediate) == (
        1,
        1,
        1,
        width,
    )
    assert manifest.experts > 1 < manifest.top_k
    assert read_manifest(folder) == manifest
    assert len(modules.shards()) == 1
    assert {n for n in parts(folder, "mtp") if not n.startswith("model.")} == {
        f"mtp.0.{part}.weight" for part in JOINED
    }
    assert "model.layers.0.self_attn.sinks" in parts(folder, "mtp")
    assert not any("left out" in note for note in notes)


def test_two_modules_are_kept_and_the_first_one_drafts(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    checkpoint("deepseek-v3", folder)
    add_second(folder)
    manifest, inside, notes = pulled(folder, tmp_path, "bf16")
    modules = manifest.modules
    assert modules is not None
    assert (modules.layers, len(modules.shards())) == (2, 2 * manifest.experts)
    assert read_manifest(inside) == manifest
    assert not any("left out" in note for note in notes)
    own = load_file(inside / "mtp" / "dense.safetensors")
    norms = [own[f"mtp.{n}.embedding_norm.weight"] for n in range(2)]
    assert torch.equal(norms[1], 2 * norms[0])
    blocks = [{n for n in own if n.startswith(f"model.layers.{k}.")} for k in range(2)]
    assert {n.replace(".0.", ".1.", 1) for n in blocks[0]} == blocks[1] != set()
    checkpoint("deepseek-v3", tmp_path / "one")
    alone, place, _ = pulled(tmp_path / "one", tmp_path / "other", "bf16")
    drafted, text = [], [(7 + 31 * place) % 97 for place in range(24)]
    for model, where in ((manifest, inside), (alone, place)):
        with Engine.open(model, where, EngineConfig(context=64), Settings(tmp_path)) as engine:
            draft = engine.draft
            assert isinstance(draft, MtpEngine)
            engine.extend(engine.new_state(), text[:-1])
            drafted.append(draft.extend(draft.text(text), lambda: False))
    assert drafted[0] == drafted[1]


@pytest.mark.parametrize("tag", ["f32", "q8"])
def test_modules_in_blocks_of_8_bits(tag: str, tmp_path: Path) -> None:
    """In DeepSeek-V3's release, matrices of the module's block are FP8, too."""
    folder = tmp_path / "fp8"
    layer = checkpoint("deepseek-v3", folder) + 1
    shutil.copytree(folder, tmp_path / "wide")
    (path,) = folder.glob("*.safetensors")
    tensors, meaning = load_file(path), {}
    for name, tensor in list(tensors.items()):
        meaning[name] = tensor
        if name.endswith("_proj.weight") and ("self_attn" in name or ".mlp." in name):
            raw, scales, meaning[name] = quantise(tensor)
            tensors |= {name: raw, f"{name}_scale_inv": scales}
    assert tensors[f"model.layers.{layer}.mlp.experts.0.up_proj.weight"].dtype != torch.float32
    save_file(tensors, path, metadata={"format": "pt"})
    save_file(meaning, tmp_path / "wide" / path.name, metadata={"format": "pt"})
    write_config(folder, quantization_config=FP8)
    found = []
    for name in ("fp8", "wide"):
        manifest, _, notes = pulled(tmp_path / name, tmp_path / f"home-{name}", tag)
        assert not any("left out" in note for note in notes)
        assert manifest.modules is not None
        assert len(manifest.modules.shards()) == manifest.experts
        weights = [*manifest.files, *manifest.modules.files]
        found.append({(f.path, f.sha256) for f in weights if f.path.endswith("tensors")})
    assert found[0] == found[1]


def test_mimos_module_as_published() -> None:
    path = Path(__file__).parents[2] / "data" / "configs.json"
    values = json.loads(path.read_text("utf-8"))["XiaomiMiMo/MiMo-V2-Flash"]
    family = family_of(values)
    modules = family.mtp(family.parse(values))
    assert modules is not None
    own = modules.parse(values)
    assert own.moe == MoeShape(layers=1, experts=1, top_k=1, hidden=4096, intermediate=16384)
    assert (own.attention[0].kv_heads, own.body.rope.theta) == (8, 1e4)
    assert modules.ignores("model.mtp.layers.1.enorm.weight", own)
    assert not modules.ignores("model.mtp.layers.0.enorm.weight", own)


@pytest.mark.parametrize("name", ["glm4", "mimo"])
def test_answers_do_not_depend_on_it(name: str, tmp_path: Path) -> None:
    checkpoint(name, tmp_path / "checkpoint")
    answers, sizes = [], []
    for mtp in (True, False):
        home = tmp_path / str(mtp)
        manifest, folder, notes = pulled(tmp_path / "checkpoint", home, "q8", mtp)
        assert (manifest.mtp is not None) == mtp == (folder / "mtp").exists()
        assert ("mtp" in (folder / MANIFEST).read_text()) == mtp
        assert not any("left out" in note for note in notes)
        sizes.append((manifest.size_bytes, manifest.dense_bytes, manifest.kv_bytes_per_token))
        with Engine.open(manifest, folder, EngineConfig(context=64), Settings(home)) as engine:
            endless(engine)
            answer = answering(engine, [1, 2, 3, 4], 20)
            list(answer)
            answers.append(answer.tokens)
    assert answers[0] == answers[1]
    assert sizes[0][1:] == sizes[1][1:]
    assert sizes[0][0] > sizes[1][0]
    source = LocalSource(open_checkpoint(tmp_path / "checkpoint"), "")
    for mtp, (size, _, _) in zip((True, False), sizes, strict=True):
        assert 0.5 * size < measure_source(source, mtp).disk_bytes["q8"] < 2 * size


def test_a_module_that_is_incomplete_is_left_out(tmp_path: Path) -> None:
    checkpoint("glm4", tmp_path / "checkpoint")
    (path,) = (tmp_path / "checkpoint").glob("*.safetensors")
    tensors = load_file(path)
    del tensors[next(name for name in tensors if name.endswith("eh_proj.weight"))]
    save_file(tensors, path, metadata={"format": "pt"})
    manifest, folder, notes = pulled(tmp_path / "checkpoint", tmp_path)
    assert manifest.mtp is None
    assert not (folder / "mtp").exists()
    assert any(re.search("left out: model.layers.[0-9]+.*more", note) for note in notes)


def test_a_config_without_modules(tmp_path: Path) -> None:
    checkpoint("qwen3.5", tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "config.json"
    values = json.loads(path.read_text())
    for changes in ({"mtp_num_hidden_layers": 0}, {"mtp_use_dedicated_embeddings": True}):
        path.write_text(json.dumps({**values, **changes}))
        opened = open_checkpoint(tmp_path / "checkpoint")
        inventory = take_inventory(family_of(opened.config), opened)
        assert (inventory.mtp, inventory.unused) == (None, [])


def test_verify_and_repair(tmp_path: Path) -> None:
    checkpoint("deepseek-v3", tmp_path / "checkpoint")
    manifest, folder, _ = pulled(tmp_path / "checkpoint", tmp_path)
    for name in ("mtp/dense.safetensors", "mtp/experts/L000/E002.safetensors"):
        data = bytearray((folder / name).read_bytes())
        data[-1] ^= 1
        (folder / name).write_bytes(data)
    damages = verify(folder, manifest, ignore)
    assert len(damages) == 2
    source = LocalRepair(open_checkpoint(tmp_path / "checkpoint"))
    repair(folder, manifest, damages, source, ignore)
    assert verify(folder, manifest, ignore) == []


def test_a_manifest_that_contradicts_its_modules(tmp_path: Path) -> None:
    checkpoint("glm4", tmp_path / "checkpoint")
    _, folder, _ = pulled(tmp_path / "checkpoint", tmp_path)
    good = json.loads((folder / MANIFEST).read_text())
    for field, value in (("layers", 2), ("dtype", "Q8"), ("layout", 99)):
        (folder / MANIFEST).write_text(json.dumps({**good, "mtp": {**good["mtp"], field: value}}))
        with pytest.raises(DamagedModel):
            read_manifest(folder)
    shutil.rmtree(folder / "mtp")
