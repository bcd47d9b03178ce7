"""The output items of a response, the events that tell them, and the response's document."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moeinf.runtime.generation.events import Ended, in_blocks
from moeinf.server.api.chat_turn import Part, ToolCall
from moeinf.server.api.openai_format import lossy_of
from moeinf.server.api.responses.request import ResponsesRequest
from moeinf.server.http.json_text import dump

Event = dict[str, Any]


def new_id(kind: str) -> str:
    """Return a new id: resp, msg, rs (reasoning), fc (a call) or fco (its output)."""
    return f"{kind}_{secrets.token_hex(24)}"


class Output:
    """The items of an answer so far; each part of it gives the events that tell it."""

    def __init__(self, namespaces: Mapping[str, tuple[str, str]]) -> None:
        self._namespaces = namespaces
        self.items: list[dict[str, Any]] = []
        self.reasoning_tokens = 0
        self._pieces: list[str] = []  # of the open item's text
        self._words: list[Any] = []  # log-probabilities of its tokens
        self._kind = ""  # answer or thinking: of the open item; "": no item is open

    def add(self, part: Part, words: Sequence[Any] = (), tokens: int = 0) -> Iterator[Event]:
        """Yield the events of the next part.

        words: log-probabilities of the tokens that end it; tokens: of the answer so far.
        """
        if isinstance(part, ToolCall):
            yield from self.close()
            yield from self._call(part)
            return
        kind, text = part
        if kind == "thinking":
            self.reasoning_tokens = max(self.reasoning_tokens, tokens)
        if self._kind != kind:
            yield from self.close()
            yield from self._open(kind)
        self._pieces.append(text)
        if kind == "thinking":
            yield self._told("response.reasoning_text.delta", delta=text)
        else:
            self._words += words
            found = [_delta_words(word) for word in words]
            yield self._told("response.output_text.delta", delta=text, logprobs=found)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """Yield the events that end the open item, if there is one."""
        if not self._kind:
            return
        text, item = "".join(self._pieces), self.items[-1]
        part = self._part(text)
        if self._kind == "thinking":
            yield self._told("response.reasoning_text.done", text=text)
        else:
            found = [_delta_words(word) for word in self._words]
            yield self._told("response.output_text.done", text=text, logprobs=found)
        yield self._told("response.content_part.done", part=part)
        item["content"], item["status"] = [part], status
        self._kind, self._pieces, self._words = "", [], []
        yield self._of_item("response.output_item.done")

    def _open(self, kind: str) -> Iterator[Event]:
        self._kind = kind
        if kind == "thinking":
            item = {"type": "reasoning", "id": new_id("rs"), "summary": []}
        else:
            item = {"type": "message", "id": new_id("msg"), "role": "assistant"}
        self.items.append({**item, "content": [], "status": "in_progress"})
        yield self._of_item("response.output_item.added")
        yield self._told("response.content_part.added", part=self._part(""))

    def _call(self, called: ToolCall) -> Iterator[Event]:
        arguments, name = called.call.text(), called.call.name
        item = {"type": "function_call", "id": new_id("fc"), "call_id": called.id, "name": name}
        if name in self._namespaces:
            item["namespace"], item["name"] = self._namespaces[name]
        self.items.append({**item, "arguments": "", "status": "in_progress"})
        about = {"item_id": item["id"], "output_index": len(self.items) - 1}
        yield self._of_item("response.output_item.added")
        yield {"type": "response.function_call_arguments.delta", **about, "delta": arguments}
        done = {**about, "name": item["name"], "arguments": arguments}
        yield {"type": "response.function_call_arguments.done", **done}
        self.items[-1] |= {"arguments": arguments, "status": "completed"}
        yield self._of_item("response.output_item.done")

    def _part(self, text: str) -> dict[str, Any]:
        if self._kind == "thinking":
            return {"type": "reasoning_text", "text": text}
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": list(self._words),
        }

    def _told(self, name: str, **about: Any) -> Event:
        """Return an event of the open item's only part."""
        item = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": name, **item, "content_index": 0, **about}

    def _of_item(self, name: str) -> Event:
        return {"type": name, "output_index": len(self.items) - 1, "item": {**self.items[-1]}}


def _delta_words(word: dict[str, Any]) -> dict[str, Any]:
    """Return a token's log-probability in the form of events, which has no bytes."""
    best = [{"token": one["token"], "logprob": one["logprob"]} for one in word["top_logprobs"]]
    return {"token": word["token"], "logprob": word["logprob"], "top_logprobs": best}


class Document:
    """The document of one response: what was asked, and what has been answered so far."""

    def __init__(self, asked: ResponsesRequest) -> None:
        said = asked.model_dump(exclude_unset=True, by_alias=True)
        choice = said.get("tool_choice", "auto")
        self.id = new_id("resp")
        self._about = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": asked.model,
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": None, "summary": None, **said.get("reasoning", {})},
            "store": asked.store,
            "temperature": asked.temperature,
            "text": {"format": {"type": "text"}, **said.get("text", {})},
            "tool_choice": choice,
            "tools": said.get("tools", []),
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": asked.top_p,
            "truncation": asked.truncation,
        }

    def begun(self) -> dict[str, Any]:
        return {**self._about, "status": "in_progress", "output": [], "usage": None}

    def ended(self, output: Output, ended: Ended, about: dict[str, int]) -> dict[str, Any]:
        """Return the whole; about: our fields."""
        cut = ended.reason != "stop"
        return {
            **self._about,
            "status": "incomplete" if cut else "completed",
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output.items,
            "usage": usage_of(ended, output.reasoning_tokens),
            **about,
        }

    def failed(self, output: Output, error: dict[str, Any]) -> dict[str, Any]:
        """Return the response that an error has cut off; error: as OpenAI's API words it."""
        told = {"code": error["code"], "message": error["message"]}
        status = {"status": "failed", "error": told}
        return {**self._about, **status, "output": output.items, "usage": None}


def usage_of(ended: Ended, reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": ended.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": in_blocks(ended.cached_tokens),
            "cache_write_tokens": 0,
        },
        "output_tokens": ended.tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": ended.prompt_tokens + ended.tokens,
        **lossy_of(ended),
    }


class EventLines:
    """Write events as SSE, with their numbers."""

    def __init__(self) -> None:
        self._number = 0

    def text(self, event: Event) -> str:
        numbered = {**event, "sequence_number": self._number}
        self._number += 1
        return f"event: {event['type']}\ndata: {dump(numbered)}\n\n"
