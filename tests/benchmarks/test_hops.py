"""Test the messages of a model over several machines: each one takes its delay."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.hops import SHAPES, Shape, rates, token_s

SMALL = Shape(layers=3, experts=2, top_k=1, hidden=8, dense_gb=1.0, expert_gb=1.0)
DELAY_S = 0.02


@pytest.mark.parametrize(
    ("kind", "messages"),
    [("sharded", 2 * SMALL.layers), ("pipeline", 3)],  # in a row, with three machines
)
def test_messages_in_a_row(kind: str, messages: int) -> None:
    took_s = token_s(kind, SMALL, 3, DELAY_S, 2)
    assert took_s >= messages * DELAY_S
    assert token_s(kind, SMALL, 3, 0.0, 2) < took_s


def test_the_arithmetic() -> None:
    about = argparse.Namespace(machines=2, memory=4.0, ram=10.0, drive=1.0, hits=[0.5])
    found = rates(SMALL, {"sharded": 0.35, "pipeline": 0.1}, about)
    assert found == {
        "fits": True,  # 1 + 3 · 2 GB into 2 · 4 GB
        "replicas_0.5": {"one_stream": 0.53, "streams": 1.05},  # 1 / (0.4 + 1.5) s
        "sharded": {
            "one_stream": 1.67,
            "streams": 2.67,
        },  # 1 / (0.1 + 0.15 + 0.35), 2 / (0.4 + 0.35)
        "pipeline": {"one_stream": 2.0, "streams": 4.0},  # 1 / (0.4 + 0.1) s
    }


def test_the_sizes_of_the_shapes() -> None:
    assert SHAPES["qwen3-235b-a22b"].gigabytes == pytest.approx(235 * 4.5 / 8, rel=0.03)
    assert SHAPES["deepseek-v3"].gigabytes == pytest.approx(671 * 4.5 / 8, rel=0.03)
