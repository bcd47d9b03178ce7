"""Test `moeinf simulate --replicas`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Command

TRACE = str(Path(__file__).parents[3] / "data/traces/gpt-oss-20b.npz")
FEW = ["--policies", "lru", "--capacity", "50%", "--conversations", "3", "--replicas"]


def test_every_router_serves_the_same_requests(moeinf: Command, tmp_path: Path) -> None:
    plot = tmp_path / "cluster.png"
    run = moeinf("simulate", TRACE, *FEW, "1,2", "--json", "--plot", str(plot))
    assert run.code == 0, run.err
    (trace,) = json.loads(run.out)["traces"]
    assert [(r["replicas"], r["router"]) for r in trace["results"]] == [
        (n, router) for n in (1, 2) for router in ("random", "session", "prefix", "experts")
    ]
    assert len({(r["replicas"], r["requests"]) for r in trace["results"]}) == 2
    alone = [r for r in trace["results"] if r["replicas"] == 1]
    assert len({(r["hit_rate"], r["wait_p99_s"], r["tokens_per_s"]) for r in alone}) == 1
    for result in trace["results"]:
        assert 0.3 < result["hit_rate"] < 1
        assert sum(result["decisions"].values()) == result["requests"]
        assert 1 <= result["imbalance"] <= result["replicas"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_table(moeinf: Command) -> None:
    run = moeinf("simulate", TRACE, *FEW, "2", "--router", "prefix,random")
    assert run.code == 0, run.err
    lines = run.out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["ROUTER", "prefix", "random"]
    assert "50%" in lines[2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--replicas", "0"], "--replicas"),
        (["--replicas", "2", "--router", "best"], "--router"),
        (["--router", "prefix"], "--router needs --replicas"),
        (["--replicas", "2", "--late"], "--replicas takes only"),
        (["--replicas", "2", "--load", "0"], "load must be"),
    ],
)
def test_wrong_usage(moeinf: Command, options: list[str], words: str) -> None:
    run = moeinf("simulate", TRACE, *options)
    assert run.code == 2
    assert words in run.err


def test_only_files_of_requests(moeinf: Command, tmp_path: Path) -> None:
    (tmp_path / "x.eam").write_bytes(b"")
    run = moeinf("simulate", str(tmp_path / "x.eam"), "--replicas", "2")
    assert run.code == 2
    assert ".npz" in run.err
