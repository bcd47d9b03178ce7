"""Test the choice of formats within a number of bytes, and models made by it."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from moeinf.runtime.checkpoints.checkpoint import open_checkpoint
from moeinf.runtime.config import Settings
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.library.manifest import DENSE, Manifest, read_manifest
from moeinf.runtime.library.repacking.bit_choice import Option, choose
from moeinf.runtime.library.repacking.repack import repack
from moeinf.runtime.library.sources import LocalSource
from moeinf.runtime.library.verify import LocalRepair, repair, verify
from moeinf.runtime.names import BadName, parse_name
from tests.conftest import ignore


def options(scale: float) -> list[Option]:
    sizes = {"Q2": 2, "Q3": 3, "Q4": 4, "Q8": 8}
    return [Option(form, size, scale * 4.0**-size) for form, size in sizes.items()]


@pytest.mark.parametrize("budget", [1, 6, 9, 11, 14, 17, 24, 40])
def test_the_choice_fits_and_is_as_good_as_any_of_its_size(budget: int) -> None:
    matrices = [options(1.0), options(16.0), options(300.0)]
    chosen = choose(matrices, budget)
    size, cost = sum(x.size_bytes for x in chosen), sum(x.cost for x in chosen)
    assert size <= max(budget, 6)
    for other in itertools.product(*matrices):
        if sum(x.size_bytes for x in other) <= size:
            assert cost <= sum(x.cost for x in other) * (1 + 1e-12)


def test_an_option_that_costs_bytes_for_nothing_is_not_taken() -> None:
    assert choose([[Option("Q4", 4, 1.0), Option("Q8", 8, 1.0)]], 100)[0].form == "Q4"


def made(settings: Settings, tag: str, *use: np.ndarray) -> Manifest:
    source = LocalSource(open_checkpoint(DEMO_CHECKPOINT), "demo")
    return repack(source, Library(settings), parse_name(f"demo:{tag}"), ignore, ignore, False, use)


def test_a_model_of_chosen_bits_has_them_follows_use_and_is_repaired(tmp_path: Path) -> None:
    settings = Settings(tmp_path)
    use = np.ones((6, 32), np.int64)
    use[:, 5] = 1000
    manifest, whole = made(settings, "b3.5", use), made(settings, "q4")
    weights = sum(x.weights for x in manifest.expert_layouts)
    linears = 6 * 4 * 128 * 128
    saved = whole.size_bytes - manifest.size_bytes
    assert saved == pytest.approx((weights + linears) / 8, rel=0.01)
    assert [manifest.forms[32 * layer + 5] for layer in range(6)] == [("Q3", "Q3")] * 6
    assert {form for pair in manifest.forms for form in pair} == {"Q2", "Q3"}
    folder = Library(settings).folder(manifest.model)
    assert read_manifest(folder) == manifest
    good = (folder / DENSE).read_bytes()
    (folder / DENSE).write_bytes(good[:5000] + b"x" + good[5001:])
    damages = verify(folder, manifest, ignore)
    repair(folder, manifest, damages, LocalRepair(open_checkpoint(DEMO_CHECKPOINT)), ignore)
    assert (folder / DENSE).read_bytes() == good


@pytest.mark.parametrize("tag", ["b2.4", "b9", "b3.50", "b3.123", "b"])
def test_tags_that_do_not_exist(tag: str) -> None:
    with pytest.raises(BadName):
        parse_name(f"demo:{tag}")
