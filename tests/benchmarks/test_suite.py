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
from benchmarks.suite.command import _limit_s as limit_of
from benchmarks.suite.command import main
from benchmarks.suite.figures import Round, Row, row_of
from benchmarks.suite.goals import missed, times_as_fast
from benchmarks.suite.report import OtherModel, Results, markdown
from benchmarks.suite.row import Bench, Here, program
from benchmarks.suite.scenarios import Scenario
from benchmarks.worker import WorkerFailed
from moeinf.runtime.jobs.bench import processor
from moeinf.runtime.machine.gpu import Gpu
from moeinf.runtime.placement.gpu_plan import DeviceBudget
from moeinf.runtime.sizes import parse_memory

_MACHINE = {"cpu": "A CPU (family 6, model 167)", "cores": 2, "memory_bytes": 8 << 30}
_MACHINE |= {"system": "Linux 6", "moeinf": "0.1", "torch": "2.13"}
_ABOUT = {"model": "thin:q4", "machine": _MACHINE, "command": "c", "when": "w", "threads": 1}
_ABOUT |= {"routing": "deepseek-v2-lite"}
_FLOOR = {"over_floor": 1.5, "over_floor_least": 1.4, "over_floor_most": 1.625}
_FLOOR |= {"ram_share": 0.66, "drive_share": 0.0, "policy_share": 0.01}
_ROW = {
    "status": "ok",
    "ran": True,
    "ttft_ms": 100.0,
    "ttft_ms_least": 90.0,
    "ttft_ms_most": 120.0,
    "tpot_ms_median": 20.0,
    "tpot_ms_p95": 30.0,
    "tokens_per_s": 48.0,
    "tokens_per_s_least": 44.0,
    "tokens_per_s_most": 50.0,
    "rounds": 5,
    "parts": 5,
    "hit_rate": 0.912,
    "bytes_per_token": 2_500_000,
    "peak_bytes": 1 << 30,
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
    slower = {"tokens_per_s": 24.0, "tokens_per_s_least": 20.0, "tokens_per_s_most": 25.0}
    results.put(ram, "llama.cpp", {**_ROW, "hit_rate": None, **slower, "rounds": 2, "parts": 6})
    results.put(ram, "moeinf", {**_ROW, **_FLOOR})
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
    assert lines[0] == "# A CPU (family 6, model 167)"
    assert lines[4] == "- model thin:q4; routing: deepseek-v2-lite"
    table = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in table[:5]}) == 1
    assert table[2] == (
        "| RAM, 512+32, batch 1, warm | moeinf | 48.00 (44.00 to 50.00) | 5 | 2.00 (1.76 to 2.50) "
        "| 1.50 (1.40 to 1.62) | 20.0 (30.0) | 100 (90 to 120) | 91.2% | 2.5 | 1.0 GiB | 0.3 |"
    )
    assert "| llama.cpp | 24.00 (20.00 to 25.00) | 2 in 6 | - | - |" in table[3]
    assert "killed at the limit" in table[4]
    assert table[5:] == [
        "| scenario | goal | reached | reading RAM at its speed | waiting for the drive "
        "| deciding | the rest |",
        "|---|---|---|---|---|---|---|",
        "| RAM, 512+32, batch 1, warm | ≤ 1.25 × floor | 1.50 (1.40 to 1.62) | 66% | 0% | 1% "
        "| 33% |",
    ]
    again.put_profile("| experts | 100 |")
    assert "| experts | 100 |" in markdown(Results(path, _ABOUT), [ram])
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
        "moeinf", "llama.cpp", "transformers", "accelerate cpu", "llama.cpp no-repack",
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
    ours, transformers = (handle.get_color() for handle in legend.get_lines()[:3:2])
    assert np.asarray(memory[ours].get_xdata()).tolist() == [10, 18, 35, 60, 100]
    assert np.asarray(first[transformers].get_xdata()).tolist() == [32, 512, 4096]
    assert np.asarray(memory[transformers].get_xdata()).tolist() == [100]
    picture.draw(rows, tmp_path / "suite.png")
    assert (tmp_path / "suite.png").read_bytes()[16:20] == (1600).to_bytes(4, "big")


def test_the_table_has_what_the_picture_reads(tmp_path: Path) -> None:
    """Rows of programs that have not run are left out, and one that was killed has no figures."""
    scenario: Row = {"gpu": None, "prompt": 512, "decode": 32, "batch": 1, "moment": "warm"}
    ran = {**scenario, "ran": True}
    figures: Row = {
        "tokens_per_s": 45.59, "tokens_per_s_least": 45.08, "tokens_per_s_most": 55.4,
        "rounds": 5, "parts": 5, "tpot_ms_median": 19.36, "tpot_ms_p95": 27.26, "ttft_ms": 1606.3,
        "others_cores": 0.03, "hit_rate": 0.7951, "bytes_per_token": 37_960_000,
        "peak_bytes": 3 << 20,
    }  # fmt: skip
    rows: list[Row] = [
        {**ran, "memory": 60, "program": "moeinf", "status": "ok", **figures},
        {**ran, "memory": 60, "program": "llama.cpp", "status": "killed at the limit"},
        {**scenario, "memory": None, "program": "vLLM", "status": "not installed"},
    ]
    path = tmp_path / "suite.csv"
    picture.write(rows, path)
    head, ours, killed = path.read_text(encoding="utf-8").splitlines()
    assert head.split(",") == list(picture.COLUMNS)
    found = dict(zip(picture.COLUMNS, ours.split(","), strict=True))
    assert (found["hit_percent"], found["read_mb_per_token"], found["peak_mib"]) == (
        "79.5", "38.0", "3",
    )  # fmt: skip
    assert killed == "60,512,32,1,warm,llama.cpp,killed at the limit" + "," * 16
    first, second = picture.read(path)
    assert (first["memory"], first["tokens_per_s"], first["ttft_ms"]) == (60, 45.59, 1606.3)
    assert second["status"] == "killed at the limit"


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


@pytest.mark.linux("asks for the usable cores")
@pytest.mark.parametrize("selection", [[], ["--all"]])
def test_how_long_a_row_may_take(
    selection: list[str], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default selection ends within 70 minutes; rows of the full product have ten minutes."""
    where = ["--cache", str(cache), "--out", str(cache / "none.json"), "--shape", "thin"]
    main([*selection, "--dry-run", "--programs", "moeinf", *where])
    said = capsys.readouterr().err
    found = re.search(r": (\d+) rows to run.*, at most (\d+)$", said, re.M)
    assert found is not None, said
    rows, most = map(int, found.groups())
    assert most == rows * 10 if selection else 0 < most <= 70


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


def _round(steps: list[float], first: float, ram: float) -> Round:
    """Return a round whose token reads 5 MB, and which waits 1 ms and decides 0.5 ms a step."""
    about = {"disk_bytes": 0, "decode_events": 0, "decode_hits": 0}
    about |= {"decode_stall_seconds": 0.0, "decode_policy_seconds": 0.0}
    waited = {"decode_stall_seconds": 1e-3 * len(steps), "decode_policy_seconds": 5e-4 * len(steps)}
    after = {**about, **waited, "decode_events": 10, "decode_hits": 9}
    after |= {"token_bytes": 5_000_000, "state_bytes": 1000}
    taken = {"first": first, "steps": steps, "disk_bytes": 0, "peak_bytes": 1, "forced": True}
    return Round(about, taken, after, 0.0, 1.0, 2.0, ram)


def test_the_figures_of_rounds(cache: Path) -> None:
    """Medians, least and most by hand; each round has the floor of the speed beside it."""
    model = models.make(cache, "thin", None, "q4", set(), sys.executable, "calibrated")
    times, speeds = [8, 10, 20, 5, 10], [1e9, 1e9, 0.5e9, 2e9, 1e9]
    rounds = [
        _round([1e-3 * ms] * 4, 0.1 * number, ram)
        for number, (ms, ram) in enumerate(zip(times, speeds, strict=True))
    ]
    row = row_of(model, None, Scenario(), rounds)
    assert (row["rounds"], row["parts"], row["steps"]) == (5, 5, 20)
    assert [row[f"tokens_per_s{end}"] for end in ("", "_least", "_most")] == [100, 50, 200]
    assert [row[f"ttft_ms{end}"] for end in ("", "_least", "_most")] == [200, 0, 400]
    assert row["floor_ms"] == 5
    assert [row[f"over_floor{end}"] for end in ("", "_least", "_most")] == [2, 1.6, 2]
    assert row["hit_rate"] == 0.9
    # floors of 5 + 5 + 10 + 2.5 + 5 ms of 53 ms; a wait of 1 and a decision of 0.5 ms a step
    assert row["ram_share"] == pytest.approx(27.5 / 53, abs=1e-3)
    assert row["drive_share"] == pytest.approx(5 / 53, abs=1e-3)
    assert row["policy_share"] == pytest.approx(2.5 / 53, abs=1e-3)
    cold = row_of(model, None, Scenario(moment="cold"), rounds)
    assert cold["ttft_ms"] == 2200  # with the start
    on_gpu = row_of(model, None, Scenario(gpu=35), rounds)
    assert "floor_ms" not in on_gpu  # its own memory was not measured


def test_a_long_round_is_cut_into_parts(cache: Path) -> None:
    """One round of 32 steps, of which the last third is slow: five parts, seen in the interval."""
    model = models.make(cache, "thin", None, "q4", set(), sys.executable, "calibrated")
    row = row_of(model, None, Scenario(), [_round([0.01] * 20 + [0.04] * 12, 1.0, 1e9)])
    assert (row["rounds"], row["parts"]) == (1, 5)
    assert (row["tokens_per_s"], row["tokens_per_s_least"]) == (100, 25)
    two = row_of(model, None, Scenario(), [_round([0.01] * 2, 1.0, 1e9)] * 2)
    assert two["parts"] == 4  # no more than it has steps
    with pytest.raises(WorkerFailed, match="no second token"):
        row_of(model, None, Scenario(), [_round([], 1.0, 1e9)])


def test_each_row_gets_its_share_of_the_time() -> None:
    """A long row has more; the last one has what the others left, up to ten minutes."""
    assert limit_of([30, 10], 400) == 300
    assert limit_of([10, 30], 100) == 50  # an equal share is more than its own
    assert limit_of([60, 10, 30], 300) == 180
    assert limit_of([10], 4200) == 600
    assert limit_of([10], -5) == 1


def test_goals_and_what_they_are_short_by() -> None:
    """By place: against llama.cpp's fastest setting, and against the floor of one conversation."""

    def row(program: str, speed: float, **more: Any) -> Row:
        speeds = {"tokens_per_s": speed, "tokens_per_s_least": speed / 2}
        return {**_ROW, "program": program, **speeds, "tokens_per_s_most": 2 * speed, **more}

    ours, capped = row("moeinf", 20.0, **_FLOOR), Scenario(memory=35)
    theirs = [row("llama.cpp", 1.0), row("llama.cpp no-repack", 4.0)]
    found = [(one.goal, str(one.reached)) for one in missed(capped, [ours, *theirs])]
    assert found == [
        ("≥ 10 × llama.cpp", "5.00 (1.25 to 20.00)"),
        ("≤ 1.3 × floor", "1.50 (1.40 to 1.62)"),
    ]
    (one,) = missed(Scenario(), [ours, *theirs])
    assert one.cells()[1:] == ["≤ 1.25 × floor", "1.50 (1.40 to 1.62)", "66%", "0%", "1%", "33%"]
    assert not list(missed(Scenario(batch=2), [ours, *theirs]))
    assert not list(missed(Scenario(), theirs))
    assert times_as_fast([ours]) is None


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
        assert row["rounds"] == 5
        assert row["tokens_per_s_least"] <= row["tokens_per_s"] <= row["tokens_per_s_most"]
        assert row["forced"]
        assert row["tpot_ms_p95"] >= row["tpot_ms_median"] > 0
        assert row["tokens_per_s"] > 0
        # a thin model may be faster: it fits into the processor's caches
        assert row["over_floor"] > 0 < row["ram_share"]
        assert row["token_bytes"] > 1_000_000
        assert row["bits"] == 4.75
    assert ours["RAM, 32+8, batch 1, warm | moeinf"]["hit_rate"] > 0.99
    assert not rows["GPU 35 %, 32+8, batch 1, warm | vLLM"].get("ran")
    again, said = suite(cache)
    assert again == rows
    assert " 0 rows to run" in said
    page = (cache / "out.md").read_text()
    assert page.startswith(f"# {processor()}\n")
    assert re.search(r"^    \| experts \| \d+ \|", page, re.M)  # the goal of 1.25 is missed
    assert (cache / "out.png").stat().st_size > 10_000
