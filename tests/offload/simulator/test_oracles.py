"""Oracles against the policies that they become without knowledge or with all of it."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from moeinf.offload.policy.table import POLICIES
from moeinf.offload.routing.requests_file import read_requests
from moeinf.offload.simulator.cases import Case, run_case
from moeinf.offload.simulator.clock import TimeModel
from moeinf.offload.simulator.oracles import Histogram, Horizon
from moeinf.offload.simulator.replay import Conditions, MakePolicy, Replay
from scripts import league, league_pages

TRACE = Path(__file__).parents[2] / "data" / "traces" / "deepseek-v2-lite.npz"


def test_oracles_lie_between_lrfu_and_belady() -> None:
    """Two requests: more knowledge is never worth less."""
    whole = read_requests(TRACE).recording()
    routing = whole.select(whole.requests[1:3])
    slots = 333

    def hits(make: MakePolicy) -> float:
        return Replay(routing, make, Conditions(slots)).run().hit_rate

    knowing = [hits(lambda s, h=h: Horizon(s, routing, h)) for h in (0, 1, 4, inf)]
    assert knowing[0] == hits(POLICIES["lrfu"])
    assert knowing == sorted(knowing)
    best = run_case(routing, Case("belady", slots / 1664), TimeModel()).hit_rate
    assert best - 0.03 < knowing[-1] <= best
    request, task = (hits(lambda s, t=t: Histogram(s, routing, t)) for t in (False, True))
    assert knowing[0] < task <= request < knowing[-1]


def test_a_result_goes_to_the_file_and_the_page_and_back(tmp_path: Path) -> None:
    rows = [league.measured(("qwen3-30b-a3b", name, 0.2), 1) for name in ("lru", "belady", "sieve")]
    assert rows[0].hit_rate == pytest.approx(74.1, abs=0.05)
    assert rows[0].low == rows[0].high == pytest.approx(rows[0].hit_rate, abs=0.01)
    league.write(tmp_path / "league.csv", rows)
    found = league.read(tmp_path / "league.csv")
    assert set(found.values()) == set(rows)
    page = tmp_path / "league.md"
    page.write_text(f"Words\n\n{league_pages.START}\nold")
    league_pages.tabulate(found, page)
    lines = page.read_text().splitlines()
    assert lines[0] == "Words"
    assert "old" not in lines
    assert [line.split(" | ")[0] for line in lines[-3:]] == ["| belady", "| lru", "| sieve"]
    assert lines[-2].split(" | ")[2] == lines[-2].split(" | ")[-1].strip(" |") == "0.00"
    assert lines[-3].split(" | ")[2] == "1.00"
