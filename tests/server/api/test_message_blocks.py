"""Test what becomes of the blocks and tools of requests to /v1/messages."""

from __future__ import annotations

from typing import Any, get_args

import anthropic
import httpx
import pytest
from anthropic.types import beta

from moeinf.server.api.messages.client_tools import described
from tests.server.scripted import Script

BASH = {"type": "bash_20250124", "name": "bash"}
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
PLAIN = {"type": "text", "text": "six"}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


def post(address: str, content: Any, **more: Any) -> httpx.Response:
    body = {"model": "demo", "max_tokens": 99, "messages": [{"role": "user", "content": content}]}
    return httpx.post(f"{address}/v1/messages", json={**body, **more}, timeout=60)


def document(source: Any, **more: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, **more}


def test_a_tool_that_its_type_describes_is_offered_and_called(chatml: str, script: Script) -> None:
    script.say(CALL)
    told = post(chatml, "List.", tools=[BASH, {"type": "computer_20250124", "name": "computer"}])
    (block,) = told.json()["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "bash", {"command": "ls"})
    assert '"restart": {"type": "boolean"}' in script.prompts[-1]
    assert "computer" not in script.prompts[-1]
    post(chatml, "List.", tools=[{**BASH, "description": "Mine."}])
    assert '"description": "Mine."' in script.prompts[-1]


def test_the_schema_of_memory_is_that_of_the_client() -> None:
    """The package has a type for each command of the tool."""
    about = described("memory_20250818")
    assert about is not None
    commands = get_args(get_args(beta.BetaMemoryTool20250818Command)[0])
    fields = {name for one in commands for name in one.model_fields}
    names = {get_args(one.model_fields["command"].annotation)[0] for one in commands}
    assert set(about[1]["properties"]) == fields
    assert set(about[1]["properties"]["command"]["enum"]) == names


@pytest.mark.parametrize(
    ("kind", "undoes", "inserted"),
    [("text_editor_20250124", True, False), ("text_editor_20250728", False, True)],
)
def test_versions_of_the_text_editor(kind: str, undoes: bool, inserted: bool) -> None:
    about = described(kind)
    assert about is not None
    properties = about[1]["properties"]
    assert ("undo_edit" in properties["command"]["enum"]) == undoes
    assert ("insert_text" in properties) == inserted
    assert about[1]["required"] == ["command", "path"]


@pytest.mark.parametrize("kind", [None, "custom", "bash", "web_search_20260318", "xbash_20250124"])
def test_other_types_have_no_schema(kind: str | None) -> None:
    assert described(kind) is None


@pytest.mark.parametrize(
    ("block", "seen"),
    [
        (document({"type": "content", "content": "six"}), "six"),
        (document({"type": "content", "content": [PLAIN, PLAIN]}), "six\n\nsix"),
        (document({"type": "text", "data": "six"}, title="T", context="C"), "T\n\nC\n\nsix"),
    ],
)
def test_a_document_of_text_is_read(
    block: dict[str, Any], seen: str, chatml: str, script: Script
) -> None:
    """It stands in a turn, or in a tool's result."""
    script.say("ok")
    assert post(chatml, [block]).status_code == 200
    assert script.prompts[-1].endswith(f"<|user|>{seen}<|assistant|>")
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    assert post(chatml, [PLAIN, result]).status_code == 200
    assert script.prompts[-1].endswith(f"tool t{seen}<|assistant|>")


def test_a_document_of_pictures_is_refused_and_left_out_of_results(
    chatml: str, script: Script
) -> None:
    script.say("ok")
    for source in ({"type": "content", "content": [PLAIN, PICTURE]}, {"type": "file"}, None):
        told = post(chatml, [document(source)])
        assert told.status_code == 400
        assert "documents of text only" in told.json()["error"]["message"]
        result = {"type": "tool_result", "tool_use_id": "t", "content": [document(source)]}
        post(chatml, [PLAIN, result])
        assert "tool t[document: left out" in script.prompts[-1]


def test_a_count_is_the_number_of_input_tokens(chatml: str, script: Script) -> None:
    """It has the system text, the tools, the calls and their results."""
    script.say("ok")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    call = {"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [PLAIN]}
    turns: list[Any] = [
        {"role": "user", "content": "1+2"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    about: dict[str, Any] = {
        "model": "demo", "messages": turns, "system": [{"type": "text", "text": "Be brief."}],
        "tools": [{"name": "add", "description": "adds", "input_schema": schema}],
    }  # fmt: skip
    with anthropic.Anthropic(base_url=chatml, api_key="any", max_retries=0) as client:
        count = client.messages.count_tokens(**about).input_tokens
        usage = client.messages.create(max_tokens=9, **about).usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count
        for part in ("system", "tools"):
            less = {name: value for name, value in about.items() if name != part}
            assert client.messages.count_tokens(**less).input_tokens < count
        short = client.messages.count_tokens(**{**about, "messages": turns[:1]})
        assert short.input_tokens < count


def test_turns_without_a_block_are_refused(chatml: str) -> None:
    for more in ({}, {"system": "Be brief."}):
        told = post(chatml, [], **more)
        assert told.status_code == 400
        assert told.json()["error"]["message"] == "messages: the turns are empty"
