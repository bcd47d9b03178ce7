"""Requests in the shapes that Claude Code 2.1 and Codex 0.171 send, with short texts."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.server.scripted import Script

CACHED = {"cache_control": {"type": "ephemeral"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}


def streamed(address: str, path: str, body: dict[str, Any], **headers: str) -> list[Any]:
    """Return the events of an answer."""
    answer = httpx.post(address + path, json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    lines = answer.text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def test_claude_code(chatml: str, script: Script) -> None:
    assert httpx.head(chatml).status_code == 200  # it looks before it asks
    script.say('<tool_call>\n{"name": "Read", "arguments": {"a": 1}}\n</tool_call>')
    user = [{"type": "text", "text": "Note."}, {"type": "text", "text": "1+2", **CACHED}]
    body = {
        "model": "demo",
        "messages": [
            {"role": "user", "content": user},
            {"role": "system", "content": "Agents: none."},
        ],
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cc_entry=x;"},
            {"type": "text", "text": "Be brief.", **CACHED},
        ],
        "tools": [{"name": "Read", "description": "Reads.", "input_schema": SCHEMA}],
        "metadata": {"user_id": "{}"},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }
    version = {"anthropic-version": "2023-06-01", "anthropic-beta": "effort-2025-11-24"}
    events = streamed(chatml, "/v1/messages?beta=true", body, **version)
    names = [event["type"] for event in events if event["type"] != "ping"]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert names == ["message_start", *block, "message_delta", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert "x-anthropic" not in script.prompts[-1]
    assert script.prompts[-1].endswith("Note.\n\n1+2<|system|>Agents: none.<|assistant|>")


def test_a_picture_that_claude_code_reads(chatml: str, script: Script) -> None:
    """Later requests repeat the tool's result, so a refusal would end the conversation."""
    script.say("I cannot see it.")
    source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    call = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", **CACHED}
    for kind in ("image", "document"):
        body = {
            "model": "demo",
            "messages": [
                {"role": "user", "content": "Look."},
                {"role": "assistant", "content": [call]},
                {
                    "role": "user",
                    "content": [{**result, "content": [{"type": kind, "source": source}]}],
                },
            ],
            "tools": [{"name": "Read", "description": "Reads.", "input_schema": SCHEMA}],
            "max_tokens": 99,
            "stream": True,
        }
        assert streamed(chatml, "/v1/messages?beta=true", body)[-1]["type"] == "message_stop"
        seen = f"[{kind}: left out, this model reads text only]"
        assert script.prompts[-1].endswith(f"{seen}<|assistant|>")


def test_codex(chatml: str, script: Script) -> None:
    """MCP servers and agents are namespaces of functions."""
    script.say('<tool_call>\n{"name": "agents__open", "arguments": {"a": 1}}\n</tool_call>')
    inner = {"type": "function", "name": "open", "description": "Opens.", "parameters": SCHEMA}

    def said(role: str, text: str) -> dict[str, Any]:
        part = {"type": "input_text", "text": text}
        return {"type": "message", "id": "msg_1", "role": role, "content": [part]}

    body: dict[str, Any] = {
        "model": "demo",
        "input": [said("developer", "Be brief."), said("developer", "Skills."), said("user", "1")],
        "tools": [
            {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [inner]},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "1",
        "client_metadata": {"session_id": "1"},
        "stream": True,
    }
    last = streamed(chatml, "/v1/responses", body)[-1]
    assert last["type"] == "response.completed"
    (call,) = last["response"]["output"]
    assert (call["namespace"], call["name"], call["arguments"]) == ("agents", "open", '{"a": 1}')
    picture = {"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "high"}
    script.say("It is 2.")
    for output, seen in (("2", "2"), ([picture], "[image: left out, this model reads text only]")):
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": output}
        again = {**body, "input": [*body["input"], call, result]}
        (message,) = streamed(chatml, "/v1/responses", again)[-1]["response"]["output"]
        assert message["content"][0]["text"] == "It is 2."
        assert "agents__open a:1" in script.prompts[-1]
        assert script.prompts[-1].endswith(f"{seen}<|assistant|>")
    body["tools"][0]["name"] = ""
    refused = httpx.post(f"{chatml}/v1/responses", json=body)
    assert refused.json()["error"]["param"] == "tools"
