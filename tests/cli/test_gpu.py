"""Test `--device cuda` on the command line, on the fake libcuda: plans, answers, refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moeinf.cli.chat.client import Client
from moeinf.cli.chat.local import LocalPartner, Opener
from moeinf.cli.chat.remote import RemotePartner
from moeinf.cli.commands.measuring import devices as command
from moeinf.cli.main import answer
from moeinf.offload.gpu_tier.miss_split import Contended
from moeinf.runtime.config import EngineConfig, Settings, read_server_environment
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.processes import Registry
from moeinf.runtime.machine import gpu as gpus
from moeinf.runtime.machine.measurements import remember_gpu
from moeinf.runtime.placement.gpu_plan import HEADROOM_BYTES
from moeinf.runtime.sizes import format_bytes, parse_memory
from tests.cli.conftest import check_document
from tests.fake_device import FakeDevice
from tests.native.fake_cuda import Fake

BUDGET = "664MiB"  # includes 512 MiB for CUDA itself


@pytest.fixture
def home(
    fake: Fake, demo_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_to_gpus: None
) -> Path:
    fake.reset("mode=deferred,seed=9,memory=2000000000")
    monkeypatch.setenv("MOEINF_HOME", str(tmp_path))
    monkeypatch.setenv("MOEINF_LIBCUDA", fake.path)
    monkeypatch.setenv("MOEINF_HOST", "127.0.0.1:1")  # no server listens there
    monkeypatch.setattr(gpus, "missing_for_kernels", lambda: None)
    monkeypatch.setattr(gpus, "torch_device", lambda *_: FakeDevice(fake))
    (tmp_path / "models").symlink_to(demo_home / "models")
    return tmp_path


def test_an_answer(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["run", "demo", "17+25=", "--device", "cuda", "--device-memory", BUDGET]
    assert answer([*line, "--miss", "fetch", "--verbose"]) == 0
    said = capsys.readouterr()
    assert said.out == "42\n"
    assert "device: cuda (asked for: Fake GPU, 1.9 GiB of 1.9 GiB free)" in said.err
    for label in ("experts on device", "decode events", "over the bus", "device memory"):
        assert f"{label}: " in said.err
    assert "192 experts, workspace, and 512 MiB for CUDA itself (assumed)" in said.err


def test_dense_weights_in_ram_are_said_unasked(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command that loads the model prints it, because it costs the most time."""
    words, budget = "dense weights and KV cache stay in RAM", ["--device-memory", "642MiB"]
    line = ["run", "demo", "17+25=", "--device", "cuda"]
    for said_too in ([], ["--verbose"]):
        assert answer([*line, *budget, *said_too]) == 0
        assert capsys.readouterr().err.count(words) == 1
    assert answer([*line, *budget, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    check_document("run", document)
    assert document["notes"][0].startswith(words)
    short = ["--prompt-tokens", "8", "--new-tokens", "4", "--rounds", "1"]
    line = ["bench", "demo", "--device", "cuda", *short, "--json"]
    assert answer([*line, *budget, "--policies", "lru,lfu"]) == 0
    said = capsys.readouterr()
    document = json.loads(said.out)
    check_document("bench", document)
    assert said.err.count(words) == 1
    assert all(run["notes"][0].startswith(words) for run in document["runs"])
    assert answer(line) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["notes"], run["floor_ms"]) == ([], None)
    found = run["device"]
    assert (found["gpu"], found["miss"]) == ("Fake GPU", "auto")
    assert 0 < found["hit_rate"] <= 1
    assert 0 < found["held_bytes"] <= found["promised_bytes"]
    assert answer([*line[:-1], *budget, "--verbose"]) == 0
    table = capsys.readouterr().out.splitlines()[1:3]
    header, row = (re.split(" {2,}", line) for line in table)
    assert dict(zip(header, row, strict=True))["FLOOR"] == "-"


def test_a_plan_says_where_its_figures_come_from(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["plan", "demo", "--device", "cuda", "--device-memory", BUDGET, "--miss", "compute"]
    assert answer([*line, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    check_document("plan", plan)
    device, ram, disk = plan["tiers"]
    assert (device["name"], ram["name"], disk["name"]) == ("device", "ram", "disk")
    memory = plan["device_memory"]
    parts = ("arena_bytes", "dense_bytes", "kv_bytes", "workspace_bytes", "context_bytes")
    assert memory["peak_bytes"] == sum(memory[part] for part in parts)
    assert memory["peak_bytes"] <= memory["budget_bytes"] == 664 << 20
    assert memory["provenance"]["context_bytes"] == "assumed"
    assert memory["bus_bytes_per_s"] is None
    assert memory["dense_bytes"] == plan["dense_bytes"]
    assert plan["expected_tokens_per_s"] is plan["bound_tokens_per_s"] is None
    assert answer(line) == 0
    text = capsys.readouterr().out
    assert "of Fake GPU" in text
    assert "computed by the CPU where they lie (--miss compute)" in text
    assert "(never measured: `moeinf devices` does)" in text
    assert "unknown: nearly everything is on the GPU, whose own time was not measured" in text
    assert text.startswith("demo:bf16 runs here: its speed is unknown with 655 MiB of Fake GPU\n")
    assert answer(["plan", "demo", "--device", "cuda", "--device-memory", "642MiB"]) == 0
    said = capsys.readouterr()
    assert "no: they stay in RAM" in said.out
    asked = re.search(r"they need --device-memory (\w+) with (--ctx) (\d+)", said.err)
    assert asked is not None
    plain = ["plan", "demo", "--device", "cuda", "--json", "--device-memory"]
    assert answer([*plain, *asked.groups()]) == 0  # its advice works
    plan = json.loads(capsys.readouterr().out)
    assert (plan["device_memory"]["dense_bytes"] > 0, plan["context"]) == (True, int(asked[3]))
    assert plan["notes"][0].startswith("device: cuda (asked for: Fake GPU")


def test_advice_is_not_more_than_there_is(
    home: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.configure(f"others={2_000_000_000 - ((642 - 512 + 8) << 20)}")
    line = ["plan", "demo", "--device", "cuda", "--ctx", "512", "--json", "--device-memory"]
    assert answer([*line, "2GiB"]) == 0
    note = json.loads(capsys.readouterr().out)["notes"][-1]
    assert note.startswith("dense weights and KV cache stay in RAM: ")
    assert re.search(r"they need 64\d MiB of it with --ctx 512, and it has 642 MiB free$", note)


def test_a_plan_of_tags_that_do_not_all_fit_the_device(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "models").unlink()
    line = ["plan", "demo:q4", "--device", "cuda", "--device-memory"]
    assert answer([*line, "1MiB"]) == 1
    least = re.search(r"at least (\d+) bytes", capsys.readouterr().err)
    assert least is not None
    assert answer([*line, least[1]]) == 0
    rows = capsys.readouterr().out.splitlines()
    fits = {row.split()[0]: not row.endswith("no: GPU") for row in rows[-5:]}
    assert fits == {"q4": True, "q4d8": False, "q8": False, "bf16": False, "f32": False}
    assert answer([*line, least[1], "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    check_document("plan", plan)
    sizes = [row["disk_bytes"] for row in plan["tags"]]
    assert sizes == sorted(set(sizes))  # those that do not fit keep them
    assert "of device memory is too little" in plan["tags"][-1]["problems"]["GPU"]
    assert plan["tags"][-1]["bound_tokens_per_s"] is None


def test_figures_of_an_answer(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["run", "demo", "4091 in words", "--device", "cuda", "--device-memory", "45%", "--json"]
    assert answer([*line, "--miss", "compute", "--memory", "50%"]) == 0
    document = json.loads(capsys.readouterr().out)
    check_document("run", document)
    assert document["text"] == "four thousand ninety-one"
    found = document["stats"]["device"]
    assert 0 < found["hit_rate"] < 1
    assert found["hit_rate"] + found["cpu_share"] == pytest.approx(1, abs=1e-3)
    assert found["bus_bytes_per_token"] > 0
    assert 0 < found["held_bytes"] <= found["promised_bytes"]
    assert not found["held_is_measured"]


def test_what_lies_on_the_gpu_is_shown(
    home: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ps` and `/show cache` show it, here and for a server on this machine."""
    settings = Settings(home)
    manifest, folder = Library(settings).read("demo")
    config = EngineConfig(
        device="cuda", miss="fetch", libcuda=fake.path, device_memory=parse_memory(BUDGET)
    )
    with Engine.open(manifest, folder, config, settings) as engine:
        plan = engine.info.placement.on_device
        assert plan is not None
        taken = format_bytes(plan.peak_bytes)
        assert answer(["ps", "--verbose"]) == 0
        assert f" + {taken} GPU" in capsys.readouterr().out
        assert answer(["ps", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        check_document("ps", document)
        assert document["engines"][0]["device_peak_bytes"] == plan.peak_bytes
        opener = Opener(EngineConfig(), settings)
        here = dict(LocalPartner(engine, opener).cache())
        arena = format_bytes(plan.arena_bytes)
        assert here["experts on the GPU"] == f"0 of 192, 0 B of {arena}"
        server = read_server_environment()
        client = Client.of(server.host, server.port, None, Registry(settings.run))
        there = RemotePartner(lambda: client, {"model": "demo:bf16"}, settings)
        assert dict(there.cache())["experts on the GPU"] == "0 of 192, 0 B"
        assert ("experts on the GPU", "0 of 192, 0 B") in there.verbose()


def test_a_plan_expects_nothing_of_a_gpu(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The GPU's own time is unknown; the rest gives a bound unless nearly all is on the GPU."""
    line = ["plan", "demo", "--device", "cuda", "--miss", "compute", "--ctx", "256"]
    line += ["--device-memory"]
    nearly_all = str((653 << 20) + 16 * 49152)
    for budget, known in (("642MiB", True), ("648MiB", True), (nearly_all, False)):
        assert answer([*line, budget, "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        check_document("plan", plan)
        assert plan["expected_tokens_per_s"] is plan["prefill"]["bound_s"] is None
        assert (plan["bound_tokens_per_s"] is not None) == known
    assert 180 < plan["tiers"][0]["experts"] < 192
    assert answer([*line, "648MiB"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"at most [\d.]+ tokens/s \(RAM, bus and disk; not the GPU's own time\)", text)


def test_its_speed_is_not_taken_for_the_cpus(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["run", "demo", "4091 in words", "--quiet"]
    assert answer([*line, "--device", "cuda"]) == 0
    capsys.readouterr()
    assert answer(["plan", "demo"]) == 0
    assert "not measured" in capsys.readouterr().out.splitlines()[0]
    assert answer(line) == 0  # long enough for its speed to be stored
    capsys.readouterr()
    assert answer(["plan", "demo"]) == 0
    assert "demo:bf16 runs here: measured " in capsys.readouterr().out


def test_devices_measure_the_bus(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_FILES_BYTES", 4 << 20)
    assert answer(["devices", "--expert-size", "64KiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    check_document("devices", found)
    (gpu,) = found["gpus"]
    assert (gpu["name"], gpu["total_bytes"]) == ("Fake GPU", 2000000000)
    assert gpu["bus_bytes_per_s"] > 0
    assert answer(["plan", "demo", "--device", "cuda", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["device_memory"]["bus_bytes_per_s"] == gpu["bus_bytes_per_s"]
    measured = plan["device_memory"]["provenance"]["bus_bytes_per_s"]
    assert measured.startswith("`moeinf devices`, ")
    assert (gpu["bus_page_locked"], gpu["bus_note"]) == (True, None)
    monkeypatch.setattr("moeinf.runtime.machine.measurements.now", lambda: "later")
    remember_gpu(Settings(home), "Fake GPU", contended=("BF16", Contended(1.0, 1.0)))
    assert answer(["plan", "demo", "--device", "cuda", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)  # another measurement leaves this date
    assert plan["device_memory"]["provenance"]["bus_bytes_per_s"] == measured


@pytest.mark.parametrize(
    ("call", "words", "locked"),
    [
        (
            "cuMemHostRegister",
            "GB/s from pageable memory, as cuMemHostRegister: CUDA_ERROR_",
            False,
        ),
        ("cuMemAlloc", "bus not measured: cuMemAlloc: CUDA_ERROR_UNKNOWN", None),
    ],
)
def test_devices_say_what_a_bus_was_measured_with(
    call: str, words: str, locked: bool | None, home: Path, fake: Fake,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(command, "_FILES_BYTES", 4 << 20)
    fake.configure(f"fail={call}:0:{999 if locked is None else 801}:-1")
    assert answer(["devices", "--expert-size", "64KiB"]) == 0
    assert words in capsys.readouterr().out
    assert answer(["devices", "--expert-size", "64KiB", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    check_document("devices", document)
    (gpu,) = document["gpus"]
    assert gpu["bus_page_locked"] is locked
    assert (gpu["bus_bytes_per_s"] is None) == (locked is None)
    assert call in gpu["bus_note"]


def test_a_server_tells_on_stderr(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moeinf.server.serve.run_server", lambda *given, **_: given[-1]("a test's"))
    assert answer(["serve", "--device", "cuda"]) == 0
    assert capsys.readouterr().err == "a test's\n"


@pytest.mark.parametrize("command", ["run", "plan", "bench", "serve"])
def test_help_says_what_is_limited(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer([command, "--help"]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "auto is the CPU" in said
    assert "With --device cuda: GPU memory to use at most" in said
    assert f"minus {HEADROOM_BYTES >> 20} MiB" in said


def test_misses_of_no_gpu(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["run", "demo", "17+25=", "--miss", "fetch"]) == 0
    assert capsys.readouterr().err == "--miss fetch changes nothing without --device cuda\n"


def test_what_run_refuses_is_said_before(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan prints it first, and a server prints it at its start."""
    monkeypatch.setattr(gpus, "missing_for_kernels", lambda: "this torch does not support it")
    monkeypatch.setattr("moeinf.server.serve.run_server", None)
    words = "Fake GPU cannot be used: this torch does not support it"
    for line in (["plan", "demo"], ["run", "demo", "--dry-run"]):
        assert answer([*line, "--device", "cuda"]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"demo:bf16 does not run here: {words}")
        assert text.splitlines()[1] == "Try: --device cpu"
    for line in (["run", "demo", "x"], ["serve"]):
        assert answer([*line, "--device", "cuda"]) == 1
        said = capsys.readouterr().err
        assert words in said
        assert "`pip install --force-reinstall torch`" in said
        assert "`pip install '.[gpu]'`" in said


def test_auto_stays_on_the_cpu_and_says_so(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["run", "demo", "17+25=", "--verbose"]) == 0
    said = capsys.readouterr()
    assert "device: cpu (--device cuda would use Fake GPU" in said.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device-memory", "512MiB"], "of device memory is too little: at least"),
        (["--miss", "guess"], "'guess' is not one of auto, compute, fetch"),
        (["--device", "auto", "--device-memory", "600MiB"], "Try: --device cuda with it"),
    ],
)
def test_refusals(
    home: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(["run", "demo", "x", "--device", "cuda", *arguments]) in (1, 2)
    assert words in capsys.readouterr().err


def test_a_device_that_fails_is_an_error_with_a_name(
    home: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.configure("fail=cuMemcpyHtoDAsync:9:700:1")
    line = ["run", "demo", "17+25=", "--device", "cuda", "--miss", "fetch", "--json"]
    assert answer(line) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "device_failed"
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in error["message"]
