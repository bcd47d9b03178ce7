"""Twice as much request text takes at most three times as long: nothing is quadratic."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint, parse_header
from moeinf.runtime.config import parse_duration
from moeinf.runtime.generation.answer import StopFinder
from moeinf.runtime.names import BadName, parse_name
from moeinf.runtime.request_json import BadJson, parse
from moeinf.runtime.sizes import parse_memory
from moeinf.server.api.answers import BadRequest
from moeinf.server.api.chat_turn import Reply
from moeinf.server.api.fields.bounds import MOST_STOP, MOST_STOPS
from moeinf.server.api.logprobs import LegacyWords
from moeinf.server.api.ollama_options import read_options
from tests.faults import request_targets
from tests.faults.conftest import Tally
from tests.faults.request_targets import answer_to

FLOOR_S = 0.1  # shorter times are not compared
REFUSALS = (ValueError, BadName, BadJson, BadRequest, BadCheckpoint)


def seconds(work: Callable[[], object]) -> float:
    """Measure processor time of this process: other work on the machine does not count."""
    gc.disable()
    try:
        start = time.process_time()
        with suppress(REFUSALS):
            work()
        return time.process_time() - start
    finally:
        gc.enable()


def check(work: Callable[[int], Callable[[], object]], n: int) -> None:
    """Assert that work(2n) takes at most three times as long as work(n), plus FLOOR_S.

    work(n) prepares an input of size n and returns the function to measure.
    """
    for _ in range(3):  # quadratic work fails each time
        once, twice = seconds(work(n)), seconds(work(2 * n))
        if twice <= 3 * once + FLOOR_S:
            return
    raise AssertionError(f"{once:.3f} s for {n}, {twice:.3f} s for twice as much")


def of_text(read: Callable[[str], object], piece: str, end: str) -> Any:
    def make(n: int) -> Callable[[], object]:
        text = piece * (n // len(piece)) + end
        return lambda: read(text)

    return make


TEXTS = {
    "a duration": (parse_duration, ("1", "1s", "1.", "-", "1h1", "9e9")),
    "a size": (parse_memory, ("1", "1 ", "1.1", "%", "k", " ")),
    "a name": (parse_name, ("a", "a-", "a/", "a:", ".", "--", "a--b")),
    "JSON": (
        parse,
        (
            '"',
            '\\"',
            '"\\',
            "[",
            "]",
            "{}",
            '{"a":',
            "1",
            "0.1",
            "1e",
            ",",
            '"a",',
            "[1,",
            "\\",
            " ",
        ),
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts(name: str, tally: Tally) -> None:
    read, pieces = TEXTS[name]
    for piece in pieces:
        check(of_text(read, piece, "x"), 60_000)
        tally("linear")


def test_stops_and_options(tally: Tally) -> None:
    for texts in (
        ["a" * MOST_STOP] * MOST_STOPS,
        ["ab" * 500 + "c"] * 100,
        ["a" * 900 + "b"] * 256,
    ):
        answer = ("a" * 899 + "c") + "ab" * 450

        def hear(n: int, texts: list[str] = texts, answer: str = answer) -> Callable[[], object]:
            finder = StopFinder(texts)
            said = (answer * (n // len(answer) + 1))[:n]
            return lambda: [finder.add(said[at : at + 50]) for at in range(0, n, 50)]

        check(hear, 2000)
        tally("linear")
    check(lambda n: lambda: read_options({"stop": ["a"] * n}), 100_000)
    check(lambda n: lambda: read_options({f"o{i}": None for i in range(n)}), 20_000)
    check(lambda n: lambda: read_options({"num_ctx": "9" * n, "seed": "9" * n}), 60_000)
    check(lambda n: lambda: read_options({"temperature": "9" * n}), 60_000)
    tally("linear")


def test_long_answers(tally: Tally) -> None:
    def put_together(n: int) -> Callable[[], object]:
        def hear() -> None:
            reply = Reply()
            for _ in range(n):
                reply.add(("answer", "a few words "))
                reply.add(("thinking", "a few words "))
            assert len(reply.answer) == len(reply.thinking) == 12 * n

        return hear

    check(put_together, 40_000)

    def words(n: int) -> Callable[[], object]:
        legacy = LegacyWords()
        return lambda: [legacy.add([]) for _ in range(n)]

    check(words, 10_000)
    tally("linear")


def test_headers_of_files(tally: Tally) -> None:
    def header(n: int) -> Callable[[], object]:
        about = {
            f"t{i}": {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
            for i in range(n)
        }
        text = json.dumps(about).encode()
        return lambda: parse_header(Path("x.safetensors"), 8 + len(text) + 4 * n, text)

    check(header, 4000)
    tally("linear")


_USER = {"role": "user", "content": "u"}
_CALL = {"function": {"name": "f", "arguments": {"a": 1}}}
_RESULT = {"role": "tool", "content": "r"}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def _bodies(n: int) -> dict[str, tuple[str, dict[str, Any]]]:
    few = min(n // 20, 4000)  # for lists with at most 4096 items
    calls = {"role": "assistant", "content": "", "tool_calls": [_CALL] * few}
    text = '{"a": [' + "1, " * n + "1]}"
    said = {"function": {"name": "f", "arguments": text}}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}] * few}
    return {
        "a prompt": ("/api/generate", {"prompt": "a b" * n}),
        "a prompt of one character": ("/api/generate", {"prompt": " " * n}),
        "marks": ("/api/generate", {"prompt": "<|user|>" * (n // 8)}),
        "a name": ("/api/generate", {"model": "a" * n, "prompt": "a"}),
        "a duration": ("/api/generate", {"prompt": "a", "keep_alive": "9" * n}),
        "an option": ("/api/generate", {"prompt": "a", "options": {"o" * n: 1}}),
        "stops": ("/api/generate", {"prompt": "a", "options": {"stop": ["a"] * (n // 10)}}),
        "an effort": ("/v1/chat/completions", {"messages": [_USER], "reasoning_effort": "a" * n}),
        "an unknown field": ("/v1/completions", {"prompt": "a", "a" * n: 1}),
        "messages": ("/api/chat", {"messages": [_USER] * few}),
        "messages of OpenAI": ("/v1/chat/completions", {"messages": [_USER] * few}),
        "calls": ("/api/chat", {"messages": [calls, *[_RESULT] * (few // 2)]}),
        "arguments as text": ("/api/chat", {"messages": [{**calls, "tool_calls": [said]}, _USER]}),
        "parts": ("/v1/chat/completions", {"messages": [parts]}),
        "tools": ("/v1/chat/completions", {"messages": [_USER], "tools": [_TOOL] * few}),
        "tokens": ("/v1/completions", {"prompt": [1] * n}),
        "inputs": ("/v1/embeddings", {"input": ["a"] * few}),
        "lists of tokens": ("/v1/embeddings", {"input": [[1] * 100] * few}),
    }


@pytest.mark.parametrize("name", _bodies(1))
def test_requests(name: str, tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole application: validation, conversion, rendering, tokenization."""
    monkeypatch.setattr(request_targets._worker().engine.info, "context", 1 << 20)
    statuses = []

    def ask(n: int) -> Callable[[], object]:
        path, body = _bodies(n)[name]
        data = json.dumps({"model": "demo", **body}).encode()
        return lambda: statuses.append(asyncio.run(answer_to(path, data))[0])

    check(ask, 40_000)
    assert set(statuses) <= {200, 400, 404, 413}
    tally(f"linear, status {statuses[-1]}")
