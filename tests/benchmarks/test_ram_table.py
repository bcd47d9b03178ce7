"""The README's table of memory and models equals the output of `benchmarks.ram_table`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ram_table import SPEEDS, lines, published, tokens_per_s
from moeinf.runtime.config import EngineConfig
from moeinf.runtime.placement.plan import place

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_has_the_table() -> None:
    assert "\n".join(lines()) in README.read_text(encoding="utf-8")


def test_sizes_are_those_of_the_published_weights() -> None:
    """Qwen3-30B-A3B has 30.5 billion parameters: 2 bytes each on the hub, 4.6 bits as q4."""
    found = published("qwen3-30b-a3b")
    assert found.download_bytes == pytest.approx(2 * 30.53e9, rel=0.001)
    assert found.disk_bytes == pytest.approx(30.53e9 * 4.6 / 8, rel=0.02)


def test_a_bound_is_its_bytes_over_the_speeds() -> None:
    """Half of the experts are absent: the drive reads every second expert of a token."""
    manifest = published("olmoe").manifest
    config = EngineConfig(context=4096, device="cpu")
    whole = place(manifest, config, 64 << 30, cores=2)
    token = manifest.dense_bytes + 16 * 8 * manifest.slots.slot_bytes
    assert tokens_per_s(manifest, whole) == pytest.approx([SPEEDS.ram_bytes_per_s / token] * 2)
    least, most = tokens_per_s(manifest, place(manifest, config, 4 << 30, cores=2))
    assert least < most == pytest.approx(SPEEDS.ram_bytes_per_s / token)
