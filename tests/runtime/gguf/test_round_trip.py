"""A model that is exported and pulled again has the same bytes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moeinf.offload.format.layout import ExpertForms
from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.gguf.checkpoint import checkpoint_of, open_gguf
from moeinf.runtime.gguf.reader import read_gguf
from moeinf.runtime.hub.resolve import find_source
from moeinf.runtime.jobs.export_gguf import export_gguf
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.library.repacking.repack import repack
from scripts.make_checkpoint import config, make_checkpoint
from tests.conftest import endless, ignore
from tests.exported import FAMILIES, STREAMS, Model, checkpoint, exported
from tests.generating import answering
from tests.runtime.gguf.test_pulls import contents
from tests.tiny import save_tiny


@pytest.mark.parametrize(
    ("family", "tag"),
    [
        ("olmoe", "q4"),
        ("qwen3", "q8"),
        ("mixtral", "q4"),
        ("arctic", "q8"),
        ("phimoe", "q4"),
        ("olmoe", "q4k"),
        ("mixtral", "q5k"),
        ("olmoe", "q6k"),
        ("qwen3", "q6k"),  # with rows of 128 weights, which are no blocks of 256
    ],
)
def test_exported_and_pulled_again(family: str, tag: str, tmp_path: Path) -> None:
    model = exported(checkpoint(family, tmp_path / "checkpoint"), tmp_path / "made", tag)
    name, source = find_source(str(model.file), "again", model.settings, ignore)
    assert name.tag == tag
    notes: list[str] = []
    again = repack(source, Library(model.settings), name, ignore, notes.append)
    assert contents(again) == contents(model.manifest)
    assert notes == []


@pytest.mark.parametrize(("tag", "other"), [("q4k", "Q4"), ("q6k", "Q8")])
def test_rows_that_are_not_whole_blocks(tag: str, other: str, tmp_path: Path) -> None:
    """The experts' down_proj is not padded to 256 columns, not widened in the file, and runs."""
    folder = tmp_path / "checkpoint"
    make_checkpoint(folder, config(2, 6, 256, 64, 2))
    settings, notes = Settings(tmp_path / "home"), list[str]()
    name, source = find_source(str(folder), f"tiny:{tag}", settings, ignore)
    made = repack(source, Library(settings), name, ignore, notes.append)
    assert made.forms == (ExpertForms(tag.upper(), other),)
    assert any(f"of 256 become {other.lower()}: experts' down_proj" in note for note in notes)
    file, library = tmp_path / "x.gguf", Library(settings)
    kinds = export_gguf(library.folder(name), made, file, ignore, ignore, force=False).tensors
    assert kinds[{"Q4": "Q4_0", "Q8": "Q8_0"}[other]] >= made.layers
    name, source = find_source(str(file), "again", settings, ignore)
    again = repack(source, library, name, ignore, ignore)
    assert name.tag == tag
    assert contents(again) == contents(made)
    with Engine.open(made, library.folder(made.model), EngineConfig(), settings) as engine:
        endless(engine)
        answer = answering(engine, [5, 9, 14, 3], 5)
        list(answer)
        assert len(answer.tokens) == 5


_FULL = pytest.mark.full
# A file does not record that the ends of yarn's ramp are rounded.
OTHERS = [name for name in FAMILIES if name != "gpt-oss-rounded"]


def streams(name: str, folder: Path, **settings: object) -> Model:
    """Return an exported model of several residual streams."""
    save_tiny(STREAMS[name].but(**settings), folder / "checkpoint", seed=3)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_CHECKPOINT / file, folder / "checkpoint")
    return exported(folder / "checkpoint", folder, "f32")


def logits(model: Model) -> torch.Tensor:
    """Return the logits of 60 tokens: more than a window, and than an indexer chooses."""
    ids = [(37 * at + 11) % 272 for at in range(60)]
    with model.engine(64) as engine:
        return engine.all_logits(engine.new_state(), ids).float()


@pytest.mark.parametrize("name", [*STREAMS, *(pytest.param(n, marks=_FULL) for n in OTHERS)])
def test_exported_and_read_back_are_the_same_logits(name: str, tmp_path: Path) -> None:
    """Norms that are stored plus 1 and decay rates are rounded, everything else is the same."""
    if name in STREAMS:
        model = streams(name, tmp_path)
    else:
        model = exported(checkpoint(name, tmp_path / "checkpoint"), tmp_path, "f32")
    again = model.pulled(model.file, "f32")
    assert [table.rows for table in again.manifest.tables] == [
        (sum(table.rows),) for table in model.manifest.tables
    ]
    ours, theirs = logits(again), logits(model)
    assert ours.std() > 0.5
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))


def test_ngrams_of_another_seed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="other hash functions of n-grams"):
        open_gguf(streams("qwen4", tmp_path, seed=5).file)


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        ("qwen4", "qwen4exp.ple.layers", [0, 2], "several layers"),
        ("qwen4", "qwen4exp.ple.ngram_size", 99, "invalid n-grams of 99 tokens"),
        ("qwen4", "qwen4exp.ple.eos_token_id", None, "invalid n-grams"),
        ("qwen4", "qwen4exp.ple.head_vocab_sizes", [1 << 40] * 4, "rows of n-grams"),
        ("qwen4", "qwen4exp.ple.head_offsets", [-1], "no valid qwen4exp.ple.head_offsets"),
        ("deepseek-v4", "deepseek4.swiglu_clamp_exp", [10.0, 7.0], "several limits"),
        ("deepseek-v4", "deepseek4.attention.compress_ratios", [4], "compress_ratios"),
        ("glm5-next", "glm5-next.attention.head_count_kv", 1, "head_count_kv"),
    ],
)
def test_metadata_of_streams_that_are_refused(
    name: str, key: str, value: object, words: str, tmp_path: Path
) -> None:
    file = read_gguf(streams(name, tmp_path).file)
    assert key in file.metadata
    with pytest.raises(BadCheckpoint, match=words):
        checkpoint_of(replace(file, metadata={**file.metadata, key: value}))
