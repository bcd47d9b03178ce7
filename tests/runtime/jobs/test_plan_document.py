"""The verdict of a plan for published models, whose shapes give their sizes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.ram_table import SPEEDS, published
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.hub.aliases import registry
from moeinf.runtime.jobs.plan_document import remedy, verdict
from moeinf.runtime.placement.outlook import Machine, Outlook, PullSize, outlook

GB = 10**9


def planned(home: Path, name: str, ram: int, disk: int) -> Outlook:
    """Plan a published model for a machine with so many GiB of free RAM and GB of free disk."""
    found = published(name)
    machine = Machine(ram << 30, ram << 30, 2 * disk * GB, disk * GB, 2, SPEEDS)
    pull = PullSize(found.download_bytes, found.disk_bytes, extra_bytes=5 * GB)
    config = EngineConfig(context=4096, device="cpu")
    return outlook(found.manifest, config, Settings(home), machine, pull)


def test_a_model_that_runs(tmp_path: Path) -> None:
    """The figures are those of the README's table."""
    found = planned(tmp_path, "qwen3-30b-a3b", 8, 80)
    assert verdict(found) == (
        "qwen3-30b-a3b:q4 runs here: at most about 14.9 tokens/s, 3.4 if routing is random "
        "(bounds, not measured), with 5.4 GiB for experts; download 56.9 GiB; "
        "disk 16.3 GiB of 74.5 GiB free"
    )
    assert remedy(found, {}) == ""


def test_a_model_that_is_too_large_for_the_disk(tmp_path: Path) -> None:
    """A pull needs room for source files, too. Models that fit are named."""
    found = planned(tmp_path, "qwen3-235b-a22b", 16, 80)
    assert verdict(found) == (
        "qwen3-235b-a22b:q4 does not run here: 128 GiB of disk are needed, 74.5 GiB are free"
    )
    tries = re.fullmatch(
        r"`moeinf plan (\S+)` or `moeinf plan (\S+)` or the same command after you free some disk",
        remedy(found, {}),
    )
    assert tries is not None
    assert max(registry()[name].disk_bytes for name in tries.groups()) <= 16 << 30


@pytest.mark.parametrize(("disk", "runs"), [(22, False), (23, True)])
def test_source_files_need_room_beside_the_model(tmp_path: Path, disk: int, runs: bool) -> None:
    """17.5 GB of model and 5 GB of source files."""
    assert (not planned(tmp_path, "qwen3-30b-a3b", 8, disk).problems) == runs


def test_a_model_that_lacks_both(tmp_path: Path) -> None:
    found = planned(tmp_path, "mixtral-8x7b", 2, 10)
    assert list(found.problems) == ["RAM", "disk"]
    assert remedy(found, {}).endswith("the same command after you free some RAM and disk")
