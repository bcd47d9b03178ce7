"""Read requests of Anthropic's Messages API, and turn their blocks into a template's messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

from fastapi import Request
from pydantic import ConfigDict, Field

from moeinf.runtime.requests import Limits
from moeinf.runtime.sampling.grammar import Constrain, call_of_one, json_of
from moeinf.server.api.answers import BadRequest
from moeinf.server.api.chat_turn import Chat
from moeinf.server.api.fields.bounds import Few, Listed, StopText
from moeinf.server.api.fields.optional import RequestObject
from moeinf.server.api.fields.sampling import Sampled
from moeinf.server.api.messages.client_tools import described
from moeinf.server.api.prompts import joined, joined_turns, unread
from moeinf.server.api.tool_choice import chosen_tools, effort_of, own_tools
from moeinf.server.http.request_log import notes_of


class _Block(RequestObject):
    model_config = ConfigDict(extra="allow")
    type: str = Field(max_length=64)
    text: str | None = None
    title: str | None = None
    context: str | None = None
    source: str | dict[str, Any] | None = None
    tool_name: str | None = None


class TextBlock(_Block):
    """A block of a system prompt or of a tool's result.

    Types: text, document (of text or blocks of text), search_result, tool_reference.
    """

    content: str | Listed[dict[str, Any]] | None = None


class ContentBlock(_Block):
    """A block of a turn: also thinking, redacted_thinking, tool_use and tool_result."""

    content: str | Listed[TextBlock] | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    is_error: bool | None = None


class InputMessage(RequestObject):
    """A turn. Turns of one role that follow each other are one."""

    model_config = ConfigDict(extra="allow")
    role: Literal["user", "assistant", "system"]
    content: str | Listed[ContentBlock]


class MessagesTool(RequestObject):
    """A tool of the client.

    bash_…, text_editor_… and memory_… need no schema. Others that Anthropic's servers would run are
    skipped.
    """

    model_config = ConfigDict(extra="allow")
    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None

    def whole(self) -> MessagesTool:
        """Return the tool with its schema, also if its type stands for one."""
        about = described(self.type)
        if about is None:
            return self
        words, schema = about
        said = {"type": None, "description": self.description or words, "input_schema": schema}
        return self.model_copy(update=said)


class MessagesToolChoice(RequestObject):
    """How tools are called: any is at least one, tool is the one of that name."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(RequestObject):
    """The switch for thinking. budget_tokens has no effect; omitted: its blocks are empty."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"] = "enabled"
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(RequestObject):
    type: Literal["json_schema"] = "json_schema"
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")


class OutputConfig(RequestObject):
    model_config = ConfigDict(extra="allow")
    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(Sampled):
    """A prompt whose tokens are counted. Its last turn may be the assistant's."""

    is_answered: ClassVar[bool] = False
    model: str
    messages: Listed[InputMessage] = Field(min_length=1)
    system: str | Listed[TextBlock] | None = None
    tools: Listed[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None

    def turn(self, request: Request) -> tuple[Chat, Constrain | None]:
        """Return the turn and what constrains its answer. Raises BadRequest, BadFormat."""
        self.check_others(request)
        chosen = self.tool_choice or MessagesToolChoice()
        choice = {"any": "required", "tool": None}.get(chosen.type, chosen.type)
        name = chosen.name or "" if chosen.type == "tool" else None
        offered = _offered(own_tools([one.whole() for one in self.tools or ()], "custom", request))
        tools, must_call = chosen_tools(offered, choice, name)
        chat = Chat(
            self._messages(),
            tools,
            self._think(request),
            parallel_calls=not chosen.disable_parallel_tool_use,
            shift=request.app.state.context_shift,
        )
        form = (self.output_config and self.output_config.format) or self.output_format
        schema = None if form is None else form.schema_
        return chat, call_of_one(tools) if must_call else json_of(schema, tools)

    def _think(self, request: Request) -> bool | str | None:
        """Return the templates' value for thinking; None where the request does not say."""
        said = self.thinking
        if said is not None and said.budget_tokens is not None:
            notes_of(request).ignore(["thinking.budget_tokens"])
        if said is not None and said.type == "disabled":
            return False
        effort = None if self.output_config is None else self.output_config.effort
        chosen = effort_of(effort, "output_config.effort")
        asked = said is not None and said.type == "enabled"
        return True if chosen is None and asked else chosen

    def _messages(self) -> list[dict[str, Any]]:
        """Return messages in the templates' form. Raises BadRequest."""
        found = joined_turns(self._turns())
        if all(one["role"] == "system" for one in found):
            raise BadRequest("messages: the turns are empty", "messages")
        if self.is_answered and found[-1]["role"] == "assistant":
            raise BadRequest("messages: an assistant's last turn is not continued here", "messages")
        return found

    def _turns(self) -> Iterator[dict[str, Any]]:
        """Yield messages in the templates' form, before neighbours of one role are joined."""
        if self.system:
            parts = self.system
            text = parts if isinstance(parts, str) else joined(map(_text, parts))
            yield {"role": "system", "content": text}
        names: dict[str, str] = {}  # of the tools that were called, by the ids of the calls
        for turn in self.messages:
            said = turn.content
            blocks = [ContentBlock(type="text", text=said)] if isinstance(said, str) else said
            if turn.role == "assistant":
                yield _called(blocks, names)
            else:
                yield from _told(turn.role, blocks, names)


class MessagesRequest(CountRequest):
    """A prompt that is answered. max_tokens -1: until the context ends."""

    is_answered: ClassVar[bool] = True
    max_tokens: int = Field(ge=-1)
    stream: bool = False
    stop_sequences: Few[StopText] | None = None
    keep_prefix: bool = True  # for later requests

    def limits(self) -> Limits:
        return Limits(self.max_tokens, tuple(self.stop_sequences or ()))

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"


def _offered(tools: Sequence[MessagesTool]) -> list[dict[str, Any]]:
    """Return tools in the templates' form."""
    found = []
    for tool in tools:
        function: dict[str, Any] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        function["parameters"] = tool.input_schema or {"type": "object", "properties": {}}
        found.append({"type": "function", "function": function})
    return found


def _called(blocks: Sequence[ContentBlock], names: dict[str, str]) -> dict[str, Any]:
    """Return a turn of the assistant; names: of its calls' tools, by their ids."""
    texts, thoughts, calls = [], [], []
    for block in blocks:
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            if block.id is None or block.name is None:
                raise BadRequest("messages: a tool_use has no id or no name")
            names[block.id] = block.name
            function = {"name": block.name, "arguments": block.input or {}}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type != "redacted_thinking":
            texts.append(_text(block))
    turn: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        turn["reasoning_content"] = "".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return turn


def _told(
    role: str, blocks: Sequence[ContentBlock], names: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield a turn of the user: a message per result of a tool, and one for the text between."""
    for block in blocks:
        if block.type != "tool_result":
            yield {"role": role, "content": _text(block)}
            continue
        if block.tool_use_id is None:
            raise BadRequest("messages: a tool_result has no tool_use_id")
        said = block.content or ""
        text = said if isinstance(said, str) else joined(map(_result, said))
        about = {"role": "tool", "tool_call_id": block.tool_use_id}
        if name := names.get(block.tool_use_id):
            about["name"] = name
        yield {**about, "content": text or ("error" if block.is_error else "")}


def _result(block: TextBlock) -> str:
    """Return the text of a block in a tool's result. Raises BadRequest for an unknown block."""
    is_other = block.type == "image" or (block.type == "document" and _document(block) is None)
    return unread(block.type) if is_other else _text(block)


def _text(block: TextBlock | ContentBlock) -> str:
    """Return the text of a block. Raises BadRequest for one that is not text."""
    source = block.source
    if block.type == "text":
        return block.text or ""
    if block.type == "search_result":
        return joined([block.title or "", source if isinstance(source, str) else "", _inner(block)])
    if block.type == "tool_reference":
        return block.tool_name or ""
    if block.type == "document":
        text = _document(block)
        if text is None:
            raise BadRequest("messages: models here read documents of text only", "messages")
        return joined([block.title or "", block.context or "", text])
    raise BadRequest(f"messages: models here read text only, not {block.type}", "messages")


def _document(block: TextBlock | ContentBlock) -> str | None:
    """Return the text of a document, which may come as blocks; None: it is not of text."""
    source = block.source if isinstance(block.source, dict) else {}
    kind, said = source.get("type"), source.get("content")
    if kind == "text":
        return str(source.get("data") or "")
    if kind == "content" and isinstance(said, str):
        return said
    if kind != "content" or not isinstance(said, list):
        return None
    parts = [part for part in said if isinstance(part, dict) and part.get("type") == "text"]
    return (
        joined(str(part.get("text") or "") for part in parts) if len(parts) == len(said) else None
    )


def _inner(block: TextBlock | ContentBlock) -> str:
    """Return the text inside a search result."""
    if isinstance(block.content, str):
        return block.content
    parts = [one if isinstance(one, dict) else one.model_dump() for one in block.content or ()]
    return joined(str(part.get("text") or "") for part in parts)
