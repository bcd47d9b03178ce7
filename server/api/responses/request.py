"""Read requests of OpenAI's Responses API, and turn their items into a template's messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, Literal

from fastapi import Request
from pydantic import ConfigDict, Field

from moeinf.runtime.requests import Limits
from moeinf.runtime.sampling.grammar import Constrain, call_of_one, json_of
from moeinf.server.api.answers import BadRequest
from moeinf.server.api.chat_turn import Chat
from moeinf.server.api.fields.bounds import Few, Listed
from moeinf.server.api.fields.optional import RequestObject
from moeinf.server.api.fields.other import REFUSED
from moeinf.server.api.fields.sampling import Sampled
from moeinf.server.api.prompts import joined_turns, unread
from moeinf.server.api.tool_choice import chosen_tools, effort_of, own_tools

_LOGPROBS = "message.output_text.logprobs"
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class ItemPart(RequestObject):
    """A part of an item: input_text, output_text, refusal, reasoning_text or summary_text."""

    model_config = ConfigDict(extra="allow")
    type: str = Field(max_length=64)
    text: str | None = None
    refusal: str | None = None


class InputItem(RequestObject):
    """An item of a conversation: message, function_call, function_call_output or reasoning.

    item_reference stands for the item of a stored response that has its id.
    """

    model_config = ConfigDict(extra="allow")
    type: str = Field("message", max_length=64)
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Listed[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | Listed[ItemPart] | None = None
    summary: Listed[ItemPart] | None = None

    def refers(self) -> bool:
        """Return whether it stands for a stored item. A reference may have an id alone."""
        return self.type == "item_reference" or self.model_fields_set == {"id"}


class NamedFunction(RequestObject):
    """A function of the client, in a namespace."""

    model_config = ConfigDict(extra="allow")
    type: str | None = None
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(NamedFunction):
    """A function of the client, or a namespace of functions.

    Tools that OpenAI's servers would run are skipped.
    """

    tools: Listed[NamedFunction] | None = None


class ResponsesToolChoice(RequestObject):
    """The function that must be called, or with allowed_tools the ones that may be."""

    type: Literal["function", "allowed_tools"] = "function"
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Listed[dict[str, Any]] | None = None


class Reasoning(RequestObject):
    """How much the model thinks. Its thoughts come whole, never as a summary."""

    model_config = ConfigDict(extra="allow")
    effort: str | None = None


class TextFormat(RequestObject):
    model_config = ConfigDict(extra="allow")
    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class TextConfig(RequestObject):
    model_config = ConfigDict(extra="allow")
    format: TextFormat | None = None


class InputRequest(Sampled):
    """A conversation whose tokens are counted.

    previous_response_id: a stored response; its items come before `input`. truncation `auto` drops
    the oldest turns that do not fit the context.
    """

    refused: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        **REFUSED,
        "background": ((False,), "an answer comes with its request"),
        "conversation": ((), "use previous_response_id"),
        "prompt": ((), "the server stores no prompts"),
    }

    model: str
    input: str | Listed[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Listed[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool = True
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    chat_template_kwargs: dict[str, Any] | None = None

    def items(self) -> list[InputItem]:
        """Return the items of `input`; a text is a message of the user."""
        if isinstance(self.input, str):
            part = ItemPart(type="input_text", text=self.input)
            return [InputItem(type="message", role="user", content=[part])]
        return self.input or []

    def turn(
        self, request: Request, items: Sequence[InputItem], is_part: bool = False
    ) -> tuple[Chat, Constrain | None]:
        """Return the turn and what constrains its answer.

        is_part: `items` are not the whole conversation. Raises BadRequest, BadFormat.
        """
        self.check_others(request)
        functions = own_tools(list(_functions(self.tools or ())), "function", request)
        offered = [_offered(tool) for tool in functions]
        tools, must_call = self._chosen(offered)
        said = [{"role": "system", "content": self.instructions}] if self.instructions else []
        messages = joined_turns(chain(said, map(_turn, items)))
        if not is_part and all(message["role"] == "system" for message in messages):
            raise BadRequest("input: the request has no turns", "input")
        effort = None if self.reasoning is None else self.reasoning.effort
        chat = Chat(
            messages,
            tools,
            effort_of(effort, "reasoning.effort"),
            parallel_calls=self.parallel_tool_calls,
            variables=self.chat_template_kwargs or {},
            shift=self.truncation == "auto" or request.app.state.context_shift,
        )
        return chat, call_of_one(tools) if must_call else json_of(self._schema(), tools)

    def namespaces(self) -> dict[str, tuple[str, str]]:
        """Return the namespace and the name of each function in one, by its name for a model."""
        return {
            _joined(tool.name, inner.name): (tool.name, inner.name)
            for tool in self.tools or ()
            if tool.type == "namespace" and tool.name
            for inner in tool.tools or ()
            if inner.name
        }

    def _chosen(self, offered: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
        picked = self.tool_choice
        if not isinstance(picked, ResponsesToolChoice):
            return chosen_tools(offered, picked)
        if picked.type == "function":
            return chosen_tools(offered, None, picked.name or "")
        names = [tool.get("name") for tool in picked.tools or ()]
        allowed = [tool for tool in offered if tool["function"]["name"] in names]
        return chosen_tools(allowed, picked.mode)

    def _schema(self) -> str | dict[str, Any] | None:
        form = None if self.text is None else self.text.format
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return "json"
        if form.schema_ is None:
            raise BadRequest("text.format: schema is missing", "text")
        return form.schema_


class ResponsesRequest(InputRequest):
    """A conversation that is answered.

    max_output_tokens -1: until the context ends. store: keep the response for later requests, as
    long as there is room.
    """

    stream: bool = False
    store: bool = True
    keep_prefix: bool = True  # for later requests
    max_output_tokens: int | None = Field(None, ge=-1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: Few[str] | None = None
    metadata: dict[str, Any] | None = None

    def limits(self) -> Limits:
        return Limits(self.max_output_tokens)

    def logprobs(self) -> int | None:
        """Return how many log-probabilities are listed per token; None: no figures."""
        asked = _LOGPROBS in (self.include or ())
        return self.top_logprobs if self.top_logprobs else 0 if asked else None


def _functions(tools: Sequence[FunctionTool]) -> Iterator[NamedFunction]:
    """Yield tools, and the functions of namespaces under names for a model. Raises BadRequest."""
    for tool in tools:
        if tool.type != "namespace":
            yield tool
            continue
        if not tool.name:
            raise BadRequest("tools: a namespace has no name", "tools")
        for inner in tool.tools or ():
            name = _joined(tool.name, inner.name) if inner.name else None
            yield inner.model_copy(update={"name": name})


def _joined(namespace: str, name: str) -> str:
    """Return a model's name for a function in a namespace."""
    return f"{namespace}__{name}"


def _offered(tool: NamedFunction) -> dict[str, Any]:
    """Return a tool in the templates' form."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _turn(item: InputItem) -> dict[str, Any]:
    """Return the message of an item for a template. Raises BadRequest."""
    if item.type == "message":
        if item.role is None:
            raise BadRequest("input: a message has no role", "input")
        role = "system" if item.role == "developer" else item.role
        return {"role": role, "content": _text(item.content, "\n\n" if role != "assistant" else "")}
    if item.type == "function_call":
        if item.call_id is None or item.name is None:
            raise BadRequest("input: a function_call has no call_id or no name", "input")
        name = _joined(item.namespace, item.name) if item.namespace else item.name
        function = {"name": name, "arguments": item.arguments or "{}"}
        call = {"id": item.call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if item.type == "function_call_output":
        if item.call_id is None:
            raise BadRequest("input: a function_call_output has no call_id", "input")
        about = {"name": item.name} if item.name else {}
        text = _text(item.output, "\n\n", ("input_image", "input_file"))
        return {"role": "tool", "tool_call_id": item.call_id, **about, "content": text}
    if item.type == "reasoning":
        thoughts = _text(item.content, "") or _text(item.summary, "\n\n")
        return {"role": "assistant", "content": "", "reasoning_content": thoughts}
    raise BadRequest(f"input: an item of type {item.type!r} is not supported", "input")


def _text(
    content: str | Sequence[ItemPart] | None, between: str, left_out: Sequence[str] = ()
) -> str:
    """Return the text of an item's parts; left_out: types that become words about them.

    Raises BadRequest for any other part that is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return between.join(text for text in _texts(content, left_out) if text)


def _texts(parts: Sequence[ItemPart], left_out: Sequence[str]) -> Iterator[str]:
    for part in parts:
        if part.type == "refusal":
            yield part.refusal or ""
        elif part.type in _TEXTS:
            yield part.text or ""
        elif part.type in left_out:
            yield unread(part.type.removeprefix("input_"))
        else:
            raise BadRequest(f"input: models here read text only, not {part.type}", "input")
