"""Test that tables fit a terminal of 80 columns, with six columns unless --verbose is given."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest
from rich.cells import cell_len

pytest.importorskip("termios", reason="needs pseudo-terminals, which Windows lacks")

from tests.cli.chat.test_terminals import in_terminal
from tests.cli.conftest import Command

TRACES = Path(__file__).parents[1] / "data" / "traces"
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
_BENCH = ("bench", "demo", "--prompt-tokens", "8", "--new-tokens", "4", "--policies", "lru,lfu")
_GPU = ("--device-capacity", "10%", "--miss", "auto", "--policies", "lru")
_SWEEP = ("--policies", "adaptive", "--sweep", "hysteresis=0.25,0.5", "--sweep", "matches=1")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the start of Qwen3-30B-A3B's recorded answer, a small file."""
    return _routed(tmp_path_factory.mktemp("trace") / "qwen3.csv", phase="1")


def _routed(path: Path, phase: str) -> Path:
    """Write the first rows of a phase: 0 is the prompt, 1 the answer."""
    with gzip.open(TRACES / "qwen3-30b-a3b.route.csv.gz", "rt") as file:
        lines = file.readlines()
    about = [line for line in lines if line.startswith(("#", "turn"))]
    rows = [line for line in lines if line.startswith(f"0,{phase},")]
    path.write_text("".join(about + rows[: 8 * 48 * 6]))
    return path


def shown(home: Path, *arguments: str) -> list[str]:
    """Return the lines on a terminal of 80 columns, with the last state of a progress bar."""
    code, text = in_terminal(home, 80, *arguments)
    assert code == 0, text
    lines = _CONTROL.sub("", text).replace("\r\n", "\n").split("\n")
    return [line.split("\r")[-1] for line in lines]


def assert_fits(lines: list[str]) -> None:
    assert [line for line in lines if cell_len(line) > 80] == []


def headers(lines: list[str], first: str) -> list[list[str]]:
    return [re.split(r"  +", line) for line in lines if line.startswith(f"{first} ")]


def test_bench(demo_home: Path) -> None:
    lines = shown(demo_home, *_BENCH)
    assert_fits(lines)
    assert headers(lines, "POLICY") == [["POLICY", "TTFT", "TPOT", "TOKENS/S", "HIT", "READ/TOKEN"]]
    assert [line for line in lines if line.startswith(("HIT: ", "TPOT: "))] == [
        "TPOT:       time per output token, the median",
        "HIT:        experts found in memory while decoding",
    ]
    lines = shown(demo_home, *_BENCH, "--verbose")
    assert_fits(lines)
    names = [name for header in headers(lines, "POLICY") for name in header if name != "POLICY"]
    assert names == (
        "TTFT|TPOT|TOKENS/S|HIT|READ/TOKEN|P95|FIRST TTFT|STALL|FLOOR|HINTED|PREDICTED|AHEAD USED|"
        "PER CPU S|DECIDING|MEMORY|PEAK RSS"
    ).split("|")
    assert all(any(line.startswith(f"{name}: ") for line in lines) for name in names)


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ((), ["CAPACITY", "HIT", "READS/TOKEN", "MB/TOKEN", "STALL-MS"]),
        (_GPU, ["CAPACITY", "DEVICE", "MISS", "HIT", "MS/TOKEN"]),
        (_SWEEP, None),
        (("--verbose",), None),
        ((*_GPU, "--verbose"), None),
    ],
    ids=["plain", "gpu", "sweep", "verbose", "gpu-verbose"],
)
def test_simulate(
    options: tuple[str, ...], columns: list[str] | None, trace: Path, demo_home: Path,
    moeinf: Command,
) -> None:  # fmt: skip
    """No line is too long, and no word is cut: a pipe gets the same words."""
    run = ["simulate", str(trace), "--capacity", "5%,20%", *options]
    lines = shown(demo_home, *run)
    assert_fits(lines)
    if columns is not None:
        assert headers(lines, "POLICY") == [["POLICY", *columns]]
    piped = moeinf(*run).out
    bar = next(i for i, line in enumerate(lines) if line.startswith("qwen3: "))
    assert set(" ".join(lines[bar:]).split()) == set(piped.split())


def test_a_simulation_is_read_and_its_columns_explained(moeinf: Command, trace: Path) -> None:
    run = ["simulate", str(trace), "--capacity", "4%,20%", "--policies", "lru,adaptive,belady"]
    table, words, legend = moeinf(*run).out.split("\n\n")
    assert len(table.splitlines()) == 2 + 6
    first, second = words.splitlines()
    assert re.fullmatch(
        r"\w+ (saves|finds) .* of the .*; the optimum saves \d+% to \d+%\.", first
    ), first
    assert second == "lru's cliff: 4.7% capacity; with less, a token uses more experts than fit"
    assert [line.partition(":")[0] for line in legend.splitlines()] == [
        "CAPACITY", "HIT", "READS/TOKEN", "MB/TOKEN", "STALL-MS", "belady",
    ]  # fmt: skip
    assert moeinf(*run, "--quiet").out == table + "\n\n"


@pytest.mark.parametrize("options", [(), _GPU], ids=["plain", "gpu"])
def test_a_recording_of_a_prompt_alone(
    options: tuple[str, ...], moeinf: Command, tmp_path: Path
) -> None:
    run = moeinf("simulate", str(_routed(tmp_path / "prompt.csv", phase="0")), *options)
    assert run.code == 0, run.err
    assert "The recording has no decode tokens, so there is nothing to count.\n" in run.out


@pytest.mark.parametrize("arguments", [["list"], ["search"], ["eamc", "show", "demo"], ["ps"]])
def test_other_tables(arguments: list[str], demo_home: Path) -> None:
    assert_fits(shown(demo_home, *arguments))


def test_search_is_one_table(demo_home: Path) -> None:
    columns = ["NAME", "PARAMETERS", "DISK", "DOWNLOAD", "LICENCE"]
    assert headers(shown(demo_home, "search"), "NAME") == [columns]
