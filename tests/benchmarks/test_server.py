"""The server's measurements, each once on small inputs, with real processes and answers."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.server import memory, start, throughput
from moeinf.cli.commands.models.pull import ensure
from moeinf.cli.output import Output
from moeinf.runtime.config import Settings


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("server")
    ensure("demo:bf16", Settings(home), Output(quiet=True))
    return home


@pytest.mark.linux("reads /proc")
def test_throughput_compares_equal_answers(home: Path) -> None:
    options = argparse.Namespace(
        shares=["35%"], clients=[1, 2], rounds=1, tokens=4, threads=1, shape="demo"
    )
    found = throughput(home, "demo:bf16", options)
    assert list(found) == ["35%"]
    assert list(found["35%"]) == ["1", "2"]
    two = found["35%"]["2"]
    assert two["ratio"] == pytest.approx(two["at_once"] / two["one_after_the_other"], abs=0.02)
    assert two["range"] == [two["ratio"]] * 2


@pytest.mark.linux("reads /proc")
def test_memory_falls_when_the_model_is_unloaded(home: Path) -> None:
    found = memory(home, "demo:bf16")
    assert found["before_MB"] < found["first_unloaded_MB"] < found["first_loaded_MB"]
    assert found["second_loaded_MB"] - found["first_loaded_MB"] < 30


@pytest.mark.linux("reads /proc")
def test_start_waits_for_an_answer() -> None:
    found = start(1)
    assert found["ratio"] == pytest.approx(found["server_s"] / found["imports_s"], rel=0.1)
    assert 0.1 < found["imports_s"] < 60
