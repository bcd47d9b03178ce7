"""The measurements of `moeinf bench`, on the demo."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import pytest

from moeinf.runtime.config import Settings
from moeinf.runtime.jobs.bench import (
    bench,
    decode,
    prefill,
    processor,
    prompt_of,
    report,
    token_bytes,
)
from moeinf.runtime.machine.memory import core_count
from moeinf.runtime.placement.bandwidth import Speeds
from tests.conftest import Open

_D, _F, _VOCAB, _LAYERS, _EXPERTS, _K = 128, 64, 272, 6, 32, 4


def test_bytes_of_a_token(open_engine: Open) -> None:
    """By hand: four projections, four norms and a router per layer, a final norm and the head."""
    found = token_bytes(open_engine("demo:bf16", context=64), context=10)
    dense = _LAYERS * (4 * _D * _D + 4 * _D + _EXPERTS * _D) + _D + _VOCAB * _D
    assert found.dense == 2 * dense
    assert found.experts == 2 * _LAYERS * _K * 3 * _D * _F
    assert found.kv == 2 * 10 * _LAYERS * 2 * _D
    assert found.total == found.dense + found.experts + found.kv


@pytest.mark.parametrize("tokens", [1, 40, 400])
def test_prompt_of_any_length(open_engine: Open, tokens: int) -> None:
    prompt = prompt_of(open_engine(context=64), tokens)
    assert len(prompt) == tokens
    assert len(set(prompt)) >= min(tokens, 15)


def test_greedy_and_forced_passes_agree(open_engine: Open) -> None:
    engine = open_engine("demo:f32", context=64)
    prompt, taken = prompt_of(engine, 12), []
    state = engine.new_state()
    logits, _ = prefill(engine, state, prompt)
    for _ in range(5):
        taken.append(int(np.argmax(logits)))
        logits, seconds = decode(engine, state, logits, 1)
        assert len(seconds) == 1
    other = engine.new_state()
    first, _ = prefill(engine, other, prompt)
    forced, seconds = decode(engine, other, first, 5, taken)
    assert (state.length, other.length, len(seconds)) == (17, 17, 5)
    np.testing.assert_array_equal(forced, logits)


def test_report(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine("demo:bf16", memory="20%", context=64)
    measured = bench(engine, prompt_tokens=20, new_tokens=6, rounds=2)
    assert (len(measured.prefill_seconds), len(measured.step_seconds)) == (2, 12)
    assert measured.decode.decode_events == 6 * _LAYERS * _K
    settings = Settings(engine.info.folder.parents[2])
    disk = "moeinf.runtime.jobs.bench.measure"
    monkeypatch.setattr(disk, lambda *_: Speeds(0.0, 1e6, "", ""))
    monkeypatch.setattr(type(engine.threads), "decoding", 7)
    run = report(engine, settings, measured)
    assert (run["threads"], run["decode_threads"]) == (engine.info.threads, 7)
    assert 0 < measured.cpu_seconds <= 2 * core_count() * sum(measured.step_seconds[-6:])
    assert run["tokens_per_cpu_s"] == round(6 / measured.cpu_seconds, 3)
    read = measured.decode.decode_bytes_read / 6
    assert run["policy"] == "learned"
    assert run["bytes_read_per_token"] == round(read) > 0
    # the disk is the bottleneck
    assert run["floor_ms"] == pytest.approx(read / 1e6 * 1e3, abs=1e-3)
    assert 0 < run["tpot_ms_median"] <= run["tpot_ms_p95"]
    assert 0 < run["hit_rate"] < 1
    assert 0 < run["stall_share"] < 1
    assert run["ram_bytes_per_s"] > 1e8
    monkeypatch.setattr(disk, lambda *_: Speeds(0.0, 1e15, "", ""))
    monkeypatch.setattr("moeinf.runtime.jobs.bench.read_ceiling", lambda _: 1e6)
    context = 20 + 6 // 2
    assert report(engine, settings, measured)["floor_ms"] == pytest.approx(
        token_bytes(engine, context).total / 1e6 * 1e3
    )


def test_the_processor_is_named_as_lscpu_does(tmp_path: Path) -> None:
    """Its family and model tell processors of one name apart; without them the name is enough."""
    path = tmp_path / "cpuinfo"
    path.write_text(
        "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\n\n"
        "processor\t: 1\ncpu family\t: 6\nmodel\t\t: 2\nmodel name\t: another\n"
    )
    assert processor(path) == "AMD EPYC (family 25, model 1)"
    path.write_text("processor\t: 0\nBogoMIPS\t: 50.00\nCPU part\t: 0xd40\n")
    assert processor(path) == (platform.processor() or platform.machine())
    assert processor(tmp_path / "none") == processor(path)
