"""Bounds are their bytes and products over the speeds, counted by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.placement.bandwidth import Speeds
from moeinf.runtime.placement.bounds import prefill_seconds, seconds_per_token, without_misses
from moeinf.runtime.placement.plan import Placement, place
from moeinf.runtime.sizes import parse_memory

SPEEDS = Speeds(1e9, 1e8, "a test", "a test")
EXPERT = 49152  # bytes of an expert of the demo: 3 matrices of bfloat16
CHANCE = 1 - (1 - 4 / 32) ** 256  # that one of 256 tokens uses an expert of 32, at 4 per token


@pytest.fixture
def manifest(demo_home: Path) -> Manifest:
    return Library(Settings(demo_home)).read("demo:bf16")[0]


def placed(manifest: Manifest, memory: str) -> Placement:
    return place(manifest, EngineConfig(memory=parse_memory(memory)), 1 << 40, 2)


def test_a_token_reads_its_experts_and_the_dense_weights(manifest: Manifest) -> None:
    half, routed = placed(manifest, "50%"), 6 * 4 * EXPERT
    ram = (routed + manifest.dense_bytes) / 1e9
    assert seconds_per_token(half, manifest, SPEEDS) == pytest.approx(ram + routed / 2 / 1e8)
    whole = without_misses(half, manifest)
    assert seconds_per_token(whole, manifest, SPEEDS) == pytest.approx(ram)


def test_a_decoded_token_does_not_run_the_encoder(manifest: Manifest) -> None:
    pair = structs.replace(manifest, encoder_layers=4)
    whole = placed(pair, "100%")
    least = (2 * 4 * EXPERT + manifest.dense_bytes / 3) / 1e9
    assert seconds_per_token(whole, pair, SPEEDS) == pytest.approx(least)


def test_a_prompt_reads_almost_every_expert_once_per_window(manifest: Manifest) -> None:
    """Half of the experts come from the disk, which is slower: one window of 512, or two."""
    routed = 2 * 6 * 32 * CHANCE * EXPERT
    half = placed(manifest, "50%")
    assert half.window == 512
    once = 6 * 32 * (1 - (1 - 4 / 32) ** 512) * EXPERT
    found = prefill_seconds(half, manifest, SPEEDS, 512)
    assert found == pytest.approx(once / 2 / 1e8)
    found = prefill_seconds(replace(half, window=256), manifest, SPEEDS, 512)
    assert found == pytest.approx(routed / 2 / 1e8)
    found = prefill_seconds(placed(manifest, "100%"), manifest, SPEEDS, 512)
    assert found == pytest.approx((routed + 2 * manifest.dense_bytes) / 1e9)


def test_a_source_is_read_in_one_chunk(manifest: Manifest) -> None:
    pair = structs.replace(manifest, encoder_layers=3)
    chance = 1 - (1 - 4 / 32) ** 512
    least = (3 * 32 * chance * EXPERT + manifest.dense_bytes / 2) / 1e9
    found = prefill_seconds(placed(pair, "100%"), pair, SPEEDS, 512)
    assert found == pytest.approx(least)


@pytest.mark.parametrize(
    ("dtype", "amx", "factor"),
    [("F32", True, 1), ("BF16", False, 2), ("BF16", True, 16), ("Q4", True, 4)],
)
def test_a_long_prompt_waits_for_products(
    manifest: Manifest, dtype: str, amx: bool, factor: int
) -> None:
    speeds = replace(SPEEDS, products_per_s=1e6, has_amx=amx)
    products = 512 * 6 * 4 * EXPERT // 2  # 2 bytes a weight
    whole = placed(manifest, "100%")
    found = prefill_seconds(whole, structs.replace(manifest, dtype=dtype), speeds, 512)
    assert found == pytest.approx(products / 1e6 / factor)
