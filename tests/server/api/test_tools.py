"""Test reasoning and tool calls in both APIs, streamed or not, with the official clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import openai
import pytest

from tests.server.scripted import Script

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds <|end|>",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    }
]
ASK: list[Any] = [{"role": "user", "content": "1+2"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
THOUGHT = "<think>\nI <b>add</b>\n</think>\n\n"


@pytest.fixture
def to_openai(chatml: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{chatml}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def to_ollama(chatml: str) -> Iterator[ollama.Client]:
    client = ollama.Client(chatml)
    yield client
    client._client.close()


def create(client: openai.OpenAI, messages: list[Any] = ASK, **options: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=messages, **options)


def test_ollama_thinks(to_ollama: ollama.Client, script: Script) -> None:
    script.say(THOUGHT + "It is 3.")
    whole = to_ollama.chat("demo", ASK, think=True)
    assert whole.message.thinking == "I <b>add</b>\n"
    assert whole.message.content == "It is 3."
    assert script.prompts[-1].endswith("<|assistant|>")
    pieces = list(to_ollama.chat("demo", ASK, stream=True))
    assert "".join(p.message.thinking or "" for p in pieces) == "I <b>add</b>\n"
    assert "".join(p.message.content or "" for p in pieces) == "It is 3."
    assert all(not (p.message.thinking and p.message.content) for p in pieces)
    said = to_ollama.generate("demo", "1+2", think=True)
    assert (said.thinking, said.response) == ("I <b>add</b>\n", "It is 3.")
    parts = list(to_ollama.generate("demo", "1+2", think=True, stream=True))
    assert "".join(p.thinking or "" for p in parts) == "I <b>add</b>\n"
    raw = to_ollama.generate("demo", "1+2", raw=True)
    assert (raw.thinking, raw.response) == (None, THOUGHT + "It is 3.")
    script.say("It is 3.")
    quick = to_ollama.chat("demo", ASK, think=False)
    assert (quick.message.thinking, quick.message.content) == (None, "It is 3.")
    assert script.prompts[-1].endswith("<|assistant|><think></think>")


def test_openai_thinks(to_openai: openai.OpenAI, script: Script) -> None:
    script.say(THOUGHT + "It is 3.")
    message = create(to_openai).choices[0].message
    assert message.content == "It is 3."
    assert message.reasoning_content == "I <b>add</b>\n"
    deltas = [c.choices[0].delta for c in create(to_openai, stream=True)]
    assert "".join(getattr(d, "reasoning_content", "") for d in deltas) == "I <b>add</b>\n"
    assert "".join(d.content or "" for d in deltas) == "It is 3."
    found = create(to_openai, logprobs=True).choices[0]
    assert "".join(t.token for t in found.logprobs.content) == THOUGHT + "It is 3."
    create(to_openai, reasoning_effort="none")
    assert script.prompts[-1].endswith("<think></think>")
    with pytest.raises(openai.BadRequestError, match="reasoning_effort"):
        create(to_openai, reasoning_effort="a lot")


def test_tools_that_cannot_fit_are_not_cut_into_tokens(to_openai: openai.OpenAI) -> None:
    function = {**TOOLS[0]["function"], "description": "x " * 40_000}
    with pytest.raises(openai.BadRequestError, match="characters, the context"):
        create(to_openai, tools=[{"type": "function", "function": function}])


def test_openai_calls(to_openai: openai.OpenAI, script: Script) -> None:
    script.say(THOUGHT + "I add.\n" + CALL + "\n" + CALL)
    choice = create(to_openai, tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I add."
    assert choice.message.reasoning_content == "I <b>add</b>\n"
    calls = choice.message.tool_calls
    assert [(c.type, c.function.name, json.loads(c.function.arguments)) for c in calls] == [
        ("function", "add", {"a": 1, "b": 2})
    ] * 2
    assert len({call.id for call in calls}) == 2
    assert "adds <|end|>" in script.prompts[-1]
    one = create(to_openai, tools=TOOLS, parallel_tool_calls=False).choices[0]
    assert len(one.message.tool_calls) == 1

    calls = {}
    reasons = []
    for chunk in create(to_openai, tools=TOOLS, stream=True):
        reasons.append(chunk.choices[0].finish_reason)
        for part in chunk.choices[0].delta.tool_calls or []:
            call = calls.setdefault(part.index, {"arguments": ""})
            call |= {"id": part.id} if part.id else {}
            call |= {"name": part.function.name} if part.function.name else {}
            call["arguments"] += part.function.arguments
    assert sorted(calls) == [0, 1]
    assert all(c["name"] == "add" and c["id"].startswith("call_") for c in calls.values())
    assert json.loads(calls[1]["arguments"]) == {"a": 1, "b": 2}
    assert reasons[-1] == "tool_calls"
    assert set(reasons[:-1]) == {None}

    script.say(CALL)
    only = create(to_openai, tools=TOOLS).choices[0].message
    assert only.content is None
    none = create(to_openai, tools=TOOLS, tool_choice="none").choices[0]
    assert (none.finish_reason, none.message.content) == ("stop", CALL)
    assert "# Tools" not in script.prompts[-1]
    cut = create(to_openai, tools=TOOLS, max_tokens=20).choices[0]
    assert (cut.finish_reason, cut.message.content) == ("length", CALL[:20])


def test_a_results_way_back(
    to_openai: openai.OpenAI, to_ollama: ollama.Client, script: Script
) -> None:
    script.say(CALL)
    asked = create(to_openai, tools=TOOLS).choices[0].message
    call = asked.tool_calls[0]
    script.say("It is 3.")
    result = {"role": "tool", "tool_call_id": call.id, "content": "3 <|end|>"}
    told = create(to_openai, [*ASK, asked, result], tools=TOOLS).choices[0]
    assert (told.finish_reason, told.message.content) == ("stop", "It is 3.")
    assert script.prompts[-1].endswith(f"add a:1 b:2tool {call.id}3 <|end|><|assistant|>")

    script.say(CALL)
    answer = to_ollama.chat("demo", ASK, tools=TOOLS)
    assert (answer.done_reason, answer.message.content) == ("stop", "")
    found = answer.message.tool_calls
    assert found is not None
    assert [(c.function.name, c.function.arguments) for c in found] == [("add", {"a": 1, "b": 2})]
    pieces = list(to_ollama.chat("demo", ASK, tools=TOOLS, stream=True))
    streamed = [c for piece in pieces for c in piece.message.tool_calls or []]
    assert [c.function.arguments for c in streamed] == [{"a": 1, "b": 2}]
    script.say("It is 3.")
    back = {"role": "tool", "tool_name": "add", "content": "3"}
    to_ollama.chat("demo", [*ASK, answer.message, back], tools=TOOLS)
    assert script.prompts[-1].endswith("add a:1 b:2tool 0000000013<|assistant|>")


def test_what_a_model_cannot(address: str, to_ollama: ollama.Client) -> None:
    shown = to_ollama.show("demo")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    plain = ollama.Client(address)
    assert plain.show("demo").capabilities == ["completion"]
    with pytest.raises(ollama.ResponseError, match="demo:bf16 does not support tools") as caught:
        plain.chat("demo", ASK, tools=TOOLS)
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="demo:bf16 does not support thinking"):
        plain.chat("demo", ASK, think=True)
    assert plain.chat("demo", ASK, think=False).message.content
    plain._client.close()
    with (
        openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="does not support tools"),
    ):
        create(client, tools=TOOLS)


def test_a_call_that_must_be(to_openai: openai.OpenAI) -> None:
    """The answer is not scripted: the demo has learned no tools, and the grammar forces a call."""
    other = {"type": "function", "function": {"name": "sub", "parameters": {"type": "object"}}}
    for seed in range(2):
        options = {"tools": [*TOOLS, other], "seed": seed, "temperature": 1.5, "max_tokens": 100}
        for choice in ("required", {"type": "function", "function": {"name": "add"}}):
            found = create(to_openai, tool_choice=choice, **options).choices[0]
            if found.finish_reason == "length":
                continue
            assert found.finish_reason == "tool_calls"
            (call,) = found.message.tool_calls
            if call.function.name == "add" or choice != "required":
                given = json.loads(call.function.arguments)
                assert sorted(given) == ["a", "b"]
                assert all(type(value) is int for value in given.values())
            else:
                assert call.function.name == "sub"
    wrong = {"type": "function", "function": {"name": "mul"}}
    with pytest.raises(openai.BadRequestError, match="'mul' is invalid"):
        create(to_openai, tools=TOOLS, tool_choice=wrong)
    with pytest.raises(openai.BadRequestError, match="has no tools"):
        create(to_openai, tool_choice="required")


def test_messages_of_any_shape_are_refused_in_words(chatml: str) -> None:
    wrong: list[Any] = [
        {"role": "assistant", "tool_calls": "x"},
        {"role": "assistant", "tool_calls": [1]},
        {"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]},
        {"role": "tool", "content": "3", "tool_call_id": 7},
    ]
    for message in wrong:
        for path in ("/api/chat", "/v1/chat/completions"):
            body = {"model": "demo", "messages": [*ASK, message], "stream": False}
            assert httpx.post(chatml + path, json=body).status_code == 400
