"""Pull GGUF files: the answers of the checkpoint, tags, splits, changes and refusals."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from moeinf.models.families import family_of
from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint, open_checkpoint
from moeinf.runtime.checkpoints.inventory import take_inventory
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.gguf.checkpoint import open_gguf
from moeinf.runtime.hub.resolve import find_source
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.library.repacking.repack import repack
from moeinf.runtime.library.verify import LocalRepair, repair, verify
from scripts.make_checkpoint import byte_tokenizer
from tests.conftest import endless, ignore
from tests.conftest import pull as pull_folder
from tests.generating import answering
from tests.gguf_files import float32, matrices, write_gguf
from tests.runtime.gguf.test_architectures import stored
from tests.tiny import save_tiny, tiny_reference
from tests.tiny_mxfp4 import save_mxfp4


def pull(path: Path, settings: Settings, notes: list[str] | None = None) -> Manifest:
    """Pull a file like `moeinf pull`; collect the notes."""
    name, source = find_source(str(path), None, settings, ignore)
    return repack(source, Library(settings), name, ignore, (notes or []).append)


def contents(manifest: Manifest) -> dict[str, str]:
    weights = [f for f in manifest.files if not f.path.endswith((".json", ".jinja"))]
    return {file.path: file.sha256 for file in weights}


@pytest.mark.parametrize("split", [0, 25])
def test_the_demo_in_a_file_is_the_demo(split: int, tmp_path: Path) -> None:
    settings = Settings(tmp_path / "home")
    path = write_gguf(DEMO_CHECKPOINT, tmp_path / "x.gguf", matrices(Kind.BF16), split)
    name, source = find_source(f"{path}", "x:bf16", settings, ignore)
    ours = repack(source, Library(settings), name, ignore, ignore)
    theirs = pull_folder(DEMO_CHECKPOINT, settings, "y:bf16")
    assert contents(ours) == contents(theirs)
    assert ours.source == str(path)
    again = find_source(f"{path}", "x:bf16", settings, ignore)[1]
    assert Library(settings).made_of(name, again.origin, again.revision) == ours
    os.utime(path, (1, 1))
    changed = find_source(f"{path}", "x:bf16", settings, ignore)[1]
    assert Library(settings).made_of(name, changed.origin, changed.revision) is None


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3", "qwen3.5", "gpt-oss"])
def test_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "x", seed=3, dtype=torch.float32)
    byte_tokenizer().save(str(tmp_path / "x" / "tokenizer.json"))
    write_gguf(tmp_path / "x", tmp_path / "tiny.gguf")
    settings = Settings(tmp_path / "home")
    named, source = find_source(str(tmp_path / "tiny.gguf"), "tiny:f32", settings, ignore)
    manifest = repack(source, Library(settings), named, ignore, ignore)
    model = tiny_reference(name, seed=3)
    prompt = [(7 * i + 3) % model.config.vocab_size for i in range(23)]
    expected = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=20, eos_token_id=None
    )[0, len(prompt) :].tolist()
    folder = Library(settings).folder(manifest.model)
    with Engine.open(manifest, folder, EngineConfig(), settings) as engine:
        endless(engine)
        answer = answering(engine, prompt, 20)
        list(answer)
        assert answer.tokens == expected


@pytest.mark.parametrize(
    ("kind", "tag", "noted"),
    [
        (Kind.Q4_0, "q4", False),
        (Kind.Q8_0, "q8", False),
        (Kind.Q5_0, "q8", True),
        (Kind.Q4_1, "q8", True),
        (Kind.BF16, "q4", False),
    ],
)
def test_the_tag_follows_the_file(kind: Kind, tag: str, noted: bool, tmp_path: Path) -> None:
    path = write_gguf(DEMO_CHECKPOINT, tmp_path / "x.gguf", matrices(kind))
    notes = ["first"]
    manifest = pull(path, Settings(tmp_path / "home"), notes)
    assert manifest.tag == tag
    assert any(kind.name in note for note in notes) is noted


def test_mxfp4_of_a_file_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    save_mxfp4(tmp_path / "x")
    byte_tokenizer().save(str(tmp_path / "x" / "tokenizer.json"))
    path = write_gguf(tmp_path / "x", tmp_path / "x.gguf")
    ours, theirs = open_gguf(path), open_checkpoint(tmp_path / "x")
    assert take_inventory(family_of(ours.config), ours).has_mxfp4
    assert stored(ours, "MXFP4") == stored(theirs, "MXFP4")
    for file, data in stored(theirs).items():  # equal, but the package has no -0.0
        found = np.frombuffer(stored(ours)[file], np.float32)
        assert np.array_equal(found, np.frombuffer(data, np.float32))
    assert pull(path, Settings(tmp_path / "home")).tag == "mxfp4"


def test_an_interrupted_pull_goes_on(tmp_path: Path) -> None:
    settings, calls = Settings(tmp_path / "home"), 0
    path = write_gguf(DEMO_CHECKPOINT, tmp_path / "x.gguf", matrices(Kind.Q8_0), split=30)
    whole = pull(path, Settings(tmp_path / "other"))

    def stop(phase: str, done: int, total: int) -> None:
        nonlocal calls
        calls += phase == "repacking" and done > total // 2
        if calls == 1:
            raise KeyboardInterrupt

    name, source = find_source(str(path), None, settings, ignore)
    with pytest.raises(KeyboardInterrupt):
        repack(source, Library(settings), name, stop, ignore)
    starts: list[int] = []
    repack(source, Library(settings), name, lambda _, done, total: starts.append(done), ignore)
    assert starts[0] > 0
    assert contents(Library(settings).read(str(name))[0]) == contents(whole)


def test_a_damaged_file_of_the_model_is_repaired(tmp_path: Path) -> None:
    settings = Settings(tmp_path / "home")
    path = write_gguf(DEMO_CHECKPOINT, tmp_path / "x.gguf", matrices(Kind.Q8_0))
    manifest = pull(path, settings)
    folder = Library(settings).folder(manifest.model)
    for name in ("tokenizer.json", "dense.safetensors"):
        (folder / name).write_bytes(b"damaged")
    damages = verify(folder, manifest, ignore)
    assert len(damages) == 2
    repair(folder, manifest, damages, LocalRepair(open_gguf(path)), ignore)
    assert verify(folder, manifest, ignore) == []


def test_other_models_are_refused(tmp_path: Path) -> None:
    whole = write_gguf(DEMO_CHECKPOINT, tmp_path / "x.gguf", float32).read_bytes()
    for old, new in ((b"olmoe", b"bloom"), (b"olmoe.expert_count", b"olmoe.expert_mount")):
        (tmp_path / "y.gguf").write_bytes(whole.replace(old, new))
        with pytest.raises(BadCheckpoint):
            open_gguf(tmp_path / "y.gguf")
