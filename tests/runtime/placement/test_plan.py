"""Defaults of a plan: the context, and answers that do not depend on memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from moeinf.native import MAX_COMPUTE_THREADS
from moeinf.runtime.config import KV, EngineConfig, Settings
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import MANIFEST, Manifest, read_manifest, write_manifest
from moeinf.runtime.placement import plan
from moeinf.runtime.placement.plan import HEADROOM_BYTES, Placement, place, threads_worth_having

LONG, ORIGINAL = 1 << 17, 4096


@pytest.fixture
def manifest(demo_home: Path) -> Manifest:
    """Return the demo with a context so long that not all of it is affordable."""
    return replace(Library(Settings(demo_home)).read("demo:bf16")[0], max_context=LONG)


def placed(manifest: Manifest, kv_bytes: int, context: int | None = None) -> Placement:
    """Plan for a machine that affords `kv_bytes` of KV cache."""
    rest = place(manifest, EngineConfig(context=1), 1 << 40, 2)
    fixed = rest.dense_bytes + rest.scratch_bytes + HEADROOM_BYTES
    return place(manifest, EngineConfig(context=context), fixed + 4 * kv_bytes, 2)


def test_context_is_what_memory_affords(manifest: Manifest) -> None:
    for tokens in (8192, 16384):
        found = placed(manifest, manifest.kv_bytes(tokens))
        assert found.context == tokens
        assert f"context {tokens} tokens (what memory affords)" in found.notes
    found = placed(manifest, manifest.kv_bytes(2 * LONG))
    assert f"context {LONG} tokens (the model's)" in found.notes


def test_memory_does_not_go_beyond_a_usual_context(manifest: Manifest) -> None:
    """A LongRoPE model answers differently with room for more than the original context."""
    manifest = replace(manifest, usual_context=ORIGINAL)
    for tokens in (8192, 2 * LONG):
        found = placed(manifest, manifest.kv_bytes(tokens))
        assert found.context == ORIGINAL
        assert any(note.startswith("context 4096 tokens (the model's orig") for note in found.notes)
    assert placed(manifest, manifest.kv_bytes(1024)).context == 1024
    assert placed(manifest, manifest.kv_bytes(LONG), context=8192).context == 8192


@pytest.mark.parametrize("usual", [None, ORIGINAL])
def test_a_manifest_remembers_it(usual: int | None, manifest: Manifest, tmp_path: Path) -> None:
    manifest = replace(manifest, usual_context=usual)
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    about = json.loads((tmp_path / MANIFEST).read_text())
    del about["usual_context"]  # an older manifest without the key
    (tmp_path / MANIFEST).write_text(json.dumps(about))
    assert read_manifest(tmp_path).usual_context is None


def test_no_more_threads_than_the_kernels_take(manifest: Manifest) -> None:
    """A machine has 128 cores, and the model has work for all of them."""
    large = replace(manifest, hidden=8192, intermediate=8192)
    assert threads_worth_having(large) > MAX_COMPUTE_THREADS
    assert place(large, EngineConfig(), 1 << 44, 128).threads == MAX_COMPUTE_THREADS


def test_hidden_states_may_be_wider_than_what_experts_read(manifest: Manifest) -> None:
    """Only the rows of the K experts are narrow (Nemotron-3-Super)."""
    wide = replace(manifest, width=2 * manifest.hidden)
    both = replace(manifest, hidden=2 * manifest.hidden)
    narrow, middle, large = (plan.working_bytes(one) for one in (manifest, wide, both))
    assert narrow < middle < large == 2 * narrow
    assert middle - narrow == plan.PREFILL_CHUNK * manifest.hidden * 8 * 4
    assert (manifest.hidden_width, wide.hidden_width) == (manifest.hidden, 2 * manifest.hidden)


def test_a_lossy_option_takes_the_cpu(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is there would compute experts outside the host's slots."""
    wanted, real = list[str](), plan.choose_processor
    monkeypatch.setattr(
        plan, "choose_processor", lambda device, *rest: wanted.append(device) or real("cpu", *rest)
    )
    for skip_below in (0.0, 0.03):
        place(manifest, EngineConfig(skip_below=skip_below), 1 << 40, 2)
    assert wanted == ["auto", "cpu"]


def test_kv_in_q8(manifest: Manifest, tmp_path: Path) -> None:
    """Rows of whole blocks have 17 / 32 of the bytes in bfloat16; a manifest tells others."""
    full, half = (place(manifest, EngineConfig(kv=form), 1 << 40, 2) for form in KV)
    assert (full.kv, half.kv) == KV
    assert half.kv_bytes * 32 == full.kv_bytes * 17
    odd = replace(manifest, kv_q8_bytes_per_token=7)
    write_manifest(tmp_path, odd)
    assert read_manifest(tmp_path).kv_bytes(10, "q8") == 70
    write_manifest(tmp_path, manifest)
    assert "kv_q8" not in (tmp_path / MANIFEST).read_text(), "versions up to 0.1 refuse it"
    tokens = 8192 * 32 // 17 // 256 * 256
    rest = place(manifest, EngineConfig(context=1), 1 << 40, 2)
    free = rest.dense_bytes + rest.scratch_bytes + HEADROOM_BYTES + 4 * manifest.kv_bytes(8192)
    assert place(manifest, EngineConfig(kv="q8"), free, 2).context == tokens
    reader = replace(manifest, encoder_layers=1)
    found = place(reader, EngineConfig(kv="q8"), 1 << 40, 2)
    assert (found.kv, found.kv_bytes) == ("full", full.kv_bytes)
    assert any(note.startswith("--kv q8 changes nothing") for note in found.fallbacks)
