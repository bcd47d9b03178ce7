"""Test `moeinf simulate` on the command line."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from moeinf.cli.commands.measuring.simulate import simulate
from moeinf.cli.output import Advance, Output
from moeinf.offload.routing.recording_file import recording_to_bytes
from moeinf.offload.routing.trace import PassBuilder, Recording, RoutingShape
from tests.cli.conftest import Command


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Record eight requests of two kinds, which use different halves of the experts."""
    shape = RoutingShape(layers=3, experts=8, top_k=2, expert_bytes=1000)
    recording, random = Recording("two", shape), np.random.default_rng(0)
    for request in range(8):
        kind = request % 2
        recording.labels[request] = "ab"[kind]
        for step in range(6):
            rows = np.full(1 if step else 5, request)
            builder = PassBuilder(shape, rows, "decode" if step else "prefill")
            for layer in range(3):
                ids = [4 * kind + random.permutation(4)[:2] for _ in rows]
                builder.routed(layer, np.array(ids))
            recording.add(builder.end())
    path = tmp_path / "two.eam"
    path.write_bytes(recording_to_bytes(recording))
    return path


def test_json(moeinf: Command, recorded: Path) -> None:
    run = moeinf("simulate", str(recorded), "--capacity", "25%,100%", "--json")
    assert run.code == 0, run.err
    document = json.loads(run.out)
    (trace,) = document["traces"]
    assert (trace["name"], trace["layers"], trace["experts"], trace["top_k"]) == ("two", 3, 8, 2)
    assert trace["tokens"] == 40
    assert {r["policy"] for r in trace["results"]} == {"lru", "lfu", "eamc", "adaptive", "belady"}
    assert document["time_model"]["ram_over_link"] == 8
    for result in trace["results"]:
        if result["capacity"] == 1:  # all fit: each is read once and never evicted
            assert result["hit_rate"] > 0.9
        assert result["bytes_read_per_token"] == pytest.approx(
            1000 * result["reads_per_token"], abs=1
        )


def test_the_bar_counts_every_pass_of_every_policy(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 requests of 6 passes, two policies, two capacities: 192 passes, reported as they run."""
    stream, told = io.StringIO(), list[int]()
    monkeypatch.setattr("moeinf.offload.simulator.replay._TELL_EVERY", 20)

    class Terminal(Output):
        def __init__(self, json: bool = False, quiet: bool = False) -> None:
            super().__init__(json, quiet)
            self.err = Console(file=stream, force_terminal=True, width=120)

        @contextmanager
        def counting(self, what: str, total: int) -> Iterator[Advance]:
            with super().counting(what, total) as advance:

                def counted(steps: int = 1) -> None:
                    told.append(steps)
                    advance(steps)

                yield counted

    monkeypatch.setattr("moeinf.cli.commands.measuring.simulate.Output", Terminal)
    simulate([recorded], policies="lru,eamc", capacity="25%,50%")
    assert told == [20, 20, 8] * 4
    assert "simulating two" in stream.getvalue()
    assert "192/192" in stream.getvalue()
    shown = stream.getvalue()
    simulate([recorded], policies="lru", capacity="25%", json=True)
    simulate([recorded], policies="lru", capacity="25%", quiet=True)
    assert stream.getvalue() == shown


def test_table_sweep_shift_and_interleave(moeinf: Command, recorded: Path) -> None:
    options = ["--policies", "adaptive", "--capacity", "25%", "--sweep", "eamc_capacity=1,4"]
    run = moeinf("simulate", str(recorded), *options, "--shift", "a,b", "--interleave", "2")
    assert run.code == 0, run.err
    assert run.out.splitlines()[0].startswith("two a,b x2: 3 layers x 8 experts, 2 per token; 40")
    assert "adaptive eamc_capacity=4    25%" in run.out


def test_recorded_requests_of_a_model(moeinf: Command, tmp_path: Path) -> None:
    """Two requests of an `.npz` file: decode tokens are counted, and labels have families."""
    path = tmp_path / "some.npz"
    ids = np.array([[[0, 1]], [[1, 2]], [[1, 2]], [[3, 0]]], np.uint8)
    labels = np.array(["mmlu:law", "gpqa:physics"])
    np.savez(path, ids=ids, offsets=[0, 3, 4], prompt_len=[1, 0], label=labels, expert_bytes=10)
    options = ["--policies", "lru", "--capacity", "100%", "--json"]
    for more, tokens, rate in (([], 3, 4 / 6), (["--shift", "gpqa,mmlu"], 3, 3 / 6)):
        run = moeinf("simulate", str(path), *options, *more)
        assert run.code == 0, run.err
        trace = json.loads(run.out)["traces"][0]
        assert (trace["tokens"], trace["experts"], trace["top_k"]) == (tokens, 4, 2)
        assert trace["results"][0]["hit_rate"] == pytest.approx(rate, abs=1e-4)
        assert trace["results"][0]["bytes_read_per_token"] == round((6 - 6 * rate) * 10 / tokens)
    path.write_bytes(b"PK")
    run = moeinf("simulate", str(path))
    assert run.code == 1
    assert "some.npz is not a route trace" in run.err


def test_hints_and_late_events(moeinf: Command, recorded: Path) -> None:
    options = ["--policies", "adaptive", "--capacity", "50%", "--json"]
    stalls = []
    for more in ([], ["--hints", "1,1"], ["--late"]):
        run = moeinf("simulate", str(recorded), *options, *more)
        stalls.append(json.loads(run.out)["traces"][0]["results"][0]["stall_ms_per_token"])
    plain, hinted, _late = stalls
    assert hinted < plain


DEVICE = ["--policies", "lru", "--capacity", "50%,100%", "--device-capacity", "25%"]


def test_a_device(moeinf: Command, recorded: Path) -> None:
    """Check slots, misses and speeds of a device: the cost of each way, and the table."""
    speeds = ["--bus-speed", "10GB", "--cpu-speed", "30GB/s", "--device-speed", "1TB"]
    options = [*DEVICE, "--miss", "compute,fetch, auto", *speeds]
    run = moeinf("simulate", str(recorded), *options, "--json")
    assert run.code == 0, run.err
    document = json.loads(run.out)
    model, results = document["time_model"], document["traces"][0]["results"]
    assert (model["bus_bytes_per_s"], model["device_bytes_per_s"]) == (1e10, 1e12)
    assert model["fetched_share"] == 0.25
    assert [(r["miss"], r["capacity"]) for r in results] == [
        (miss, share) for miss in ("compute", "fetch", "auto") for share in (0.5, 1)
    ]
    for result in results:
        assert result["device_capacity"] == 0.25
        assert result["hit_rate"] == pytest.approx(
            result["device_hit_rate"] + result["host_hit_rate"], abs=1e-4
        )
        assert (result["cpu_share"] == 0) == (result["miss"] == "fetch")
        assert 0 < result["floor_ms_per_token"] <= result["ms_per_token"]
    fetched = next(r for r in results if r["miss"] == "fetch")
    assert fetched["bus_bytes_per_token"] == pytest.approx(
        6 * 1000 * (1 - fetched["device_hit_rate"]), abs=1
    )
    table = moeinf("simulate", str(recorded), *options).out
    assert table.splitlines()[1].split()[:4] == ["POLICY", "CAPACITY", "DEVICE", "MISS"]
    assert "lru       50%         25%       compute" in table


def test_without_a_device_nothing_is_said_of_one(moeinf: Command, recorded: Path) -> None:
    run = moeinf("simulate", str(recorded), "--policies", "lru", "--json")
    document = json.loads(run.out)
    said = {*document["time_model"], *document["traces"][0]["results"][0]}
    assert not [name for name in said if "device" in name or "bus" in name or "floor" in name]
    assert "DEVICE" not in moeinf("simulate", str(recorded), "--policies", "lru").out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--policies", "best"], "--policies: 'best' is invalid"),
        (["--capacity", "0%"], "'0%' is invalid"),
        (["--sweep", "bogus=1"], "unknown knob bogus"),
        (["--hints", "recorded"], "was recorded without hints"),
        (["--miss", "fetch"], "--miss needs --device-capacity"),
        (["--bus-speed", "9GB"], "--bus-speed needs --device-capacity"),
        ([*DEVICE, "--miss", "best"], "--miss: 'best' is invalid"),
        ([*DEVICE, "--late"], "cannot be combined"),
        ([*DEVICE, "--cpu-speed", "fast"], "'fast' is invalid"),
        ([*DEVICE, "--cpu-speed", "0GB"], "the speed must be above 0"),
        (["--device-capacity", "8GB"], "'8GB' is invalid"),
        (["--shift", "a,c"], "no request is labelled 'c'; two has a, b"),
    ],
)
def test_wrong_usage(moeinf: Command, recorded: Path, options: list[str], words: str) -> None:
    run = moeinf("simulate", str(recorded), *options)
    assert (run.code, run.out) == (2, "")
    assert words in run.err


def test_not_a_trace(moeinf: Command, tmp_path: Path) -> None:
    path = tmp_path / "x.eam"
    path.write_bytes(b"nonsense")
    run = moeinf("simulate", str(path))
    assert run.code == 1
    assert "recording" in run.err


def test_a_picture(moeinf: Command, recorded: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.png"
    options = [*DEVICE, "--miss", "auto,fetch", "--plot", str(picture)]
    assert moeinf("simulate", str(recorded), *options).code == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_a_picture_names_the_optimum(moeinf: Command, recorded: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.svg"  # matplotlib writes every text as a comment, too
    options = ["--policies", "lru,belady", "--capacity", "50%,100%", "--plot", str(picture)]
    assert moeinf("simulate", str(recorded), *options).code == 0
    assert "<!-- optimal (belady) -->" in picture.read_text()
    assert "<!-- belady -->" not in picture.read_text()


def test_without_matplotlib_one_line_says_what_to_install(recorded: Path, tmp_path: Path) -> None:
    import subprocess

    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from moeinf.cli.main import answer; sys.exit(answer(sys.argv[1:]))"
    )
    options = ["simulate", str(recorded), "--policies", "lru", "--plot", str(tmp_path / "o.png")]
    run = subprocess.run(
        [sys.executable, "-c", program, *options], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert "moeinf[bench]" in run.stderr
