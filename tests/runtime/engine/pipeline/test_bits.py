"""Test that a pipeline has the bits of one engine: families, forms, cuts, memory for experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moeinf.offload.store.transfer import Transfer
from moeinf.runtime.config import Settings
from moeinf.runtime.engine import loader
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.engine.pipeline.cut import CannotCut, cut, layers_of
from moeinf.runtime.library.library import Library
from scripts.make_checkpoint import byte_tokenizer
from tests.conftest import pull
from tests.runtime.engine.pipeline.stages import config, same, stages, used
from tests.tiny import by_default, save_tiny

FAMILIES = ["olmoe", "mixtral", "deepseek-lite", "qwen3", "qwen3-sparse-step", "gpt-oss"]
FAMILIES += ["deepseek-v3", "minimax-m2", "phimoe-longrope", "glm4", "mimo", "dots1", "qwen2"]
SHARING = ["qwen3.5", "kimi-linear", "v32", "deepseek-v4", "gemma4", "qwen4"]
LONG = [3 + (37 * place + place // 7) % 90 for place in range(300)]  # two chunks


def tiny(name: str, folder: Path, dtype: torch.dtype, tag: str) -> Settings:
    save_tiny(name, folder / "checkpoint", seed=3, dtype=dtype)
    byte_tokenizer().save(str(folder / "checkpoint" / "tokenizer.json"))
    settings = Settings(folder / "home")
    pull(folder / "checkpoint", settings, f"tiny:{tag}")
    return settings


@pytest.mark.parametrize("name", by_default(FAMILIES))
def test_families(name: str, tmp_path: Path) -> None:
    settings = tiny(name, tmp_path, torch.bfloat16, "bf16")
    manifest, folder = Library(settings).read("tiny:bf16")
    layers = layers_of(manifest, folder).sparse
    first = layers.index(True) + 1  # the first stage has one layer of experts
    with Engine.open(manifest, folder, config(), settings) as whole:
        long = LONG[: whole.info.context - 8]
        wanted = used(whole, [token % whole.info.vocab_size for token in long])
    options = {"parallel": 2, "memory": str(manifest.slots.min_bytes)}
    with stages(manifest, folder, settings, [first], len(layers), **options) as (stage,):
        given = config(stages=(stage.address,), **options)
        with Engine.open(manifest, folder, given, settings) as engine:
            found = used(engine, [token % engine.info.vocab_size for token in long])
    assert same(found, wanted)


@pytest.mark.parametrize(
    ("model", "cuts", "options"),
    [
        ("demo", [3], {"memory": "30%", "policy": "lru", "window": 512}),
        ("demo", [1, 2, 4], {"memory": "50%"}),
        ("demo", [3], {"kv": "q8"}),
        ("demo:f32", [2], {"memory": "40%"}),
    ],
)
def test_forms_and_cuts(
    model: str, cuts: list[int], options: dict[str, Any], demo_home: Path
) -> None:
    settings = Settings(demo_home)
    manifest, folder = Library(settings).read(model)
    whole = {name: value for name, value in options.items() if name == "kv"}
    with Engine.open(manifest, folder, config(**whole), settings) as engine:
        wanted = used(engine, LONG)
    options |= {"parallel": 2}
    with stages(manifest, folder, settings, cuts, 6, **options) as running:
        given = config(stages=tuple(one.address for one in reversed(running)), **options)
        with Engine.open(manifest, folder, given, settings) as engine:
            assert same(used(engine, LONG), wanted)
            held = engine.store.host.slots + sum(one.stage._engine.info.slots for one in running)
    if "memory" in options:
        assert held < manifest.slots.experts


def test_a_part_has_only_what_it_needs(demo_home: Path) -> None:
    manifest, folder = Library(Settings(demo_home)).read("demo")
    parts = [cut(manifest, folder, first, first + 2) for first in (0, 2, 4)]
    assert [part.digest for part in parts] == [manifest.digest] * 3
    assert [shard for part in parts for shard in part.shards()] == manifest.shards()
    assert sum(part.dense_bytes for part in parts) <= manifest.file("dense.safetensors").data_bytes
    assert parts[1].dense_bytes == parts[2].dense_bytes < parts[0].dense_bytes
    assert sum(part.kv_bytes_per_token for part in parts) == manifest.kv_bytes_per_token
    assert sum(part.slots.max_bytes for part in parts) == manifest.slots.max_bytes


def test_dense_weights_of_other_layers_leave_memory(
    demo_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With small pieces, so that the demo has many. Each is read once, and some are given back."""
    settings = Settings(demo_home)
    manifest, folder = Library(settings).read("demo")
    with Engine.open(manifest, folder, config(), settings) as whole:
        wanted = used(whole, LONG)
    released = list[int]()

    class Counting(Transfer):
        def release(self, slot: int) -> None:
            released.append(slot)
            super().release(slot)

    monkeypatch.setattr(loader, "_PIECE", 4096)
    monkeypatch.setattr(loader, "Transfer", Counting)
    pieces = manifest.file("dense.safetensors").data_bytes // 4096
    with stages(manifest, folder, settings, [3], 6, parallel=2) as (stage,):
        assert pieces * 0.4 < len(released) < pieces * 0.8
        given = config(stages=(stage.address,), parallel=2)
        with Engine.open(manifest, folder, given, settings) as engine:
            assert pieces * 0.7 < len(released) < pieces * 1.1
            assert same(used(engine, LONG), wanted)


@pytest.mark.parametrize("name", SHARING)
def test_layers_that_share_more_than_states(name: str, tmp_path: Path) -> None:
    settings = tiny(name, tmp_path, torch.float32, "f32")
    with pytest.raises(CannotCut, match="cannot be cut into stages"):
        layers_of(*Library(settings).read("tiny:f32"))


def test_layers_that_do_not_exist(demo_home: Path) -> None:
    manifest, folder = Library(Settings(demo_home)).read("demo")
    for first, stop in ((0, 7), (6, 7), (3, 3)):
        with pytest.raises(CannotCut, match="the layers 0-5"):
            cut(manifest, folder, first, stop)
