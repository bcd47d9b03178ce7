"""Models whose layers and dense tensors have formats of their own, as an importer sets them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from moeinf.models.base import Family
from moeinf.models.families import family_of
from moeinf.offload.format.layout import ExpertForms
from moeinf.runtime.checkpoints import inventory as inventories
from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint, Checkpoint, open_checkpoint
from moeinf.runtime.checkpoints.inventory import Forms, Inventory, take_inventory
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.library import verify
from moeinf.runtime.library.clone import copy_model
from moeinf.runtime.library.dense_views import DenseViews
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.library.manifest import DENSE, Manifest, read_manifest
from moeinf.runtime.library.repacking import repack
from moeinf.runtime.sizes import parse_memory
from scripts.make_checkpoint import byte_tokenizer
from tests.conftest import ignore, pull
from tests.runtime.engine.test_quantised_families import TOLERANCE, Routed, logits, reference
from tests.tiny import save_tiny

PAIRS = (ExpertForms("Q4", "Q8"), ExpertForms("Q4", "Q4"), ExpertForms("Q8", "Q8"))


class Made(NamedTuple):
    """A pulled model with layers of several formats."""

    manifest: Manifest
    settings: Settings
    checkpoint: Path
    forms: Forms

    @property
    def folder(self) -> Path:
        return Library(self.settings).folder(self.manifest.model)

    def logits(self, memory: str, ids: list[int]) -> torch.Tensor:
        """Return the logits of a prompt and of single tokens after it."""
        config = EngineConfig(memory=parse_memory(memory), threads=1)
        with Engine.open(self.manifest, self.folder, config, self.settings) as engine:
            return logits(engine.model, engine.store, ids, engine.new_state())


@pytest.fixture(params=["demo", "gpt-oss"])
def made(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    folder, settings = DEMO_CHECKPOINT, Settings(tmp_path / "home")
    if request.param != "demo":
        folder = tmp_path / "checkpoint"
        save_tiny(request.param, folder, 3, torch.bfloat16)
        byte_tokenizer().save(str(folder / "tokenizer.json"))
    checkpoint = open_checkpoint(folder)
    plain = take_inventory(family_of(checkpoint.config), checkpoint)
    every = [PAIRS[layer % len(PAIRS)] for layer in range(plain.moe.layers)]
    swapped = {n: "Q8" for n in plain.tileable if n.endswith(("o_proj.weight", "v_proj.weight"))}
    forms = Forms(tuple(every), {**swapped, **dict.fromkeys(plain.embeddings, "Q4")})

    def with_forms(family: Family, checkpoint: Checkpoint, _mtp: bool = True) -> Inventory:
        return replace(take_inventory(family, checkpoint), forms=forms)

    for module in (repack, verify):  # as the reader of such a checkpoint does
        monkeypatch.setattr(module, "take_inventory", with_forms)
    return Made(pull(folder, settings, "mixed:q4"), settings, folder, forms)


def ids_of(made: Made) -> list[int]:
    vocab = json.loads((made.checkpoint / "config.json").read_text())["vocab_size"]
    return [(11 * i + 5) % vocab for i in range(40)]


def test_residency_never_chooses_the_result(made: Made) -> None:
    ids, least = ids_of(made), str(made.manifest.slots.min_bytes)
    wanted = made.logits("100%", ids)
    for memory in ("50%", least):
        assert torch.equal(made.logits(memory, ids), wanted)


def test_near_the_widened_weights(made: Made) -> None:
    ids, plain = ids_of(made), reference(made.checkpoint, "q4", made.forms)
    wanted = logits(*plain, ids, plain[0].new_state(len(ids)))
    config = EngineConfig(memory=parse_memory(str(made.manifest.slots.min_bytes)), threads=1)
    with Engine.open(made.manifest, made.folder, config, made.settings) as engine:
        found = logits(engine.model, Routed(engine.store, plain[1].routes), ids, engine.new_state())
    error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    typical = error.square().sort().values[: len(error) * 9 // 10].mean().sqrt()
    assert float(typical) < TOLERANCE


def test_its_files_are_read_back_repaired_and_copied(made: Made) -> None:
    manifest, folder = read_manifest(made.folder), made.folder
    assert manifest == made.manifest
    assert manifest.forms == made.forms.experts
    assert manifest.layouts == {"Q8": 2}
    sizes = [shard.data_bytes for shard in manifest.shards()]
    assert sizes == [layout.data_bytes for layout in manifest.expert_layouts]
    assert len(set(sizes)) == min(len(PAIRS), manifest.layers)
    assert manifest.slots.slot_bytes == max(x.slot_bytes for x in manifest.expert_layouts)
    assert manifest.dense_bytes == manifest.file(DENSE).data_bytes
    for name in ("experts/L001/E003.safetensors", DENSE):
        good = (folder / name).read_bytes()
        (folder / name).write_bytes(good[:5000] + b"x" + good[5001:])
        damages = verify.verify(folder, manifest, ignore)
        assert [damage.path for damage in damages] == [name]
        source = verify.LocalRepair(open_checkpoint(made.checkpoint))
        verify.repair(folder, manifest, damages, source, ignore)
        assert (folder / name).read_bytes() == good
    copied = copy_model(made.settings, "mixed:q4", "other")
    twin = read_manifest(Library(made.settings).folder(copied))
    assert (twin.forms, twin.layouts, twin.digest) == (
        manifest.forms, manifest.layouts, manifest.digest,
    )  # fmt: skip


def test_dense_tensors_have_their_formats(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    found, tiles = {}, DenseViews._tiles

    def noted(self: DenseViews, name: str, rows: int, columns: int) -> object:
        given = tiles(self, name, rows, columns)
        found[name] = given and given[1]
        return given

    monkeypatch.setattr(DenseViews, "_tiles", noted)
    made.logits("100%", [1, 2, 3] * 10)
    assert len(made.forms.dense) > 3
    assert {name: found[name] for name in made.forms.dense} == made.forms.dense


def test_a_tag_without_tiles_widens_everything(made: Made) -> None:
    manifest = pull(made.checkpoint, made.settings, "mixed:bf16")
    assert (manifest.forms, manifest.layouts) == ((), {})
    both = pull(made.checkpoint, made.settings, "mixed:q4d8")
    assert (both.forms, both.layouts) == ((PAIRS[0],), {"Q8": 2})


@pytest.mark.parametrize(
    "forms",
    [
        Forms((ExpertForms("Q4", "BF16"),)),
        Forms((ExpertForms("Q9", "Q4"),)),
        Forms((ExpertForms("Q4", "Q8"),) * 2),
        Forms(dense={"model.norm.weight": "Q8"}),
        Forms(dense={"model.absent.weight": "Q8"}),
        Forms(dense={"model.embed_tokens.weight": "MXFP4"}),
    ],
)
def test_formats_that_do_not_suit_the_tensors(forms: Forms) -> None:
    checkpoint = open_checkpoint(DEMO_CHECKPOINT)
    plain = inventories.take_inventory(family_of(checkpoint.config), checkpoint)
    with pytest.raises(BadCheckpoint):
        replace(plain, forms=forms)
