"""Calibrated routing, memory groups and the measurements built on them, on tiny shapes."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import capped
from benchmarks.at_once import AtOnce
from benchmarks.calibrated import Calibration, bfloat16, calibrated, embeddings, tokens
from benchmarks.capped import Program, Side, fate, race
from benchmarks.cgroup import MemoryGroup, NoMemoryGroup
from benchmarks.context import measure as measure_context
from benchmarks.curves import comparable, curve, hint_recall, record, repeats, table
from benchmarks.overhead import measure as measure_overhead
from benchmarks.report import capped_markdown
from benchmarks.shapes import shape
from benchmarks.worker import Worker
from moeinf.runtime.checkpoints.checkpoint import read_header
from moeinf.runtime.config import EngineConfig
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.library.manifest import DENSE
from moeinf.runtime.machine.disk_bench import WHOLE_BLOCKS, Reading
from moeinf.runtime.machine.measurements import Drive, remember, remembered_drive
from moeinf.runtime.placement.bandwidth import drive_now
from moeinf.runtime.sizes import parse_memory

_TINY = {
    **shape("olmoe", layers=3, experts=16),
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_LOCAL = Calibration(topics=8)
_ELSEWHERE = Calibration(topics=8, shared=0.0, stay=0.0, recent=0.0)
_ALL = parse_memory("100%")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_embeddings_have_topics() -> None:
    rows = embeddings(_LOCAL, 0, 4 * _LOCAL.topics, 2048)
    assert np.sqrt(np.mean(rows**2)) == pytest.approx(_LOCAL.scale, rel=0.02)
    like = np.corrcoef(rows)
    assert like[0, _LOCAL.topics] == pytest.approx(_LOCAL.shared, abs=0.07)
    assert abs(like[0, 1]) < 0.08
    np.testing.assert_array_equal(rows[5:7], embeddings(_LOCAL, 5, 2, 2048))


def test_a_text_stays_in_its_topic_and_repeats_its_words() -> None:
    text = tokens(_LOCAL, 50304, 4000)
    topics = np.array(text) % _LOCAL.topics
    stays = np.mean(topics[1:] == topics[:-1])
    assert stays == pytest.approx(_LOCAL.stay + (1 - _LOCAL.stay) / _LOCAL.topics, abs=0.015)
    known = np.mean([token in text[max(0, i - 8) : i] for i, token in enumerate(text)])
    assert 0.2 < known < _LOCAL.recent + 0.02
    assert text == tokens(_LOCAL, 50304, 4000) != tokens(_LOCAL, 50304, 4000, seed=1)


def test_bfloat16_rounds_to_the_nearest() -> None:
    values = np.array([1.0, -2.5, 1.00390625, 1.01171875, 3e-39], np.float32)
    assert bfloat16(values).tolist() == [0x3F80, 0xC020, 0x3F80, 0x3F82, 0x0021]


def test_topics_make_routing_local(cache: Path) -> None:
    """Topics give more hits than unrelated tokens, and the model contains our embedding."""
    found = []
    for calibration in (_LOCAL, _ELSEWHERE):
        model = calibrated(cache, "tiny", _TINY, calibration)
        text = tokens(calibration, 512, 80)
        found.append(record(model, "bf16", text[:16], text[16:]))
    local, elsewhere = found
    assert local.decode_tokens == 64
    assert curve(local, "lru")[0.35] > curve(elsewhere, "lru")[0.35] + 0.15
    assert repeats(local) > repeats(elsewhere) + 0.15
    assert 0.3 < hint_recall(local) <= 1
    assert comparable(local) == [0.2, 0.35, 0.6]
    assert "Farthest from either trace: 0.0 points" in table([local], [local])
    tensor = read_header(model.folder("bf16") / DENSE)["model.embed_tokens.weight"]
    bits = np.fromfile(tensor.path, np.uint16, 64, offset=tensor.offset)
    np.testing.assert_array_equal(bits, bfloat16(embeddings(_ELSEWHERE, 0, 1, 64))[0])


def _limited(command: list[str], limit_bytes: int) -> tuple[str, bool]:
    try:
        group = MemoryGroup(limit_bytes)
    except NoMemoryGroup as error:
        pytest.skip(str(error))
    with group:
        try:
            with Worker(group.command(command)) as worker:
                return str(worker.greeting), group.killed
        except RuntimeError as error:
            return str(error), group.killed


def test_a_group_counts_and_ends_what_is_too_large() -> None:
    script = "b = bytearray({} << 20); b[::4096] = b'x' * len(b[::4096]); print('{{\"ok\": 1}}')"
    small = [sys.executable, "-c", script.format(8)]
    large = [sys.executable, "-c", script.format(200)]
    assert _limited(small, 64 << 20) == ("{'ok': 1}", False)
    text, killed = _limited(large, 64 << 20)
    assert "exit code -9" in text
    assert killed
    with MemoryGroup(1 << 30) as group:
        with Worker(group.command(small)):
            assert (group.peak_bytes or 8 << 20) >= 8 << 20
        group.lower(32 << 20)


def test_no_memory_controller_is_said(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/a\n2:cpu:/\n0::/b\n")
    with pytest.raises(NoMemoryGroup, match=r"cannot be limited here .*memory: No such file"):
        MemoryGroup(1 << 30, tmp_path)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)  # a mount without the memory controller
    with pytest.raises(NoMemoryGroup, match=r"memory\.max: No such file"):
        MemoryGroup(1 << 30, tmp_path)
    assert not list((tmp_path / "sys/fs/cgroup").iterdir())


def _ours(cache: Path) -> Program:
    model = calibrated(cache, "tiny", _TINY, _LOCAL)
    model.ours("bf16")
    where = [os.fspath(model.settings.home), f"{model.name}:bf16", "--memory", "50%"]
    sizes = ["--threads", "1", "--context", "128"]
    command = [sys.executable, "-m", "benchmarks.ours", *where, *sizes]
    return Program(command, model.folder("bf16"))


@pytest.mark.linux("reads /proc")
@pytest.mark.full
def test_a_capped_race(cache: Path) -> None:
    """A race against moeinf itself without a limit: the turns, the sums and the table."""
    text = tokens(_LOCAL, 512, 40)
    program = _ours(cache)
    with Side(program, None) as mine, Side(program, None) as other:
        found = race(mine, other, text[:8], text[8:], every=8)
        found["about"] = mine.worker.ask("about")
    assert len(mine.seconds) == 32
    assert found["ours"]["tokens_per_s"] == found["ours"]["tokens_per_s_first_32"]
    ratio = found["ours"]["tokens_per_s"] / found["peer"]["tokens_per_s"]
    assert found["times_as_fast"] == pytest.approx(ratio, abs=0.01)
    assert 0 < found["about"]["hit_rate"] < 1
    found["floor_ms"] = {"ram": 1.0, "disk": 2.0, "at_once": 3.0}
    assert found["turns"]["count"] == 4
    assert found["turns"]["least"] <= ratio <= found["turns"]["most"]
    fates = {"no-repack": "", "no-mmap": "killed at the limit"}
    share = {"share": 0.5, "limit_bytes": 1 << 30, "fates": fates, "races": {"no-repack": found}}
    about = {"command": "capped", "machine": {"cpu": "A CPU"}, "shares": [share]}
    first, _, *rows = capped_markdown(about).splitlines()
    assert first == "`capped`, A CPU"
    assert len(rows) == 4
    assert rows[2].count("|") == rows[0].count("|") == rows[1].count("|")
    assert rows[2].endswith("| 1 ms RAM, 2 ms disk, 3 ms both at once |")
    assert rows[3].startswith("| 1.0 GiB | 50% | no-mmap | killed at the limit |")
    missing = Program([sys.executable, "-c", "raise SystemExit(5)"], program.files)
    try:
        assert "exit code 5" in fate(missing, 1 << 30, text)
    except NoMemoryGroup as error:
        pytest.skip(str(error))


def test_a_capped_floor_is_of_the_same_run(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its drive is measured beside the race: a stored speed, here 1 byte/s, does not count."""
    model = calibrated(cache, "tiny", _TINY, _LOCAL)
    manifest = model.ours("bf16")
    stored = Drive(Reading(4, WHOLE_BLOCKS, False, 1.0, 4), True, 4096, "2026-11-20T10:00:00+00:00")
    remember(model.settings, drive=(model.folder("bf16"), stored))
    monkeypatch.setattr(capped, "limit_bytes", lambda *_: None)  # no control group is needed
    options = argparse.Namespace(
        tag="bf16", routing="calibrated", prompt=8, tokens=16, text=0, slice=8, less=0, peers=[],
        policy="lru", threads=1,
    )  # fmt: skip
    found = capped.capped(options, model, 0.3)["races"]["alone"]
    read, speeds = found["ours"]["disk_bytes_per_token"], found["bytes_per_s"]
    assert speeds["disk"] > 1e6
    assert speeds["ram"] > 1e6
    assert found["floor_ms"]["disk"] == pytest.approx(1e3 * read / speeds["disk"], abs=0.01)
    both = AtOnce(**found["at_once"])
    expected = 1e3 * both.seconds(found["about"]["token_bytes"], read)
    assert found["floor_ms"]["at_once"] == pytest.approx(expected, abs=0.01)
    assert remembered_drive(model.settings, model.folder("bf16")) == stored
    assert 0 < drive_now(model.folder("bf16"), manifest) < float("inf")


def test_context_and_overhead(cache: Path) -> None:
    model = calibrated(cache, "tiny", _TINY, _LOCAL)
    manifest = model.ours("bf16")
    config = EngineConfig(memory=_ALL, context=300, threads=1)
    with Engine.open(manifest, model.folder("bf16"), config, model.settings) as engine:
        context = measure_context(engine, [4, 64, 280], rounds=2, every=4)
        cost = measure_overhead(engine, tokens(_LOCAL, 512, 64 + 2 * 3 * 8), every=8)
    assert context["planned_bytes"] == 284 * 3 * 2 * 64 * 2  # tokens, layers, planes, width, bf16
    assert set(context["ms"]) == {4, 64, 280}
    assert context["grown_bytes"] >= 0
    assert cost["tokens"] == 5 * 8  # six slices, of which the first is the warm-up
    assert 0 < cost["share"] < 1
    assert cost["share"] == pytest.approx(cost["tracing_share"] + cost["deciding_share"], abs=2e-5)
    assert cost["hit_rate"] == 1


@pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None
    or importlib.util.find_spec("transformers") is None,
    reason="the Python packages transformers and accelerate are not installed",
)
def test_accelerate_computes_the_same(cache: Path) -> None:
    """From disk, its results equal ours, so the race is fair."""
    model = calibrated(cache, "tiny", _TINY, _LOCAL)
    where = [os.fspath(model.huggingface()), "--folder", os.fspath(cache / "offload")]
    sizes = ["--threads", "1", "--context", "64", "--setting", "disk"]
    theirs = [sys.executable, "-m", "benchmarks.peers.accelerate", *where, *sizes]
    text, found = tokens(_LOCAL, 512, 24), []
    for command in (_ours(cache).command, theirs):
        with Worker(command) as worker:
            worker.ask("prefill", text[:20])
            worker.ask("decode", text[20:])
            found.append(worker.ask("logits")["logits"])
    assert any((cache / "offload").iterdir())
    assert np.corrcoef(*found)[0, 1] > 0.995
