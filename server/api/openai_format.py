"""OpenAI's forms of messages, usage and calls of tools."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moeinf.runtime.generation.events import Ended, in_blocks
from moeinf.server.api.answers import BadRequest
from moeinf.server.api.chat_turn import Part, Reply, ToolCall
from moeinf.server.api.fields.bounds import Listed
from moeinf.server.api.prompts import MessageExtras


class Message(MessageExtras):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Listed[dict[str, Any]] | None = None


def plain(message: Message) -> dict[str, Any]:
    """Return a message for a template: text parts joined, the newer role under its older name."""
    about = message.dump()
    content = message.content
    if isinstance(content, list):
        kinds = {str(part.get("type")) for part in content} - {"text"}
        if kinds:
            raise BadRequest(f"models here read text only, not {', '.join(sorted(kinds))}")
        content = "".join(str(part.get("text", "")) for part in content)
    role = "system" if message.role == "developer" else message.role
    return {**about, "role": role, "content": content or ""}


class _Named(BaseModel):
    name: str


class _Function(_Named):
    model_config = ConfigDict(extra="allow")
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChatTool(BaseModel):
    """A tool that may be called."""

    type: Literal["function"] = "function"
    function: _Function


class ToolChoice(BaseModel):
    """The tool that must be called."""

    type: Literal["function"] = "function"
    function: _Named


def offered_by(tools: list[ChatTool]) -> list[dict[str, Any]]:
    """Return tools in the templates' form, which is OpenAI's."""
    return [{"type": "function", **tool.model_dump(exclude_unset=True)} for tool in tools]


def message_of(reply: Reply) -> dict[str, Any]:
    """Return a whole answer."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.answer, "refusal": None}
    if reply.thinking:
        message["reasoning_content"] = reply.thinking
    if reply.calls:
        message["content"] = reply.answer or None
        message["tool_calls"] = [_called(called) for called in reply.calls]
    return message


def deltas_of(part: Part) -> list[dict[str, Any]]:
    """Return a part of a streamed answer: a call is its name, then its arguments."""
    if not isinstance(part, ToolCall):
        kind, text = part
        return [{"content" if kind == "answer" else "reasoning_content": text}]
    whole = _called(part)
    named = {**whole, "function": {**whole["function"], "arguments": ""}}
    arguments = {"function": {"arguments": part.call.text()}}
    return [{"tool_calls": [{"index": part.index, **one}]} for one in (named, arguments)]


def reason_of(ended: Ended, called: bool) -> str:
    """Return the reason of an answer's end; called: whether it has called tools."""
    if ended.reason != "stop":
        return "length"
    return "tool_calls" if called else "stop"


def _called(called: ToolCall) -> dict[str, Any]:
    function = {"name": called.call.name, "arguments": called.call.text()}
    return {"id": called.id, "type": "function", "function": function}


def usage_of(ended: Ended) -> dict[str, Any]:
    return {
        "prompt_tokens": ended.prompt_tokens,
        "completion_tokens": ended.tokens,
        "total_tokens": ended.prompt_tokens + ended.tokens,
        "prompt_tokens_details": {"cached_tokens": in_blocks(ended.cached_tokens)},
        **lossy_of(ended),
    }


def lossy_of(ended: Ended) -> dict[str, Any]:
    """Return the field of both APIs that names the lossy options; empty for exact answers."""
    return {"lossy": dict(ended.lossy)} if ended.lossy else {}
