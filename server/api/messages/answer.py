"""Anthropic's forms of answers: content blocks, the events of a stream, stop reasons, errors."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from moeinf.errors import ContextExceeded, MoeinfError
from moeinf.runtime.generation.events import Ended, in_blocks
from moeinf.server.api.answers import words_of
from moeinf.server.api.chat_turn import Part, ToolCall
from moeinf.server.api.openai_format import lossy_of
from moeinf.server.http.json_text import dump

SIGNATURE = "unsigned"  # of thinking: clients send it back, and nothing here reads it
_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "timeout_error", 409: "conflict_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


class Content:
    """The content blocks of an answer; each part of it gives the events that tell it."""

    def __init__(self, shows_thinking: bool) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._shows_thinking = shows_thinking
        self._pieces: list[str] = []  # of the open block
        self._field = ""  # of the open block that holds them; "": no block is open

    @property
    def called(self) -> bool:
        return any(block["type"] == "tool_use" for block in self.blocks)

    def add(self, part: Part) -> Iterator[dict[str, Any]]:
        """Yield the events of the next part."""
        if isinstance(part, ToolCall):
            yield from self.close()
            call, name = part.call, part.id
            if name.startswith("call_"):
                name = f"toolu_{name.removeprefix('call_')}"
            block = {"type": "tool_use", "id": name, "name": call.name, "input": {}}
            yield self._begin(block)
            yield self._delta({"type": "input_json_delta", "partial_json": call.text()})
            self.blocks[-1] = {**block, "input": call.arguments}
            yield {"type": "content_block_stop", "index": len(self.blocks) - 1}
            return
        kind, text = part
        field = "thinking" if kind == "thinking" else "text"
        if self._field != field:
            yield from self.close()
            signed = {"signature": ""} if field == "thinking" else {}
            yield self._begin({"type": field, field: "", **signed})
            self._field = field
        if field == "text" or self._shows_thinking:
            self._pieces.append(text)
            yield self._delta({"type": f"{field}_delta", field: text})

    def close(self) -> Iterator[dict[str, Any]]:
        """Yield the events that end the open block, if there is one."""
        if not self._field:
            return
        self.blocks[-1][self._field] = "".join(self._pieces)
        if self._field == "thinking":
            self.blocks[-1]["signature"] = SIGNATURE
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        self._field, self._pieces = "", []
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _begin(self, block: dict[str, Any]) -> dict[str, Any]:
        self.blocks.append(dict(block))
        index = len(self.blocks) - 1
        return {"type": "content_block_start", "index": index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def message_of(
    model: str, blocks: list[dict[str, Any]], stop: dict[str, Any], usage: dict[str, Any]
) -> dict[str, Any]:
    """Return a message; stop: what stop_of returns, or nulls in the first event of a stream."""
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": blocks,
        **stop,
        "usage": usage,
    }


def stop_of(ended: Ended, called: bool, most: int | None) -> dict[str, Any]:
    """Return why an answer of at most `most` tokens has ended; -1: until the context ends."""
    if ended.reason != "stop":
        cut = most is not None and 0 <= most <= ended.tokens
        reason = "max_tokens" if cut else "model_context_window_exceeded"
    elif called:
        reason = "tool_use"
    else:
        reason = "stop_sequence" if ended.stop_text else "end_turn"
    text = ended.stop_text if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": text}


def usage_of(prompt_tokens: int, cached_tokens: int, tokens: int) -> dict[str, int]:
    """Return a usage; its input_tokens are those that were not in the prefix cache."""
    cached_tokens = in_blocks(cached_tokens)
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": tokens,
    }


def usage_of_ended(ended: Ended) -> dict[str, Any]:
    return {**usage_of(ended.prompt_tokens, ended.cached_tokens, ended.tokens), **lossy_of(ended)}


def event_text(event: dict[str, Any]) -> str:
    """Return an event as SSE."""
    return f"event: {event['type']}\ndata: {dump(event)}\n\n"


def owns(path: str) -> bool:
    """Return whether a path belongs to this API."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


class RequestIds:
    """Wrap an ASGI app, and give each answer of this API the header that its clients show."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not owns(scope["path"]):
            await self._app(scope, receive, send)
            return
        name = f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = name

        async def send_named(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers") or ())
                if all(key.lower() != b"request-id" for key, _ in headers):
                    headers.append((b"request-id", name.encode()))
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_named)


def request_id_of(scope: Mapping[str, Any]) -> str | None:
    """Return the id that RequestIds has given; None: it did not see the request."""
    found: str | None = (scope.get("state") or {}).get("request_id")
    return found


def error_document(error: MoeinfError, request_id: str | None) -> dict[str, Any]:
    """Return Anthropic's form of an error; error_code is ours.

    Clients shorten a conversation when they read "prompt is too long".
    """
    status, words = error.http_status, words_of(error)
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    if isinstance(error, ContextExceeded):
        words = f"prompt is too long: {words}"
    told = {"type": kind, "message": words, "details": {"error_code": error.code}}
    return {"type": "error", "error": told, "request_id": request_id}
