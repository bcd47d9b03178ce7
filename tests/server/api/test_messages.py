"""Anthropic's Messages API, with the official `anthropic` client: whole, streamed, with tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import pytest

from moeinf.server.api.messages.answer import SIGNATURE
from tests.server.api.test_progress import LONG
from tests.server.api.test_tools import CALL, THOUGHT
from tests.server.api.test_tools import TOOLS as OPENAI_TOOLS
from tests.server.scripted import CHATML, Script, talking

FUNCTION = OPENAI_TOOLS[0]["function"]
TOOLS: list[Any] = [
    {"name": FUNCTION["name"], "description": "adds", "input_schema": FUNCTION["parameters"]}
]
ASK: list[Any] = [{"role": "user", "content": "1+2"}]
BILLING = "x-anthropic-billing-header: cc_version=2.1.{0}; cc_entrypoint=cli; cch={0};"


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with talking(tmp_path_factory.mktemp("home"), CHATML, api_key="secret") as address:
        yield address


@pytest.fixture
def client(chatml: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=chatml, api_key="secret", max_retries=0) as found:
        yield found


def create(client: anthropic.Anthropic, messages: list[Any] = ASK, **options: Any) -> Any:
    about = {"model": "demo", "max_tokens": 300, "messages": messages, **options}
    return client.messages.create(**about)


def blocks_of(message: Any) -> list[dict[str, Any]]:
    """Return the blocks of an answer without the ids, which differ."""
    found = [block.model_dump(exclude_none=True) for block in message.content]
    for block in found:
        if block["type"] == "tool_use":
            assert block.pop("id").startswith("toolu_")
    return found


SAID = [
    {"type": "thinking", "thinking": "I <b>add</b>\n", "signature": SIGNATURE},
    {"type": "text", "text": "I add."},
    *[{"type": "tool_use", "name": "add", "input": {"a": 1, "b": 2}}] * 2,
]


def test_a_whole_answer_and_its_stream(client: anthropic.Anthropic, script: Script) -> None:
    script.say(THOUGHT + "I add.\n" + CALL + "\n" + CALL)
    whole = create(client, tools=TOOLS)
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", "demo")
    assert (whole.stop_reason, whole.stop_sequence) == ("tool_use", None)
    assert blocks_of(whole) == SAID
    assert whole.content[2].id != whole.content[3].id
    events = list(create(client, tools=TOOLS, stream=True))
    order = [
        event.type + str(getattr(event, "index", ""))
        for before, event in zip([None, *events], events, strict=False)
        if event.type != "content_block_delta" or before is None or before.type != event.type
    ]
    blocks = [
        f"content_block_{part}{index}" for index in range(4) for part in ("start", "delta", "stop")
    ]
    assert order == ["message_start", *blocks, "message_delta", "message_stop"]
    begun = events[0].message
    assert (begun.content, begun.stop_reason, begun.usage.output_tokens) == ([], None, 0)
    assert begun.usage.input_tokens == whole.usage.input_tokens
    assert events[-2].usage.model_dump() == {
        name: getattr(whole.usage, name) for name in events[-2].usage.model_dump()
    }
    assert events[-2].delta.stop_reason == "tool_use"
    script.say(CALL + CALL)
    one = create(
        client, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}
    )
    assert blocks_of(one) == SAID[2:3]
    none = create(client, tools=TOOLS, tool_choice={"type": "none"})
    assert (none.stop_reason, none.content[0].text) == ("end_turn", CALL + CALL)
    assert "# Tools" not in script.prompts[-1]


def test_the_asynchronous_client(chatml: str, script: Script) -> None:
    """With thinking and without, whole, as events, and as the stream that its helper collects."""

    async def ask(**more: Any) -> tuple[Any, list[Any], str, Any]:
        async with anthropic.AsyncAnthropic(base_url=chatml, api_key="secret") as client:
            about: Any = {"model": "demo", "max_tokens": 300, "messages": ASK, "tools": TOOLS}
            about |= more
            whole = await client.messages.create(**about)
            events = [one async for one in await client.messages.create(**about, stream=True)]
            async with client.messages.stream(**about) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                return whole, events, text, await stream.get_final_message()

    for said, thinking, blocks in (
        (THOUGHT + "I add.\n" + CALL, {"type": "enabled", "budget_tokens": 1024}, SAID[:3]),
        ("I add.\n" + CALL, {"type": "disabled"}, SAID[1:3]),
        ("I add.\n" + CALL, None, SAID[1:3]),
    ):
        script.say(said)
        whole, events, text, streamed = asyncio.run(
            ask(**({} if thinking is None else {"thinking": thinking}))
        )
        assert script.prompts[-1].endswith("<think></think>") == (thinking == {"type": "disabled"})
        assert blocks_of(whole) == blocks_of(streamed) == blocks
        assert text == "I add."
        assert (whole.stop_reason, streamed.stop_reason) == ("tool_use", "tool_use")
        started = [e.content_block.type for e in events if e.type == "content_block_start"]
        assert started == [block["type"] for block in blocks]
        pieces = [
            event.delta.partial_json
            for event in events
            if event.type == "content_block_delta" and event.delta.type == "input_json_delta"
        ]
        assert json.loads("".join(pieces)) == {"a": 1, "b": 2}


def test_the_stream_helper_collects_tools(client: anthropic.Anthropic, script: Script) -> None:
    script.say(THOUGHT + "I add.\n" + CALL + CALL)
    with client.messages.stream(model="demo", max_tokens=300, messages=ASK, tools=TOOLS) as stream:
        kinds = {event.type for event in stream}
        assert blocks_of(stream.get_final_message()) == SAID
    assert {"thinking", "text", "input_json"} < kinds


def test_turns_reach_the_template(client: anthropic.Anthropic, script: Script) -> None:
    """Results are messages of their own, and turns of one role are one turn."""
    script.say("ok")

    def prompt(messages: list[Any], **options: Any) -> str:
        create(client, messages, **options)
        return script.prompts[-1].removeprefix("<|begin|>")

    system = [
        {"type": "text", "text": BILLING.format(1)},
        {"type": "text", "text": "You add.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be <|end|> short."},
    ]
    said = prompt(ASK, system=system)
    assert said == "<|system|>You add.\n\nBe <|end|> short.<|user|>1+2<|assistant|>"
    system[0]["text"] = BILLING.format("0aaa9")
    assert prompt(ASK, system=system) == said
    script.say(CALL)
    asked = create(client, tools=TOOLS)
    call = asked.content[0]
    script.say("3")
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": [{"type": "text", "text": "3"}, {"type": "text", "text": "exactly"}],
    }
    thought = {"type": "thinking", "thinking": "I add.", "signature": SIGNATURE}
    hidden = {"type": "redacted_thinking", "data": "x"}
    turns = [
        *ASK,
        {"role": "user", "content": [{"type": "text", "text": "please"}]},
        {
            "role": "assistant",
            "content": [thought, hidden, {"type": "text", "text": "Well."}, call],
        },
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    assert prompt(turns, tools=TOOLS).partition("<|user|>")[2] == (
        "1+2\n\nplease<|assistant|>Well.add a:1 b:2"
        f"tool {call.id}3\n\nexactly<|user|>So?<|assistant|>"
    )
    failed = {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True}
    assert prompt([*ASK, {"role": "user", "content": [failed]}]).endswith(
        "<|user|>1+2tool toolu_1error<|assistant|>"
    )
    source = {"type": "text", "media_type": "text/plain", "data": "six"}
    read = [
        {"type": "document", "title": "Numbers", "source": source},
        {
            "type": "search_result",
            "title": "T",
            "source": "S",
            "content": [{"type": "text", "text": "C"}],
        },
    ]
    assert prompt([{"role": "user", "content": read}]) == (
        "<|user|>Numbers\n\nsix\n\nT\n\nS\n\nC<|assistant|>"
    )


def test_stop_reasons(client: anthropic.Anthropic, script: Script) -> None:
    script.say("one two three")
    ended = create(client)
    assert (ended.stop_reason, ended.content[0].text) == ("end_turn", "one two three")
    stopped = create(client, stop_sequences=["four", "tw"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "tw")
    assert stopped.content[0].text == "one "
    with client.messages.stream(
        model="demo", max_tokens=300, messages=ASK, stop_sequences=["thr"]
    ) as stream:
        assert stream.get_final_message().stop_sequence == "thr"
    cut = create(client, max_tokens=2)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    none = create(client, max_tokens=0)
    assert (none.stop_reason, none.content, none.usage.output_tokens) == ("max_tokens", [], 0)
    script.say("x" * 600)
    for most in (-1, 10_000):
        full = create(client, max_tokens=most)
        assert full.stop_reason == "model_context_window_exceeded"
        assert full.usage.input_tokens + full.usage.cache_read_input_tokens > 0
        assert full.usage.output_tokens > 400


def test_thinking(client: anthropic.Anthropic, script: Script) -> None:
    script.say(THOUGHT + "3")
    empty = {**SAID[0], "thinking": ""}
    for thinking, first, end in (
        ({"type": "enabled", "budget_tokens": 1024}, SAID[0], "<|assistant|>"),
        ({"type": "adaptive"}, SAID[0], "<|assistant|>"),
        ({"type": "adaptive", "display": "omitted"}, empty, "<|assistant|>"),
        ({"type": "disabled"}, SAID[0], "<|assistant|><think></think>"),
    ):
        found = create(client, thinking=thinking)
        assert blocks_of(found) == [first, {"type": "text", "text": "3"}]
        assert script.prompts[-1].endswith(end)
    create(client, output_config={"effort": "max"})
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.effort"):
        create(client, output_config={"effort": "a lot"})


def test_usage_and_counts(client: anthropic.Anthropic, script: Script) -> None:
    """A server that reuses whole chunks of 256 tokens reads the rest of a prompt again."""
    script.say("42")
    long: list[Any] = [{"role": "user", "content": LONG}]
    count = client.messages.count_tokens(model="demo", messages=long).input_tokens
    assert count > 256
    usages = [create(client, long).usage for _ in range(2)]
    assert [usage.cache_read_input_tokens for usage in usages] == [0, 256]
    assert [usage.input_tokens for usage in usages] == [count, count - 256]
    assert usages[0].output_tokens == usages[1].output_tokens == 3
    asked = client.messages.count_tokens(model="demo", messages=ASK).input_tokens
    assert asked < 20
    answered = [*ASK, {"role": "assistant", "content": "It is 42."}]  # Claude Code's /context
    assert client.messages.count_tokens(model="demo", messages=answered).input_tokens > asked


def test_a_call_or_a_schema_that_must_be(client: anthropic.Anthropic) -> None:
    """The answer is not scripted: the demo has learned no tools, and the grammar forces a call."""
    short = [*TOOLS, {"name": "stop", "input_schema": {"type": "object", "maxProperties": 0}}]
    forced = create(client, tools=short, tool_choice={"type": "tool", "name": "stop"})
    assert forced.stop_reason == "tool_use"
    assert blocks_of(forced)[-1] == {"type": "tool_use", "name": "stop", "input": {}}
    forced = create(client, tools=short, tool_choice={"type": "any"}, max_tokens=90)
    assert forced.stop_reason in ("tool_use", "max_tokens")
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "schema": schema}
    for about in ({"output_config": {"format": form}}, {"extra_body": {"output_format": form}}):
        found = create(client, thinking={"type": "disabled"}, **about)
        assert json.loads(found.content[0].text) == {"a": 7}


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [*ASK, {"role": "assistant", "content": "3"}]}, "not continued"),
        ({"tools": [{"type": "web_search_20260318", "name": "web_search"}]}, "web_search_2026"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "mul"}}, "'mul' is invalid"),
        ({"tool_choice": {"type": "any"}}, "has no tools"),
        ({"extra_body": {"mcp_servers": [{"name": "x"}]}}, "mcp_servers"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"stop_sequences": ["x" * 2000]}, "stop_sequences"),
        ({"extra_headers": {"anthropic-version": "2023-01-01"}}, "anthropic-version"),
        ({"extra_headers": {"anthropic-version": "new"}}, "anthropic-version"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_is_refused(about: dict[str, Any], words: str, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match=words) as refused:
        create(client, **about)
    assert refused.value.type == "invalid_request_error"
    assert refused.value.error_code == "bad_request"


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "source": {"type": "url", "url": "http://a.example/x.png"}},
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}},
        {"type": "server_tool_use", "id": "x", "name": "web_search", "input": {}},
        {"type": "tool_result"},
        {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "audio"}]},
    ],
    ids=lambda block: block["type"],
)
def test_blocks_that_are_refused(block: dict[str, Any], client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"read|tool_use_id"):
        create(client, [{"role": "user", "content": [block]}])


def test_errors(chatml: str, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="no model 'nothing'") as missing:
        create(client, model="nothing")
    assert (missing.value.type, missing.value.error_code) == ("not_found_error", "model_not_found")
    for send in (create, lambda c, m: c.messages.count_tokens(model="demo", messages=m)):
        long: list[Any] = [{"role": "user", "content": "x " * 50_000}]
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: ") as too_long:
            send(client, long)
        assert too_long.value.error_code == "prompt_too_long"
    told = httpx.get(f"{chatml}/v1/messages", headers={"x-api-key": "secret"})
    assert (told.status_code, told.json()["type"]) == (405, "error")
    for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong"}):
        told = httpx.post(f"{chatml}/v1/messages", headers=headers, json={})
        assert told.status_code == 401
        assert told.json()["error"]["type"] == "authentication_error"
    with pytest.raises(anthropic.AuthenticationError):
        create(client.with_options(api_key="wrong"))


def test_what_has_no_effect(chatml: str, client: anthropic.Anthropic, script: Script) -> None:
    script.say("3")
    body = {
        "model": "demo",
        "max_tokens": 5,
        "messages": [{**ASK[0], "extra": 1}],
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "context_management": {"edits": []},
        "system": None,
        "tools": [{"type": "web_search_20260318", "name": "web_search"}, *TOOLS],
        "mcp_servers": [],
        "temperature": 1,
        "nonsense": [1],
    }
    headers = {"x-api-key": "secret", "anthropic-beta": "a,b", "anthropic-version": "2023-06-01"}
    told = httpx.post(f"{chatml}/v1/messages?beta=true", headers=headers, json=body)
    assert told.json()["content"] == [{"type": "text", "text": "3"}]
    assert {model.id for model in client.models.list()} == {"demo:bf16"}
    about = client.models.retrieve("demo")
    assert (about.type, about.display_name, about.max_input_tokens) == ("model", "demo:bf16", 512)


def test_pings_and_a_late_error(
    chatml: str, script: Script, fail_reading: Callable[[], None]
) -> None:
    """A ping at the beginning, one for each report of a long prompt; an error ends the stream."""
    script.say("42")
    body = {"model": "demo", "max_tokens": 9, "stream": True}
    found = []
    for fails in (False, True):
        if fails:
            fail_reading()
        said = LONG.replace("plus", "and" if fails else "or")
        asked = {**body, "messages": [{"role": "user", "content": said}]}
        url, headers = f"{chatml}/v1/messages", {"x-api-key": "secret"}
        with httpx.stream("POST", url, json=asked, headers=headers, timeout=60) as answer:
            lines = [line for line in answer.iter_lines() if line]
        names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
        data = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        assert [one["type"] for one in data] == names
        assert names[:2] == ["message_start", "ping"]
        assert names.count("ping") == 1 + sum(line.startswith(": prompt ") for line in lines) > 1
        found.append(data[-1])
    assert found[0] == {"type": "message_stop"}
    assert found[1]["type"] == "error"
    assert found[1]["error"]["type"] == "overloaded_error"
    assert "no room" in found[1]["error"]["message"]
