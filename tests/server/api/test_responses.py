"""OpenAI's Responses API, with the official `openai` client: whole, streamed, stored, tools."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from moeinf.server.api.responses import store
from tests.server.api.test_progress import LONG
from tests.server.api.test_tools import CALL, THOUGHT
from tests.server.api.test_tools import TOOLS as CHAT_TOOLS
from tests.server.scripted import Script

FUNCTION = CHAT_TOOLS[0]["function"]
TOOLS: list[Any] = [{"type": "function", "strict": True, **FUNCTION}]


@pytest.fixture
def client(chatml: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{chatml}/v1", api_key="any", max_retries=0) as found:
        yield found


def create(client: openai.OpenAI, input: Any = "1+2", **options: Any) -> Any:
    return client.responses.create(model="demo", input=input, **options)


def plain(item: Any) -> dict[str, Any]:
    """Return an output item without the ids, which differ."""
    found: dict[str, Any] = item.model_dump(exclude_none=True)
    assert found.pop("id").split("_")[0] in ("rs", "msg", "fc")
    found.pop("call_id", None)
    return found


def text_item(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "role": "assistant", "status": "completed", "content": [part]}


CALLED = {
    "type": "function_call",
    "name": "add",
    "arguments": '{"a": 1, "b": 2}',
    "status": "completed",
}
OUTPUT = [
    {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "I <b>add</b>\n"}],
        "status": "completed",
    },
    text_item("I add."),
    CALLED,
    CALLED,
]
EVENTS = {
    "reasoning": [
        "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
    ],
    "message": ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"],
    "function_call": ["function_call_arguments.delta", "function_call_arguments.done"],
}  # fmt: skip


def test_a_whole_response_and_its_stream(client: openai.OpenAI, script: Script) -> None:
    script.say(THOUGHT + "I add.\n" + CALL + "\n" + CALL)
    about: dict[str, Any] = {"tools": TOOLS, "instructions": "Add.", "metadata": {"k": "v"}}
    whole = create(client, **about)
    assert (whole.object, whole.status, whole.model) == ("response", "completed", "demo")
    assert [plain(item) for item in whole.output] == OUTPUT
    assert whole.output_text == "I add."
    assert whole.output[2].call_id != whole.output[3].call_id
    assert (whole.instructions, whole.metadata) == ("Add.", {"k": "v"})
    assert [tool.name for tool in whole.tools] == ["add"]
    usage = whole.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert 10 <= usage.output_tokens_details.reasoning_tokens < usage.output_tokens - 100
    assert script.prompts[-1].partition("<|system|>Add.")[2] == "<|user|>1+2<|assistant|>"
    events = list(create(client, **about, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [
        event.type.removeprefix("response.")
        for before, event in zip([None, *events], events, strict=False)
        if before is None or not event.type.endswith(".delta") or before.type != event.type
    ]
    inner = [
        name
        for item in OUTPUT
        for name in ["output_item.added", *EVENTS[str(item["type"])], "output_item.done"]
    ]
    assert names == ["created", "in_progress", *inner, "completed"]
    begun, last = events[0].response, events[-1].response
    assert (begun.status, begun.output, begun.id) == ("in_progress", [], last.id)
    assert [plain(item) for item in last.output] == OUTPUT
    assert last.usage.output_tokens_details == usage.output_tokens_details
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in last.output]
    script.say(CALL + CALL)
    one = create(client, tools=TOOLS, parallel_tool_calls=False)
    assert [plain(item) for item in one.output] == [CALLED]
    none = create(client, tools=TOOLS, tool_choice="none")
    assert none.output_text == CALL + CALL


class Sum(BaseModel):
    a: int


def test_the_asynchronous_client(chatml: str, script: Script) -> None:
    script.say("I add.\n" + CALL)

    async def ask() -> tuple[Any, list[str], Any]:
        async with openai.AsyncOpenAI(base_url=f"{chatml}/v1", api_key="any") as client:
            about: Any = {"model": "demo", "input": "1+2", "tools": TOOLS}
            whole = await client.responses.create(**about)
            async with client.responses.stream(**about) as stream:
                texts = [e.delta async for e in stream if e.type == "response.output_text.delta"]
                return whole, texts, await stream.get_final_response()

    whole, texts, streamed = asyncio.run(ask())
    assert [plain(item) for item in whole.output] == OUTPUT[1:3]
    assert "".join(texts) == "I add."
    assert streamed.output[1].parsed_arguments == {"a": 1, "b": 2}


def test_items_reach_the_template(client: openai.OpenAI, script: Script) -> None:
    script.say("ok")

    def prompt(input: Any, **options: Any) -> str:
        create(client, input, **options)
        return script.prompts[-1].removeprefix("<|begin|>")

    said = [
        {"role": "developer", "content": "Be <|end|> short."},
        {"role": "user", "content": [{"type": "input_text", "text": "1+2"}]},
        {"role": "user", "content": "please"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Add."}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1, "b": 2}'},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"a": 3}'},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "four"}],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "3"}]},
        {"role": "user", "content": "So?"},
    ]
    assert prompt(said, instructions="You add.") == (
        "<|system|>You add.\n\nBe <|end|> short.<|user|>1+2\n\nplease<|assistant|>"
        "add a:1 b:2add a:3tool c13tool c2four<|assistant|>3<|user|>So?<|assistant|>"
    )
    assert prompt("1", reasoning={"effort": "none"}).endswith("<|assistant|><think></think>")


def test_a_conversation_by_ids(client: openai.OpenAI, script: Script) -> None:
    """create, retrieve, input_items.list, delete; a later request names the response before."""
    script.say(CALL)
    first = create(client, tools=TOOLS, instructions="Add.")
    script.say("It is 3.")
    call = first.output[0]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    second = create(client, [result], tools=TOOLS, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    ended = f"<|user|>1+2<|assistant|>add a:1 b:2tool {call.call_id}3<|assistant|>"
    assert script.prompts[-1].endswith(f"as <tool_call>{ended}")
    events = list(create(client, "And?", previous_response_id=second.id, stream=True))
    third = events[-1].response
    assert script.prompts[-1].endswith(f"{ended}It is 3.<|user|>And?<|assistant|>")
    assert client.responses.retrieve(third.id) == third
    assert client.responses.retrieve(second.id).output_text == "It is 3."
    items = list(client.responses.input_items.list(third.id, order="asc", limit=2))
    kinds = ["message", "function_call", "function_call_output", "message", "message"]
    assert [item.type for item in items] == kinds
    assert items[0].content[0].text == "1+2"
    newest = client.responses.input_items.list(third.id, limit=1)
    assert (newest.data[0], newest.has_more) == (items[-1], True)
    counted = client.responses.input_tokens.count(
        model="demo", input="And?", previous_response_id=second.id
    )
    assert counted.input_tokens == third.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(third.id)
    with pytest.raises(openai.BadRequestError, match="stream"):
        client.responses.retrieve(third.id, stream=True)
    client.responses.delete(second.id)
    hidden = create(client, "x", store=False)
    for lost in (
        lambda: client.responses.retrieve(second.id),
        lambda: client.responses.delete(second.id),
        lambda: client.responses.retrieve(hidden.id),
        lambda: create(client, "x", previous_response_id=third.id),  # the chain has a gap
        lambda: client.responses.input_items.list(third.id),
    ):
        with pytest.raises(openai.NotFoundError) as missing:
            lost()
        assert missing.value.code == "response_not_found"


def test_the_store_is_bounded(
    client: openai.OpenAI, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.say("ok")
    monkeypatch.setattr(store, "MOST_RESPONSES", 2)
    first, second = (create(client, text) for text in "ab")
    client.responses.retrieve(first.id)  # used after the second
    third = create(client, "c")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    assert client.responses.retrieve(first.id).id == first.id
    monkeypatch.setattr(store, "MOST_STORED_BYTES", 4000)
    long = create(client, "d", metadata={"k": "x" * 1000})
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(third.id)
    huge = create(client, "e", metadata={"k": "x" * 5000})
    assert client.responses.retrieve(long.id).id == long.id
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(huge.id)


def test_usage_tells_what_was_cached(client: openai.OpenAI, script: Script) -> None:
    """A server that reuses whole chunks of 256 tokens reads the rest of a prompt again."""
    script.say("ok")
    text = LONG.replace("plus", "less")
    usages = [create(client, text).usage for _ in range(2)]
    usages.append(list(create(client, text, stream=True))[-1].response.usage)
    assert [one.input_tokens_details.cached_tokens for one in usages] == [0, 256, 256]
    (count,) = {one.input_tokens for one in usages}
    assert count > 256


def test_ends_schemas_and_logprobs(client: openai.OpenAI, script: Script) -> None:
    script.say("one two three")
    cut = create(client, max_output_tokens=5)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.output[0].status == "incomplete"
    assert cut.usage.output_tokens == 5
    (*_, last) = create(client, max_output_tokens=5, stream=True)
    assert last.type == "response.incomplete"
    script.say(THOUGHT + "ok")
    told = create(client, include=["message.output_text.logprobs"], top_logprobs=2)
    found = told.output[1].content[0].logprobs
    assert "".join(token.token for token in found) == "ok"
    assert all(len(token.top_logprobs) == 2 for token in found)
    events = list(create(client, top_logprobs=1, stream=True))
    streamed = [
        token.token
        for event in events
        if event.type == "response.output_text.delta"
        for token in event.logprobs
    ]
    assert "".join(streamed) == "ok"


def test_a_schema_or_a_call_that_must_be(client: openai.OpenAI) -> None:
    """Answers are not scripted: the grammar alone decides that they are valid."""
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    about: dict[str, Any] = {"reasoning": {"effort": "none"}}
    assert json.loads(create(client, text={"format": form}, **about).output_text) == {"a": 7}
    stop = {
        "type": "function",
        "name": "stop",
        "parameters": {"type": "object", "maxProperties": 0},
    }
    choices: list[Any] = [
        {"type": "function", "name": "stop"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "stop"}],
        },
    ]
    for choice in choices:
        forced = create(client, tools=[*TOOLS, stop], tool_choice=choice, **about)
        assert (forced.output[-1].name, forced.output[-1].arguments) == ("stop", "{}")


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"input": []}, "no turns"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "text only"),
        ({"input": [{"type": "item_reference"}]}, "has no id"),
        ({"input": [{"type": "shell_call", "id": "x"}]}, "shell_call"),
        ({"input": [{"type": "function_call_output", "output": "3"}]}, "no call_id"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "no name"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tools": [{"type": "function"}]}, "no name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "mul"}}, "'mul' is invalid"),
        ({"tool_choice": "required"}, "has no tools"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "schema is missing"),
        ({"reasoning": {"effort": "a lot"}}, r"reasoning\.effort"),
        ({"max_output_tokens": -2}, "max_output_tokens"),
        ({"input": [{"role": "boss"}]}, r"input\.0\.role: Input should be 'user'"),
        ({"input": [{"role": "user", "content": ["1"]}]}, r"input\.0\.content\.0: .* an object"),
        ({"tool_choice": {"type": "x"}}, r"tool_choice\.type: Input should be 'function'"),
        ({"extra_body": {"input": 5}}, "input: Input should be a valid string"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_is_refused(about: dict[str, Any], words: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        create(client, **about)
    assert refused.value.code == "bad_request"


def test_what_has_no_effect(chatml: str, script: Script) -> None:
    script.say("3")
    body = {
        "model": "demo",
        "input": "1+2",
        "tools": [{"type": "web_search"}, {"type": "custom", "name": "patch"}, *TOOLS],
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "service_tier": "auto",
        "text": {"verbosity": "low"},
        "reasoning": {"summary": "auto"},
        "stream_options": {"include_obfuscation": False},
        "background": False,
        "conversation": None,
        "truncation": "auto",
        "nonsense": [1],
    }
    told = httpx.post(f"{chatml}/v1/responses", json=body, timeout=60).json()
    assert told["output"][0]["content"][0]["text"] == "3"
    assert script.prompts[-1].count('"type": "function"') == 1


def test_progress_and_a_late_error(
    chatml: str, script: Script, fail_reading: Callable[[], None]
) -> None:
    """A long prompt's progress is a comment; an error ends the stream as a failed response."""
    script.say("42")
    fail_reading()
    body = {"model": "demo", "stream": True, "input": LONG}
    with httpx.stream("POST", f"{chatml}/v1/responses", json=body, timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert any(line.startswith(": prompt ") for line in lines)
    last = json.loads(lines[-1].removeprefix("data: "))
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "out_of_memory"
    long = {"model": "demo", "input": "x " * 50_000}
    told = httpx.post(f"{chatml}/v1/responses", json=long, timeout=60)
    assert (told.status_code, told.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert told.json()["error"]["message"].startswith("this model's maximum context length is ")


def test_a_refused_request_reads_nothing_that_is_stored(
    client: openai.OpenAI, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.say("It is 3.")
    first = create(client)
    monkeypatch.setattr(store.Stored, "read", lambda _: pytest.fail("it was read"))
    for wrong in (
        {"model": "nowhere"},
        {"extra_body": {"prompt": {"id": "x"}}},
        {"tool_choice": {"type": "function", "name": "nothing"}},
        {"input": [{"type": "message"}]},
        {"input": [{"type": "item_reference", "id": "nothing"}]},
        {"text": {"format": {"type": "json_schema", "name": "x"}}},
    ):
        said: dict[str, Any] = {"model": "demo", "input": "x", **wrong}
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)):
            client.responses.create(previous_response_id=first.id, **said)


def test_a_stored_conversation_is_read_in_a_thread(
    client: openai.OpenAI, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.say("It is 3.")
    first = create(client)
    threads, read = [], store.Stored.read

    def reading(self: store.Stored) -> list[dict[str, Any]]:
        threads.append(threading.current_thread().name)
        return read(self)

    monkeypatch.setattr(store.Stored, "read", reading)
    script.say("It is 4.")
    assert create(client, "again", previous_response_id=first.id).output_text == "It is 4."
    assert httpx.get(f"{client.base_url}responses/{first.id}/input_items").status_code == 200
    assert len(threads) == 2
    assert all(name.startswith("parsing") for name in threads)
