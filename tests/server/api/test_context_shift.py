"""Test MOEINF_CONTEXT_SHIFT: the oldest turns are dropped, and the client is told."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import serving
from tests.server.scripted import CHATML, Script, talking

SYSTEM = {"role": "system", "content": "You are small."}
TURNS = [
    turn
    for number in range(30)
    for turn in (
        {"role": "user", "content": f"{number} plus {number} plus {number} is what?"},
        {"role": "assistant", "content": f"{3 * number}"},
    )
]
QUESTION = {"role": "user", "content": "17+25="}


@pytest.fixture(scope="module")
def shifting(demo_home: Path) -> Iterator[str]:
    with serving(demo_home, context_shift=True) as address:
        yield address


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with talking(tmp_path_factory.mktemp("home"), CHATML, context_shift=True) as address:
        yield address


def ollama(address: str, messages: list[dict[str, str]], **more: Any) -> httpx.Response:
    options = {"temperature": 0, **more.pop("options", {})}
    body = {"model": "demo", "messages": messages, "stream": False, "options": options, **more}
    return httpx.post(f"{address}/api/chat", json=body, timeout=60)


def test_the_oldest_turns_go(shifting: str) -> None:
    answer = ollama(shifting, [SYSTEM, *TURNS, QUESTION]).json()
    dropped = answer["dropped_messages"]
    assert dropped > 0
    assert dropped % 2 == 0
    kept = ollama(shifting, [SYSTEM, *TURNS[dropped:], QUESTION]).json()
    assert "dropped_messages" not in kept
    for name in ("message", "prompt_eval_count"):
        assert kept[name] == answer[name]
    one_more = ollama(shifting, [SYSTEM, *TURNS[dropped - 2 :], QUESTION]).json()
    assert one_more["dropped_messages"] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_openai(shifting: str, stream: bool) -> None:
    messages = [SYSTEM, *TURNS, QUESTION]
    body = {"model": "demo", "messages": messages, "temperature": 0, "stream": stream}
    answer = httpx.post(f"{shifting}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200
    assert answer.text.count('"dropped_messages"') == 1


def test_a_last_turn_that_is_too_long(shifting: str) -> None:
    alone = [SYSTEM, *TURNS, {"role": "user", "content": "1+" * 2000}]
    assert ollama(shifting, alone).json()["code"] == "prompt_too_long"


def test_never_without_the_variable(address: str) -> None:
    refused = ollama(address, [SYSTEM, *TURNS, QUESTION])
    assert refused.status_code == 400
    assert refused.json()["code"] == "prompt_too_long"
    assert any(character.isdigit() for character in refused.json()["error"])


ROUNDS = 40


def to_ollama(address: str) -> httpx.Response:
    turns: list[Any] = [SYSTEM, QUESTION]
    for number in range(ROUNDS):
        call = {"function": {"name": "Read", "arguments": {"n": number}}}
        turns.append({"role": "assistant", "content": "", "tool_calls": [call]})
        turns.append({"role": "tool", "tool_name": "Read", "content": f"result {number}."})
    body = {"model": "demo", "messages": turns, "stream": False}
    return httpx.post(f"{address}/api/chat", json=body, timeout=60)


def to_openai(address: str) -> httpx.Response:
    turns: list[Any] = [SYSTEM, QUESTION]
    for number in range(ROUNDS):
        function = {"name": "Read", "arguments": json.dumps({"n": number})}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        turns.append({"role": "assistant", "content": None, "tool_calls": [call]})
        turns.append({"role": "tool", "tool_call_id": call["id"], "content": f"result {number}."})
    body = {"model": "demo", "messages": turns}
    return httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60)


def to_responses(address: str) -> httpx.Response:
    items: list[Any] = [QUESTION]
    for number in range(ROUNDS):
        about = {"call_id": f"call_{number}"}
        arguments = json.dumps({"n": number})
        items.append({"type": "function_call", **about, "name": "Read", "arguments": arguments})
        items.append({"type": "function_call_output", **about, "output": f"result {number}."})
    body = {"model": "demo", "instructions": SYSTEM["content"], "input": items}
    return httpx.post(f"{address}/v1/responses", json=body, timeout=60)


def to_messages(address: str) -> httpx.Response:
    turns: list[Any] = [QUESTION]
    for number in range(ROUNDS):
        call = {"type": "tool_use", "id": f"call_{number}", "name": "Read", "input": {"n": number}}
        turns.append({"role": "assistant", "content": [call]})
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": f"result {number}."}
        turns.append({"role": "user", "content": [result]})
    body = {"model": "demo", "system": SYSTEM["content"], "messages": turns, "max_tokens": 9}
    return httpx.post(f"{address}/v1/messages", json=body, timeout=60)


DOORS = [to_ollama, to_openai, to_responses, to_messages]


@pytest.mark.parametrize("ask", DOORS)
def test_an_agent_loses_its_oldest_rounds(
    ask: Callable[[str], httpx.Response], agents: str, script: Script
) -> None:
    """The system text and the question stay; a call and its result go together."""
    script.say("Yes.")
    answer = ask(agents)
    assert answer.status_code == 200, answer.text
    dropped = answer.json()["dropped_messages"]
    (prompt,) = script.prompts
    kept = list(range(dropped // 2, ROUNDS))
    assert dropped % 2 == 0
    assert 0 < dropped < 2 * (ROUNDS - 1)
    assert [int(n) for n in re.findall(r"Read n:(\d+)", prompt)] == kept
    assert [int(n) for n in re.findall(r"result (\d+)", prompt)] == kept
    assert prompt.index("You are small.") < prompt.index("17+25=") < prompt.index("Read")


@pytest.mark.parametrize("ask", DOORS)
def test_an_agent_is_refused_without_the_variable(
    ask: Callable[[str], httpx.Response], chatml: str
) -> None:
    refused = ask(chatml)
    assert refused.status_code == 400
    assert re.search(r"the prompt has \d+ tokens, the context 512", refused.text)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/api/generate", {"prompt": "1+" * 2000, "system": "Be small."}),
        ("/api/generate", {"prompt": "1+" * 2000, "raw": True}),
        ("/v1/completions", {"prompt": "1+" * 2000}),
    ],
)
def test_one_text_has_no_turns(path: str, more: dict[str, Any], agents: str) -> None:
    refused = httpx.post(agents + path, json={"model": "demo", **more}, timeout=60)
    assert refused.status_code == 400
    assert "tokens, the context 512" in refused.text


def test_a_count_is_of_all_turns(agents: str) -> None:
    said = [QUESTION, {"role": "assistant", "content": "Yes. " * 300}, QUESTION]
    body = {"model": "demo", "messages": said}
    count = httpx.post(f"{agents}/v1/messages/count_tokens", json=body, timeout=60).json()
    body = {"model": "demo", "input": said}
    other = httpx.post(f"{agents}/v1/responses/input_tokens", json=body, timeout=60).json()
    assert count["input_tokens"] == other["input_tokens"] > 512


def test_num_ctx_is_shifted_into(shifting: str) -> None:
    said = [SYSTEM, *TURNS[:8], QUESTION]
    whole = ollama(shifting, said).json()
    assert "dropped_messages" not in whole
    size = whole["prompt_eval_count"]
    cut = ollama(shifting, said, options={"num_ctx": size}).json()
    assert cut["dropped_messages"] > 0
    assert cut["prompt_eval_count"] <= size - size // 8
