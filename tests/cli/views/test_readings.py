"""Test the sentences below the tables of `bench` and `simulate`."""

from __future__ import annotations

from typing import Any

import pytest

from moeinf.cli.views import bench_table, replay_table


def _run(policy: str, tpot: float, read: int, floor: float | None = 1.0) -> dict[str, Any]:
    return {
        "policy": policy,
        "tpot_ms_median": tpot,
        "bytes_read_per_token": read,
        "stall_share": 0.125,
        "floor_ms": floor,
    }


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        (
            [_run("lru", 3, 100), _run("adaptive", 2, 40)],
            "adaptive is the fastest: 1.50 times the tokens/s of lru, with 60% fewer bytes read.",
        ),
        (
            [_run("lru", 2, 100), _run("lfu", 2.5, 99), _run("adaptive", 3, 80)],
            "lru is the fastest: 1.50 times the tokens/s of adaptive, with 25% more bytes read.",
        ),
        (
            [_run("lru", 2, 0), _run("lfu", 3, 0)],
            "lru is the fastest: 1.50 times the tokens/s of lfu.",
        ),
        ([_run("lru", 2, 9), _run("lfu", 2.001, 7)], "All policies are equally fast."),
        (
            [_run("lru", 2, 9)],
            "A token takes 2.0 times the least that RAM and drive allow; "
            "12.5% of the time waits for experts.",
        ),
        ([_run("lru", 2, 9, None)], "12.5% of the time waits for experts."),
    ],
)
def test_bench(runs: list[dict[str, Any]], words: str) -> None:
    assert bench_table.reading(runs) == words


def _results(policy: str, *reads: float, **knobs: Any) -> list[dict[str, Any]]:
    """Return the results of a policy with 10 %, 20 % and so on of the experts."""
    return [
        {"policy": policy, "capacity": share, **knobs, "reads_per_token": one}
        | {"hit_rate": 1 - one / 100}
        for share, one in zip((0.1, 0.2, 0.3), reads, strict=False)
    ]


@pytest.mark.parametrize(
    ("results", "words"),
    [
        (
            [*_results("lru", 50), *_results("adaptive", 19), *_results("belady", 10)],
            "adaptive saves 62% of the reads of lru; the optimum saves 80%.",
        ),
        (
            [
                *_results("lru", 50, 20, 0),
                *_results("lfu", 51, 10, 0),
                *_results("belady", 5, 4, 0),
            ],
            "lfu saves -2% to 50% of the reads of lru; the optimum saves 80% to 90%.",
        ),
        (
            [*_results("lfu", 50, 9), *_results("eamc", 40, 9)],
            "eamc saves 0% to 20% of the reads of lfu.",
        ),
        (
            [*_results("lru", 40), *_results("lfu", 50), *_results("belady", 10)],
            "lru finds 60% of the experts in memory; the optimum saves 75%.",
        ),
        (_results("belady", 10, 5), "belady finds 90% to 95% of the experts in memory."),
        (
            [*_results("lru", 0), *_results("belady", 0)],
            "lru finds 100% of the experts in memory.",
        ),
        (
            [*_results("adaptive", 40, matches=1), *_results("adaptive", 20, matches=3)],
            "adaptive matches=3 saves 50% of the reads of adaptive matches=1.",
        ),
    ],
)
def test_simulate(results: list[dict[str, Any]], words: str) -> None:
    assert replay_table.reading(results) == words
