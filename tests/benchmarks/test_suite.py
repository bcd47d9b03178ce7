"""The suite: its selection, its output, and a second run that resumes the first one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.peers.table import PEERS
from benchmarks.suite import models, picture, scenarios
from benchmarks.suite import row as row_module
from benchmarks.suite.command import main
from benchmarks.suite.report import OtherModel, Results, markdown
from benchmarks.suite.row import Bench, Here, program
from benchmarks.suite.scenarios import Scenario
from moeinf.runtime.machine.gpu import Gpu
from moeinf.runtime.placement.gpu_plan import DeviceBudget
from moeinf.runtime.sizes import parse_memory

_ABOUT = {"model": "thin:q4", "machine": {"cpu": "x"}, "command": "c", "when": "w", "threads": 1}
_ROW = {
    "status": "ok",
    "ran": True,
    "ttft_ms": 100.0,
    "tpot_ms_median": 20.0,
    "tpot_ms_p95": 30.0,
    "tokens_per_s": 48.0,
    "hit_rate": 0.912,
    "bytes_per_token": 2_500_000,
    "peak_bytes": 1 << 30,
    "floor_ms": 16.0,
    "forced": True,
    "others_cores": 0.3,
}


def test_the_product_and_the_selection() -> None:
    every = scenarios.everything()
    assert len(every) == 9 * 3 * 2 * 3 * 3  # places, prompts, decodes, batches, moments
    for chosen in (every, scenarios.default(), scenarios.quick()):
        assert len({s.name for s in chosen}) == len(chosen)
    default = scenarios.default()
    assert set(default) < set(every)
    assert Scenario(prompt=512, decode=32) in default  # the paper's scenario
    assert {s.memory for s in default} == {None, 60, 35, 18, 10}
    for wanted in (
        ({32, 512, 4096}, {s.prompt for s in default}),
        ({1, 2, 4}, {s.batch for s in default}),
    ):
        assert wanted[0] == wanted[1]
    assert Counter(s.place for s in default)["gpu"] == 3
    second = Scenario(moment="second")
    assert second.context == 512 + 32 + 32 + 32 + 8
    assert second.name == "RAM, 512+32, batch 1, second"


def test_as_many_layers_as_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OLMoE has 6.9e9 weights: q4 and Q4_0 take 8 GB, a checkpoint in bfloat16 another 14 GB."""
    free = 0

    def usage(_: Path) -> SimpleNamespace:
        return SimpleNamespace(free=free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.setattr(models, "physical_bytes", lambda: 64 << 30)
    for gigabytes, formats, layers in (
        (13, {"gguf"}, 16),
        (13, {"gguf", "checkpoint"}, 4),
        (9, {"gguf"}, 8),
    ):
        free = gigabytes * 10**9
        assert models.layers_that_fit(tmp_path, "olmoe", "q4", formats, "calibrated") == layers  # type: ignore[arg-type]
    free = 5 * 10**9
    with pytest.raises(SystemExit, match="fits on the disk"):
        models.layers_that_fit(tmp_path, "olmoe", "q4", {"checkpoint"}, "calibrated")


def test_results_are_kept_and_shown(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    results, ram = Results(path, _ABOUT), Scenario()
    results.put(ram, "llama.cpp", {**_ROW, "hit_rate": None, "tokens_per_s": 24.0})
    results.put(ram, "moeinf", _ROW)
    results.put(ram, "transformers", {"status": "killed at the limit", "ran": True})
    results.put(ram, "vLLM", {"status": "not installed: pip install vllm"})
    again = Results(path, _ABOUT)
    assert again.has(ram, "moeinf")
    assert again.has(ram, "transformers")
    assert again.is_noisy(ram, "moeinf", 0.2)
    assert not again.is_noisy(ram, "moeinf", 0.5)
    assert not again.has(ram, "vLLM")  # a later run may find it installed
    assert not again.has(Scenario(batch=2), "moeinf")
    lines = markdown(again, [ram]).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert table[2] == (
        "| RAM, 512+32, batch 1, warm | moeinf | 48.00 | 20.0 (30.0) | 100 | 91.2% | 2.5 "
        "| 1.0 GiB | 16.0 | 1.25 | 0.3 |"
    )
    assert "killed at the limit" in table[4]
    assert lines[-1] == "- vLLM (RAM): not installed: pip install vllm"
    with pytest.raises(OtherModel, match="another model"):
        Results(path, {**_ABOUT, "model": "olmoe:q4"})


def test_the_picture_is_legible_at_800_pixels(tmp_path: Path) -> None:
    """Its legend lies outside of the plots, and its smallest text is as large as a page's."""
    pytest.importorskip("matplotlib")
    from matplotlib.patches import Rectangle
    from matplotlib.text import Text

    rows = picture.read(picture.DATA)
    made = picture.figure(rows)
    made.canvas.draw()
    (legend,) = made.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "moeinf", "llama.cpp", "accelerate cpu", "transformers", "llama.cpp no-repack",
        "accelerate disk",
    ]  # fmt: skip
    box = legend.get_window_extent()
    for axis in made.axes:
        assert axis.get_legend() is None
        assert not box.overlaps(axis.get_tightbbox() or box)
    texts = [text for text in made.findobj(Text) if isinstance(text, Text)]
    assert (
        min(text.get_fontsize() for text in texts if text.get_text().strip())
        * 800
        / (72 * picture.INCHES[0])
        >= 13
    )
    bars = made.axes[0]
    labels = [label.get_text() for label in bars.get_xticklabels()]
    assert (len(labels), labels[0], labels[-1]) == (9, "512+32\n", "512+32\n2nd turn")
    boxes = [label.get_window_extent() for label in bars.get_xticklabels()]
    assert not any(left.overlaps(right) for left, right in pairwise(boxes))
    speeds = [row["tokens_per_s"] for row in rows if row["status"] == "ok" and not row["memory"]]
    assert sorted(bar.get_height() for bar in bars.patches if isinstance(bar, Rectangle)) == sorted(
        speeds
    )
    memory, first = ({line.get_color(): line for line in axis.lines} for axis in made.axes[1:])
    ours, transformers = (handle.get_color() for handle in legend.get_lines()[:4:3])
    assert np.asarray(memory[ours].get_xdata()).tolist() == [10, 18, 35, 60, 100]
    assert np.asarray(first[transformers].get_xdata()).tolist() == [32, 512, 4096]
    assert transformers not in memory
    picture.draw(rows, tmp_path / "suite.png")
    assert (tmp_path / "suite.png").read_bytes()[16:20] == (1600).to_bytes(4, "big")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def suite(cache: Path, *more: str) -> tuple[dict[str, Any], str]:
    """Run the suite; return its JSON and its standard error."""
    out = cache / "out.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "--quick",
        "--cache",
        str(cache),
        "--threads",
        "1",
    ]
    command += ["--out", str(out), "--programs", "moeinf,vLLM", "--row-limit", "200", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})
    assert done.returncode == 0, done.stderr
    assert done.stdout == out.with_suffix(".md").read_text()
    found: dict[str, Any] = json.loads(out.read_text())["rows"]
    return found, done.stderr


@pytest.mark.parametrize("selection", [[], ["--all"]])
def test_how_long_a_row_may_take(
    selection: list[str], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default selection ends within two hours; rows of the full product have ten minutes."""
    where = ["--cache", str(cache), "--out", str(cache / "none.json"), "--shape", "thin"]
    main([*selection, "--dry-run", "--programs", "moeinf", *where])
    said = capsys.readouterr().err
    found = re.search(r": (\d+) rows to run.*, at most (\d+)$", said, re.M)
    assert found is not None, said
    rows, most = map(int, found.groups())
    assert most == rows * 10 if selection else 0 < most <= 120


def test_a_gpu_budget_holds_the_share_of_experts_beside_all_else(cache: Path) -> None:
    model = models.make(cache, "thin", None, "q4", set(), sys.executable, "calibrated")
    scenario, manifest = Scenario(gpu=35), model.manifest()
    bench = Bench(model, 1, 60.0, Here(True, {}, {}, {}))
    command = program(bench, None, scenario).command
    budget = parse_memory(command[command.index("--device-memory") + 1])
    gpu = Gpu("a GPU", 8 << 30, 8 << 30, 12080, "libcuda.so.1")
    kv = manifest.kv_bytes(scenario.context)
    placed = DeviceBudget(manifest, budget, gpu).place(scenario.context, kv)
    assert placed.inside
    assert placed.slots == round(manifest.slots.max_bytes * 0.35) // manifest.slots.slot_bytes
    assert 0 < placed.slots < manifest.slots.experts
    theirs = program(bench, PEERS["MoE-Infinity"], scenario).command  # in bfloat16
    weights = manifest.dense_bytes + manifest.slots.max_bytes * 0.35
    given = int(theirs[theirs.index("--device-bytes") + 1])
    assert given == pytest.approx(weights * 16 / 4.75, abs=1)


def test_a_floor_is_not_said_of_a_gpu(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading from a GPU's own memory takes another time than from RAM."""
    monkeypatch.setattr(row_module, "read_ceiling", lambda _threads: 1e9)
    found = {"token_bytes": 5_000_000, "bytes_per_token": 0}
    monkeypatch.setattr(row_module, "_measured", lambda *_: dict(found))
    model = models.make(cache, "thin", None, "q4", set(), sys.executable, "calibrated")
    bench = Bench(model, 1, 60.0, Here(True, {}, {}, {}))
    assert row_module.run(bench, None, Scenario(), None)["floor_ms"] == 5.0
    assert "floor_ms" not in row_module.run(bench, None, Scenario(gpu=35), None)


@pytest.mark.full
def test_the_whole_command(cache: Path) -> None:
    """Every kind of scenario except the enforced limit, without peers; then a second run."""
    rows, said = suite(cache, "--only", "batch", "--stop-after", "1")
    assert "stopped before row 1" in said
    rows, said = suite(cache, "--no-pictures")
    assert "6 rows to run" not in said  # the GPU's rows cannot run
    ours = {key: row for key, row in rows.items() if row["program"] == "moeinf"}
    assert len(ours) == 6
    gpu = ours.pop("GPU 35 %, 32+8, batch 1, warm | moeinf")
    assert gpu["status"] == "not run: no GPU" or gpu["ran"]
    limited = ours.pop("memory 35 %, 32+8, batch 1, warm | moeinf")
    assert limited["status"] == "ok" or "cannot be limited" in limited["status"]
    for key, row in ours.items():
        assert row["status"] == "ok", (key, row)
        assert row["steps"] == 8 * row["rounds"]
        assert row["rounds"] == 1 or (row["rounds"] <= 3 and row["moment"] != "cold")
        assert row["forced"]
        assert row["tpot_ms_p95"] >= row["tpot_ms_median"] > 0
        assert row["tokens_per_s"] > 0
        # a thin model may be faster: it fits into the processor's caches
        assert row["floor_ms"] > 0
        assert row["token_bytes"] > 1_000_000
        assert row["bits"] == 4.75
    assert ours["RAM, 32+8, batch 1, warm | moeinf"]["hit_rate"] > 0.99
    assert not rows["GPU 35 %, 32+8, batch 1, warm | vLLM"].get("ran")
    again, said = suite(cache)
    assert again == rows
    assert " 0 rows to run" in said
    assert (cache / "out.png").stat().st_size > 10_000
