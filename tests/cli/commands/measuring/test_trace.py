"""Test what `moeinf trace` prints and keeps, also in processes that are interrupted."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from moeinf.cli.main import answer
from moeinf.offload.routing.recording_file import recording_from_bytes
from moeinf.runtime.config import Settings
from moeinf.runtime.eamc.append_log import RecordLog
from moeinf.runtime.eamc.collection_file import EamcState
from moeinf.runtime.library.library import Library
from tests.cli.conftest import Command, Result, command_in, environment
from tests.cli.screen import open_pty
from tests.cli.warm import Warm, Written
from tests.hub_server import Hub, serve


@pytest.fixture
def home(tmp_path: Path, demo_home: Path) -> Path:
    """Return a home that shares the session's models, and has its own state."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "models").symlink_to(demo_home / "models")
    return folder


@pytest.fixture
def moeinf(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Return the command, run in this process so that torch is imported once."""
    monkeypatch.setenv("MOEINF_HOME", str(home))

    def run(*arguments: str) -> Result:
        code = answer(arguments)
        return Result(code, *capsys.readouterr())

    return run


def entries(home: Path) -> int:
    settings = Settings(home)
    notes: list[str] = []
    state = EamcState(settings, Library(settings).read("demo")[0], notes.append)
    held = len(state.load())
    assert notes == []
    return held


def logged(home: Path) -> int:
    """Return the number of logged requests; the EAMC holds only the newest of similar ones."""
    folder, notes = home / "state/demo/bf16", list[str]()
    records = RecordLog(folder, "eamc.log", b"", lambda header: None, notes.append).read()
    assert notes == []
    return len(records)


def test_tracing_the_demo(moeinf: Command, home: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.eam"
    result = moeinf(
        "trace", "demo", "--dataset", "demo", "--limit", "14", "--out", str(path), "--json"
    )
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert document["requests"] == document["eamc"]["entries"] == 14 == entries(home)
    assert (document["skipped"], document["interrupted"]) == (0, False)
    recording = recording_from_bytes(path.read_bytes())
    assert (recording.shape.layers, recording.shape.experts, recording.shape.top_k) == (6, 32, 4)
    assert recording.shape.expert_bytes == 49152
    assert len(recording.requests) == 14
    assert len(set(recording.labels.values())) == 14  # one per kind
    assert recording.tokens - recording.decode_tokens == document["prompt_tokens"]
    assert recording.decode_tokens == document["tokens"] - 14
    assert all(p.weights is not None and p.hints is not None for p in recording.passes)


def test_words_and_the_last_model_that_was_used(moeinf: Command, home: Path) -> None:
    refused = moeinf("trace", "--dataset", "demo")
    assert refused.code == 1
    assert refused.err.splitlines() == [
        "Error: no model has been used yet",
        "Try: `moeinf trace MODEL --dataset demo`",
    ]
    assert moeinf("run", "demo:f32", "17+25=").out == "42\n"
    assert moeinf("run", "demo", "17+25=", "--no-trace").out == "42\n"
    result = moeinf("trace", "--dataset", "demo", "--limit", "2", "--subset", "add", "--quiet")
    assert result.code == 0, result.err
    assert "requests:        2 of demo\n" in result.out
    assert "EAMC:            3 of " in result.out  # the run counts too
    assert result.err == ""
    assert moeinf("run", "demo", "17+25=").out == "42\n"
    loud = moeinf("trace", "--dataset", "demo", "--limit", "1")
    assert "tracing demo:bf16, the model used last" in loud.err


def test_files_and_prompts_that_do_not_fit(moeinf: Command, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("17+25=\n" + "x" * 600 + "\nsort b, a\n")
    document = json.loads(
        moeinf("trace", "demo", "--dataset", str(tmp_path / "x.txt"), "--json").out
    )
    assert (document["requests"], document["skipped"]) == (2, 1)
    text = moeinf("trace", "demo", "--dataset", str(tmp_path / "x.txt")).out
    assert "skipped:         1, longer than the context" in text


def test_the_seed_decides_everything(moeinf: Command, tmp_path: Path) -> None:
    def recorded(name: str, seed: str) -> bytes:
        path = tmp_path / f"{name}.eam"
        options = ("--limit", "5", "--seed", seed, "--out", str(path), "--max-tokens", "4")
        assert moeinf("trace", "demo", "--dataset", "demo", *options).code == 0
        return path.read_bytes()

    assert recorded("a", "1") == recorded("b", "1") != recorded("c", "2")


def test_mmlu_through_the_hub(home: Path, tmp_path: Path) -> None:
    """The commands run as processes, because huggingface_hub reads its variables on import."""
    moeinf = command_in(home)
    row = {"question": "2+2=?", "subject": "sums", "choices": list("1234"), "answer": 3}
    for split in ("dev", "test"):
        path = tmp_path / f"mmlu/all/{split}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 5), path)
    variables = {"HF_HOME": str(tmp_path / "hf")}
    options = ("trace", "demo", "--dataset", "mmlu", "--limit", "3", "--max-tokens", "2", "--json")
    with serve(Hub("cais/mmlu", tmp_path / "mmlu", dataset=True)) as hub:
        variables["HF_ENDPOINT"] = hub.endpoint
        document = json.loads(moeinf(*options, "--shots", "1", **variables).out)
    assert (document["requests"], document["tokens"]) == (3, 6)
    again = moeinf(*options, "--shots", "0", **variables, HF_HUB_OFFLINE="1")
    assert json.loads(again.out)["requests"] == 3
    absent = moeinf("trace", "demo", "--dataset", "bbh", **variables, HF_HUB_OFFLINE="1")
    assert absent.code == 1
    assert "SaylorTwift/bbh is not in the Hugging Face cache" in absent.err
    assert "`--dataset demo`, or --dataset with a .jsonl, .txt or .parquet" in absent.err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["demo"], 2, "name the prompts: --dataset demo, mmlu"),
        (
            ["demo", "--dataset", "mmmlu"],
            2,
            "'mmmlu' is not one of bbh, bigbench, demo, flan, mmlu",
        ),
        (["demo", "--dataset", "gone.jsonl"], 2, "gone.jsonl does not exist"),
        (["demo", "--dataset", "demo", "--subset", "sums"], 2, "demo has no subset 'sums'"),
        (["demo", "--dataset", "demo", "--out", "x.csv"], 2, "a file named *.eam"),
        (["demo", "--dataset", "demo", "--out", "/no/x.eam"], 1, "/no"),
        (["dmo", "--dataset", "demo"], 1, "demo:bf16, "),
        (["demo", "--dataset", "demo", "--limit", "0"], 2, "--limit"),
    ],
)
def test_errors(arguments: list[str], code: int, words: str, moeinf: Command) -> None:
    result = moeinf("trace", *arguments)
    assert result.code == code
    assert words in result.err
    assert "Traceback" not in result.err
    assert len(result.err.splitlines()) <= 2


def started(home: Path, *arguments: str, limit: int = 1000) -> Written:
    line = ["trace", "demo", "--dataset", "demo", "--limit", str(limit), *arguments]
    return Written(line, environment(home))


def wait_for_entries(home: Path, least: int) -> None:
    log = home / "state/demo/bf16/eamc.log"
    deadline = time.monotonic() + 60
    while not log.exists() or log.stat().st_size < 400 * least:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ctrl_c_keeps_what_is_done_and_says_so(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.eam"
    process = started(home, "--out", str(path))
    wait_for_entries(home, 3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    recording = recording_from_bytes(path.read_bytes())
    assert f"interrupted: what {len(recording.requests)} requests used is kept" in out
    assert 1 <= len(recording.requests) < 64  # a log of fewer entries is not rewritten
    assert logged(home) == len(recording.requests)


def test_kill_9_loses_no_finished_request(home: Path) -> None:
    process = started(home)
    wait_for_entries(home, 3)
    process.kill()
    process.communicate()
    assert entries(home) >= 1
    assert not list((home / "state/demo/bf16").glob("*.aside*"))


def test_two_traces_at_once(home: Path) -> None:
    """Both add to one collection, and neither damages the other's entries."""
    processes = [started(home, "--json", "--seed", str(seed), limit=20) for seed in (1, 2)]
    documents = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    assert [document["requests"] for document in documents] == [20, 20]
    assert logged(home) == 40
    assert 20 <= entries(home) <= 40


def test_the_bar_counts_prompts(home: Path) -> None:
    """The bar needs a terminal; a pipe shows only its last state."""
    line = ["trace", "demo", "--dataset", "demo", "--limit", "4"]
    with open_pty(200) as pty:
        given = {**environment(home), "TERM": "xterm"}
        process = Warm(line, given, None, None, None, pty.stream)
        pty.wait_for("4/4")
        assert process.wait(timeout=60) == 0
    assert "tracing demo:bf16" in pty.received
