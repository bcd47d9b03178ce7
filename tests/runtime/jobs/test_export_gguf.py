"""The export in blocks: the same file for any size of a block, in bounded memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from moeinf.runtime.config import Settings
from moeinf.runtime.jobs import export_gguf as jobs
from moeinf.runtime.jobs.export_gguf import export_gguf
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from tests.conftest import ignore, pull


@pytest.mark.parametrize("tag", ["q4", "bf16"])
def test_blocks_make_the_same_file(
    tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(tmp_path)
    manifest = pull(DEMO_CHECKPOINT, settings, f"x:{tag}")
    folder = Library(settings).folder(manifest.model)
    weights = sum(file.data_bytes for file in manifest.files if file.data_offset)
    told: list[tuple[str, int, int]] = []

    def progress(phase: str, done: int, total: int) -> None:
        told.append((phase, done, total))

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    export_gguf(folder, manifest, whole, progress, ignore, force=False)
    assert told[-1] == ("exporting", weights, weights)
    monkeypatch.setattr(jobs, "_BLOCK_BYTES", 1 << 10)
    few = len(told)
    export_gguf(folder, manifest, parts, progress, ignore, force=False)
    assert len(told) - few > few
    assert whole.read_bytes() == parts.read_bytes()


def test_memory_does_not_grow_with_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory holds a few copies of an expert or a block, not of the 5 MiB of weights."""
    settings = Settings(tmp_path)
    manifest = pull(DEMO_CHECKPOINT, settings, "x:q8")
    folder = Library(settings).folder(manifest.model)
    monkeypatch.setattr(jobs, "_BLOCK_BYTES", 1 << 14)
    began: list[int] = []

    def progress(_phase: str, done: int, _total: int) -> None:
        if not began:  # the small files are read
            tracemalloc.reset_peak()
        began.append(done)

    tracemalloc.start()
    try:
        export_gguf(folder, manifest, tmp_path / "x.gguf", progress, ignore, force=False)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (tmp_path / "x.gguf").stat().st_size > 5 << 20
    assert peak < 2 << 20
