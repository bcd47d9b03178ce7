"""Texts of models and clients through a server: it answers `/health` meanwhile, and in time."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from moeinf.runtime.text.answer_parser import AnswerParser
from moeinf.runtime.text.offered_tools import Call
from moeinf.runtime.text.reasoning import MOST_CALL
from tests.cli.conftest import COMMAND, command_in, environment
from tests.runtime.text.test_tool_calls import TOOLS
from tests.runtime.text.tool_call_texts import (
    CODER,
    GEMMA,
    HARMONY,
    KIMI,
    LFM2,
    MINIMAX,
    MISTRAL_NAMED,
    SOLAR,
    TAGS,
    V4,
)
from tests.server.scripted import CHATML, pull_talker

PATTERN = "^<tool_call>a(<arg_key></arg_key> <arg_value>){9,20}(</arg_value><arg_key>){9,20}$"
LATE_S = 3.0  # a busy machine; the old parsers took minutes


@contextmanager
def serve(home: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Yield the address of `moeinf serve` in a process of its own."""
    process = subprocess.Popen(
        [*COMMAND, "serve", "--port", "0"],
        env=environment(home),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "listening on" in line)
        yield line.partition("listening on ")[2].split()[0], process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def healthy(address: str) -> Iterator[None]:
    """Check that `/health` answers in time while the block runs."""
    ended, worst = threading.Event(), [0.0]

    def ask() -> None:
        while not ended.is_set():
            begun = time.monotonic()
            httpx.get(f"{address}/health", timeout=60)
            worst[0] = max(worst[0], time.monotonic() - begun)
            ended.wait(0.05)

    watch = threading.Thread(target=ask)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()
    assert worst[0] < LATE_S


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pull_talker(tmp_path_factory.mktemp("home"), CHATML)


@pytest.mark.full
def test_an_answer_in_half_a_kilobyte_of_request(talker: Path) -> None:
    """The pattern of keys of GLM's calls was cubic: nine minutes for 250 tokens."""
    tool = {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}
    body: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [tool],
        "format": {"type": "string", "pattern": PATTERN},
        "stream": False,
        "options": {"num_predict": 400},
    }
    with serve(talker) as (address, _), healthy(address):
        answer = httpx.post(f"{address}/api/chat", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert "<arg_key></arg_key> <arg_value>" in answer.json()["message"]["content"]


@pytest.mark.full
def test_messages_of_eight_megabytes(talker: Path) -> None:
    """Turns of one role were joined pair by pair on the event loop: 6 to 20 s."""
    turns = [{"role": "user", "content": "a" * 1900}] * 4000
    items = [{"role": "user", "content": "a" * 1900}] * 4000
    with serve(talker) as (address, process):
        httpx.post(f"{address}/api/generate", json={"model": "demo"}, timeout=60)
        with healthy(address):
            for path, body in (
                ("/v1/messages/count_tokens", {"model": "demo", "messages": turns}),
                ("/v1/responses/input_tokens", {"model": "demo", "input": items}),
                ("/v1/chat/completions", {"model": "demo", "messages": turns}),
            ):
                begun = time.monotonic()
                answer = httpx.post(f"{address}{path}", json=body, timeout=60)
                assert answer.status_code == 400, answer.text[:300]  # it does not fit
                assert time.monotonic() - begun < 2 * LATE_S
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        assert time.monotonic() - begun < 10


@pytest.mark.full
def test_a_model_of_line_ends(talker: Path) -> None:
    """The lines of a value were joined at each line: 45 minutes for each show."""
    file, command = talker / "Modelfile", command_in(talker)
    begun = time.monotonic()
    file.write_text('FROM demo\nSYSTEM """a\n' + "\n" * 320_000 + 'b"""\n')
    assert command("create", "lines", "-f", str(file)).code == 2  # a system text has 64 KiB
    file.write_text('FROM demo\nSYSTEM """a\n' + "\n" * 65_000 + 'b"""\n')
    assert command("create", "lines", "-f", str(file)).code == 0
    assert command("show", "lines", "--modelfile").code == 0
    assert time.monotonic() - begun < 20
    with serve(talker) as (address, _), healthy(address):
        for _ in range(5):
            shown = httpx.post(f"{address}/api/show", json={"model": "lines"}, timeout=30)
            assert "\n" * 65_000 in shown.json()["system"]


_UNITS = {
    TAGS: (
        "<tool_call>",
        "<arg_key>",
        "<arg_key></arg_key> ",
        "</tool_call>",
        '{"a": "</tool_call>',
    ),
    CODER: ("<function=add>", "<parameter=a>", "<function=", "</function>", "</parameter> "),
    LFM2: ("<|tool_call_end|>", "add(a='<|tool_call_end|>", "')<|tool_call_end|>", "' "),
    GEMMA: ("<tool_call|>", '<|"|>', "<|channel>", "a:", '<|"|><tool_call|>'),
    MINIMAX: ('<invoke name="add">', "</minimax:tool_call>", '<parameter name="a">'),
    V4: ('<｜DSML｜invoke name="add">', "</｜DSML｜tool_calls>", "</｜DSML｜invoke> "),
    SOLAR: ("<|tool_call:end|>", "<|tool_call:args|>", '"<|tool_call:end|>", '),
    MISTRAL_NAMED: (" ", "now[ARGS]{}[TOOL_CALLS]", "[CALL_ID]a", "["),
    KIMI: ("<|tool_call_begin|>functions.add:0", ":1", "<|tool_call_end|>"),
    HARMONY: ("<|start|>", "<|channel|>commentary to=functions.add ", "<|message|>", "<|call|>"),
}
_BEGINS = {
    TAGS: '<tool_call>{"name": "add", "arguments": {"note": "',
    CODER: "<function=add><parameter=note>",
    LFM2: '<|tool_call_start|>[add(note="',
    GEMMA: '<|tool_call>call:add{note:<|"|>',
    MINIMAX: '<minimax:tool_call><invoke name="add"><parameter name="note">',
    V4: "<｜DSML｜tool_calls>",
    SOLAR: '<|tool_call:begin|>x<|tool_call:name|>add<|tool_call:args|>{"note": "',
    MISTRAL_NAMED: "[TOOL_CALLS]",
    KIMI: "<|tool_calls_section_begin|>",
    HARMONY: "<|channel|>commentary to=functions.add<|message|>",
}


def parsing_seconds(template: str, text: str) -> float:
    """Return the processor time of an answer in long pieces."""
    start = time.process_time()
    parser = AnswerParser(template, "", TOOLS)
    for at in range(0, len(text), 256):
        list(parser.add(text[at : at + 256]))
    list(parser.rest())
    return time.process_time() - start


@pytest.mark.parametrize("template", _UNITS, ids=lambda one: one[:24])
def test_the_longest_call_is_parsed_in_a_second(template: str) -> None:
    for unit in _UNITS[template]:
        for begin in ("", _BEGINS[template]):
            text = begin + unit * (MOST_CALL // len(unit))
            tries = (parsing_seconds(template, text) for _ in range(3))  # a busy machine
            assert any(one < 1 for one in tries), (begin, unit)


def test_a_longer_call_is_text() -> None:
    for size, kind in ((MOST_CALL - 100, Call), (MOST_CALL, tuple)):
        call = {"name": "add", "arguments": {"note": "a" * size}}
        parser = AnswerParser(TAGS, "", TOOLS)
        text = f"<tool_call>{json.dumps(call)}</tool_call>"
        parts = [p for at in range(0, len(text), 4096) for p in parser.add(text[at : at + 4096])]
        parts += parser.rest()
        assert {type(part) for part in parts} == {kind}
        if kind is tuple:
            assert "".join(part[1] for part in parts if isinstance(part, tuple)) == text
