"""Test `moeinf run` for one answer: stdout, stderr and exit code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moeinf.runtime.config import Settings
from moeinf.runtime.library.processes import Registry
from tests.cli.conftest import COMMAND, Command, command_in, environment
from tests.cli.warm import Written


def test_first_run_pulls_the_demo_and_prints_the_answer(tmp_path: Path) -> None:
    fresh = command_in(tmp_path)
    first = fresh("run", "demo", "17+25=")
    assert (first.code, first.out) == (0, "42\n")
    assert "repacking demo:bf16" in first.err
    second = fresh("run", "demo", "17+25=")
    assert (second.code, second.out, second.err) == (0, "42\n", "")
    assert Registry(Settings(tmp_path).run).engines() == []


def test_prompt_from_standard_input(moeinf: Command) -> None:
    assert moeinf("run", "demo", stdin="17+25=\n").out == "42\n"
    assert moeinf("run", "demo", "25=", "--raw", stdin="17+").code == 0


def test_piped_text_comes_before_the_prompt(moeinf: Command) -> None:
    both = json.loads(moeinf("run", "demo", "b", "--json", "--max-tokens", "1", stdin="a").out)
    one = json.loads(moeinf("run", "demo", "a\n\nb", "--json", "--max-tokens", "1").out)
    assert both["prompt_tokens"] == one["prompt_tokens"]
    assert both["token_ids"] == one["token_ids"]


def test_json_document(moeinf: Command) -> None:
    options = "--json", "--memory", "30%", "--no-speculation"  # a token a pass
    result = moeinf("run", "demo", "4091 in words", *options)
    document = json.loads(result.out)
    assert document["text"] == "four thousand ninety-one"
    assert document["finish_reason"] == "stop"
    assert document["tokens"] == len("four thousand ninety-one") + 1 == len(document["token_ids"])
    assert document["prompt_tokens"] == len("4091 in words") + 3
    stats = document["stats"]
    assert 0 < stats["hit_rate"] < 1
    assert stats["bytes_read_per_token"] > 0
    assert stats["ttft_ms"] > 0
    assert stats["tpot_ms"] * stats["tokens_per_s"] == pytest.approx(1000, rel=0.01)
    assert 0 <= stats["stall_share"] < 1
    assert stats["peak_rss_bytes"] > 50 << 20
    assert sum(stats["hits"].values()) == round(
        stats["hit_rate"] * (len(document["token_ids"]) - 1) * 24
    )
    assert result.err == ""


def test_verbose_lines(moeinf: Command) -> None:
    result = moeinf("run", "demo", "sort owl, fig, ant", "--memory", "30%", "--verbose")
    assert result.out == "ant, fig, owl\n"
    labels = [line.split(":")[0] for line in result.err.splitlines() if ":" in line]
    for label in (
        "total duration", "load duration", "prompt eval count", "prompt eval duration",
        "prompt eval rate", "eval count", "eval duration", "eval rate", "expert hit rate",
        "experts loaded", "read", "stall share", "hits by cause", "deciding",
        "prefetch accuracy", "resident",
    ):  # fmt: skip
        assert label in labels
    assert "57 of 192 experts" in result.err


def test_the_same_seed_the_same_text(moeinf: Command) -> None:
    def text(seed: str) -> str:
        options = ("--temperature", "5", "--top-k", "0", "--top-p", "1", "--max-tokens", "24")
        document = json.loads(moeinf("run", "demo", "hi", *options, "--seed", seed, "--json").out)
        return str(document["token_ids"])

    assert text("3") == text("3") != text("4")


def test_stop_texts_and_token_limits(moeinf: Command) -> None:
    stopped = moeinf("run", "demo", "sort owl, fig, zebra, ant", "--stop", ", o", "--json")
    document = json.loads(stopped.out)
    assert (document["text"], document["finish_reason"]) == ("ant, fig", "stop")
    limited = json.loads(moeinf("run", "demo", "72 in words", "--max-tokens", "4", "--json").out)
    assert (limited["text"], limited["finish_reason"], limited["tokens"]) == ("seve", "length", 4)


def test_memory_from_the_environment(moeinf: Command) -> None:
    assert moeinf("run", "demo", "17+25=", MOEINF_MEMORY="393216").out == "42\n"
    refused = moeinf("run", "demo", "17+25=", MOEINF_MEMORY="393215")
    assert refused.code == 1
    assert "at least 393216 bytes" in refused.err
    assert "--memory 393216" in refused.err
    automatic = moeinf("run", "demo", "17+25=", "--memory", "auto", MOEINF_MEMORY="393215")
    assert automatic.out == "42\n"


@pytest.mark.parametrize(
    ("arguments", "why"), [([], "no GPU: "), (["--device", "cpu"], "asked for")]
)
def test_which_device_and_why(arguments: list[str], why: str, moeinf: Command) -> None:
    result = moeinf("run", "demo", "17+25=", "--verbose", *arguments)
    (line,) = [line for line in result.err.splitlines() if line.startswith("device: cpu")]
    assert why in line
    assert result.out == "42\n"


def test_dry_run_loads_nothing(moeinf: Command) -> None:
    plan = json.loads(moeinf("run", "demo", "--dry-run", "--json", "--memory", "30%").out)
    assert plan["tiers"][0]["experts"] == 57
    assert plan["min_memory_bytes"] == 393216


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "demo"], 2, "there is no prompt"),
        (["run", "demo", ""], 2, "the prompt is empty"),
        (["run", "dmo", "x"], 1, "demo:bf16, "),
        (["run", "demo:q9", "x"], 2, "the tag 'q9' is invalid"),
        (["run", "../demo", "x"], 2, "is not a model name"),
        (["run", "demo", "x", "--memory", "lots"], 2, "'lots' is invalid"),
        (["run", "demo", "x", "--memory", "1%"], 1, "at least 393216 bytes"),
        (["run", "demo", "x", "--ctx", "9999"], 1, "a context of at most 512 tokens, got 9999"),
        (["run", "demo", "x" * 600], 1, "the prompt has 603 tokens, the context 512"),
        (["run", "demo", "x", "--temperature", "-1"], 2, "got -1.0"),
        (
            ["run", "demo", "x", "--policy", "best"],
            2,
            "'best' is not one of adaptive, eamc, learned, lfu, lru, arc",
        ),
        (["run", "demo", "x", "--device", "tpu"], 2, "'tpu' is not one of auto, cpu, cuda"),
        (["run", "demo", "x", "--device", "cuda"], 1, "--device cuda: "),
        (["plan", "demo", "--device", "cuda"], 1, "--device cpu"),
        (["bench", "demo", "--device", "cuda"], 1, "--device cuda: "),
        (["run", "demo", "x", "--miss", "wait"], 2, "'wait' is not one of auto, compute, fetch"),
        (["run", "demo", "x", "--device-memory", "50%"], 1, "--device-memory needs a GPU"),
        (["run", "demo", "x", "--bogus"], 2, "--bogus"),
        (["bogus"], 2, "bogus"),
        (["run"], 2, "MODEL"),
    ],
)
def test_errors_say_what_and_what_next(
    arguments: list[str], code: int, words: str, moeinf: Command
) -> None:
    result = moeinf(*arguments)
    assert result.code == code
    assert result.out == ""
    assert words in result.err
    assert "Traceback" not in result.err
    assert len(result.err.splitlines()) <= 2
    as_json = moeinf(*arguments, "--json")
    assert as_json.code == code
    error = json.loads(as_json.out)["error"]
    assert set(error) == {"code", "message", "hint"}
    assert words in error["message"] + error["hint"]


def test_a_traceback_only_when_asked_for(moeinf: Command) -> None:
    assert "Traceback" in moeinf("run", "dmo", "x", MOEINF_DEBUG="1").err


def test_ctrl_c_ends_the_answer(demo_home: Path) -> None:
    """At temperature 50 the demo answers up to the context's end: enough time for Ctrl-C."""
    babble = ["--temperature", "50", "--top-k", "0", "--top-p", "1", "--seed", "1"]
    process = subprocess.Popen(
        [*COMMAND, "run", "demo", "hi", *babble, "--memory", "393216"],
        env=environment(demo_home),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1), process.stderr.read()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in err


def test_three_first_runs_at_once(tmp_path: Path) -> None:
    """One pulls the demo, the others wait for it; all answer."""
    processes = [Written(["run", "demo", "17+25="], environment(tmp_path)) for _ in range(3)]
    answers = [process.communicate(timeout=120) for process in processes]
    assert [out for out, _ in answers] == ["42\n"] * 3, answers


def test_nothing_in_the_current_folder_is_imported(tmp_path: Path, demo_home: Path) -> None:
    """The current folder is a downloaded one that holds files named like modules."""
    for name in ("jinja2", "json", "datetime", "torch", "moeinf"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    command = [sys.executable, "-P", *COMMAND[1:], "run", "demo", "17+25="]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(demo_home),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "42\n", done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("redirection", "code", "words"),
    [("<&-", 0, ""), (">&-", 0, ""), ("<&- >&- 2>&-", 0, "")],
)
def test_closed_streams(redirection: str, code: int, words: str, demo_home: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", f'exec "$@" {redirection}', "-", *COMMAND, "run", "demo", "17+25="],
        env=environment(demo_home),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert words in done.stderr


def test_an_argument_that_is_not_utf8(demo_home: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "run", "demo", b"ab\xff", "--max-tokens", "3"],
        env=environment(demo_home),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
