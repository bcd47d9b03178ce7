"""Test the output of `moeinf bench`, as JSON and as a table."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.cli.conftest import Command

TRACES = Path(__file__).parents[3] / "data" / "traces"
_SHORT = ("--prompt-tokens", "20", "--new-tokens", "8", "--rounds", "2")


def test_json(moeinf: Command) -> None:
    result = moeinf("bench", "demo", *_SHORT, "--policies", "lru,lru", "--memory", "30%", "--json")
    about = json.loads(result.out)
    assert (about["model"], about["tag"]) == ("demo", "bf16")
    assert about["machine"]["cores"] >= 1
    assert about["machine"]["memory_bytes"] > 1 << 28
    assert [run["policy"] for run in about["runs"]] == ["lru", "lru"]
    for run in about["runs"]:
        assert 0 < run["floor_ms"] < run["tpot_ms_median"] <= run["tpot_ms_p95"]
        assert 0 < run["hit_rate"] < 1
        assert run["bytes_read_per_token"] > 0
        assert 0 <= run["stall_share"] < 1
        assert run["ttft_ms"] > 0
        assert run["peak_rss_bytes"] > 10 << 20
        assert run["memory_bytes"] == round(192 * 49152 * 0.3)
        assert run["hits"]["hinted"] == run["hits"]["predicted"] == 0  # lru reads nothing ahead
        assert run["hits"]["cached"] == round(run["hit_rate"] * 8 * 6 * 4)
        assert run["ahead_bytes"] == {"read": 0, "used": 0, "wasted": 0}
        assert run["prefetch_accuracy"] is None
        assert 0 < run["tokens_per_cpu_s"] < 50_000
        assert 0 < run["policy_us_per_token"] < 1e3 * run["tpot_ms_p95"]
    assert result.err == ""


def test_table(moeinf: Command) -> None:
    lines = moeinf("bench", "demo", *_SHORT).out.splitlines()
    assert lines[0] == "demo:bf16, prompt of 20 tokens, 8 decoded, 9.0 MiB for experts"
    assert lines[1].split() == ["POLICY", "TTFT", "TPOT", "TOKENS/S", "HIT", "READ/TOKEN"]
    assert lines[2].split()[0] == "learned"
    assert "100.0%" in lines[2]  # everything resident
    assert re.fullmatch(r"A token takes [\d.]+ times the least .*waits for experts\.", lines[4])


def test_refusals(moeinf: Command) -> None:
    unknown = moeinf("bench", "demo", *_SHORT, "--policies", "lru,magic")
    assert unknown.code == 2
    assert "'magic' is not one of" in unknown.err
    long = moeinf("bench", "demo", "--prompt-tokens", "600")
    assert long.code == 1
    assert "has a context of at most 512 tokens, got 664" in long.err


def test_replay(moeinf: Command, tmp_path: Path) -> None:
    trace = str(tmp_path / "demo.eam")
    assert moeinf("trace", "demo", "--dataset", "demo", "--limit", "3", "--out", trace).code == 0
    options = ("--policies", "lru,adaptive", "--memory", "30%", "--rounds", "1", "--replay", trace)
    about = json.loads(moeinf("bench", "demo", *options, "--hints", "0.9", "--json").out)
    simulated = json.loads(
        moeinf("simulate", trace, "--policies", "lru", "--capacity", "30%", "--json").out
    )["traces"][0]
    assert about["workload"]["new_tokens"] == simulated["tokens"]
    assert about["workload"]["replay"] == simulated["name"]
    assert about["workload"]["hints"] == "0.9"
    lru, adaptive = about["runs"]
    # 30 % gives 57 slots in `bench` and 58 in `simulate`: a plan rounds down.
    assert abs(lru["hit_rate"] - simulated["results"][0]["hit_rate"]) < 0.02
    assert lru["hits"]["hinted"] == 0 <= adaptive["hits"]["hinted"]


def test_some_requests_of_a_replay(moeinf: Command, tmp_path: Path) -> None:
    trace = str(tmp_path / "demo.eam")
    assert moeinf("trace", "demo", "--dataset", "demo", "--limit", "3", "--out", trace).code == 0
    done = moeinf("bench", "demo", "--replay", trace, "--requests", "1", "--json")
    workload = json.loads(done.out)["workload"]
    assert (workload["requests"], workload["rounds"]) == (1, 1)
    every = json.loads(moeinf("bench", "demo", "--replay", trace, "--json").out)["workload"]
    assert (every["requests"], every["rounds"]) == (3, 1)
    assert workload["new_tokens"] < every["new_tokens"]
    assert moeinf("bench", "demo", "--requests", "1").code == 2


def test_replay_refusals(moeinf: Command, tmp_path: Path) -> None:
    assert "--hints needs --replay" in moeinf("bench", "demo", "--hints", "0.9").err
    absent = moeinf("bench", "demo", "--replay", str(tmp_path / "none.eam"))
    assert (absent.code, "none.eam is not a file" in absent.err) == (2, True)
    trace = TRACES / "qwen3-30b-a3b.route.csv.gz"
    other = moeinf("bench", "demo", "--replay", str(trace))
    assert other.code == 1
    assert "48 layers of 128 experts, 6 per token; demo:bf16 has 6 of 32" in other.err
