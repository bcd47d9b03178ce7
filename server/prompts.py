"""Messages as both APIs send them, rendered to token ids with the model's own template.

Does not know endpoints. Runs on the engine's thread. Never takes a template from a request.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from moeinf.runtime.asking import PromptTooLong
from moeinf.runtime.template import TemplateError
from moeinf.runtime.thinking import thinking_variables
from moeinf.server.answers import BadRequest
from moeinf.server.bounds import Listed
from moeinf.server.json_text import parse
from moeinf.server.nulls import Said

if TYPE_CHECKING:
    from moeinf.runtime.engine import Engine
    from moeinf.runtime.tokenizer import Tokenizer

_MOST_CHARACTERS = 128  # of a token, on average; longer text cannot fit and is not tokenised at all
Message = Mapping[str, Any]  # role, content, and what else the template may look at


class _FunctionSaid(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str
    arguments: dict[str, Any] | str | None = None


class CallSaid(Said):
    """A call of an earlier turn, as either API sends it back."""

    model_config = ConfigDict(extra="allow")
    id: str | None = None
    function: _FunctionSaid


class MessageExtras(Said):
    """What a message has beside role and content; templates may look at more."""

    model_config = ConfigDict(extra="allow")
    thinking: str | None = None
    reasoning_content: str | None = None
    tool_calls: Listed[CallSaid] | None = None
    tool_call_id: str | None = None
    tool_name: str | None = None
    name: str | None = None

    def dump(self) -> dict[str, Any]:
        """What was said; a None says nothing, but in the arguments of a call."""
        return self.model_dump(exclude_unset=True)


def chat_prompt(
    engine: Engine,
    messages: Sequence[Message],
    tools: Sequence[Any] = (),
    think: bool | str | None = None,
) -> list[int]:
    """Token ids that end where the assistant's answer begins.

    Raises TemplateError, BadRequest, PromptTooLong.
    """
    _check(engine, sum(len(str(message.get("content") or "")) for message in messages))
    tokenizer = engine.tokenizer
    if engine.template is None:  # a base model: it continues the text
        text = "\n\n".join(str(message.get("content") or "") for message in messages)
        return tokenizer.encode_text(text, plain=True)
    extra: dict[str, Any] = thinking_variables(think)
    if tools:
        extra["tools"] = _guarded(list(tools), tokenizer)
    extra |= {"bos_token": tokenizer.bos or "", "eos_token": tokenizer.eos or ""}
    guarded = _guarded(_complete(messages), tokenizer)
    try:
        rendered = engine.template.render(guarded, add_generation_prompt=True, **extra)
    except TemplateError:
        if not any(message.get("tool_calls") for message in guarded):
            raise
        # DeepSeek's templates join arguments as text, where all others write values as JSON.
        text = _guarded(_complete(messages, arguments_as_text=True), tokenizer)
        rendered = engine.template.render(text, add_generation_prompt=True, **extra)
    _check(engine, len(rendered))  # tools, calls and thoughts are long, too
    return tokenizer.encode_rendered(rendered)


def text_prompt(engine: Engine, text: str) -> list[int]:
    """A prompt without a template; special tokens in it count. Raises BadRequest, PromptTooLong."""
    _check(engine, len(text))
    return engine.tokenizer.encode_text(text)


def _guarded(value: Any, tokenizer: Tokenizer) -> Any:
    """Every text in what a client has sent, fenced so that it is no special token."""
    if isinstance(value, str):
        return tokenizer.guard(value)
    if isinstance(value, list):
        return [_guarded(one, tokenizer) for one in value]
    if isinstance(value, dict):
        return {tokenizer.guard(k): _guarded(one, tokenizer) for k, one in value.items()}
    return value


def _complete(messages: Sequence[Message], arguments_as_text: bool = False) -> list[dict[str, Any]]:
    """Messages with all that templates look for, whichever API they were written for.

    Calls without an id get one, and so do, in the same order, results that do not say whose they
    are. Thoughts are there under both names that templates have for them.
    """
    found, open_ids, number = [], deque[str](), 0
    for message in messages:
        about = {**message, "content": str(message.get("content") or "")}
        thinking = about.pop("thinking", None) or about.get("reasoning_content")
        if thinking:
            about |= {"thinking": thinking, "reasoning_content": thinking}
        if calls := about.get("tool_calls"):
            open_ids.clear()
            about["tool_calls"] = []
            for call in calls:
                number += 1
                function = {**call.get("function", {})}
                function["arguments"] = _arguments(function.get("arguments"), arguments_as_text)
                about["tool_calls"].append(
                    {"type": "function", "id": f"{number:09}", **call, "function": function}
                )
                open_ids.append(str(about["tool_calls"][-1]["id"]))
        elif about["role"] == "tool":
            expected = open_ids.popleft() if open_ids else ""
            about = {"tool_call_id": expected, **about}
            if "tool_name" in about:
                about.setdefault("name", about["tool_name"])
        found.append(about)
    return found


def _arguments(said: Any, as_text: bool) -> Any:
    """What a call was made with: values where it can be."""
    if as_text:
        return said if isinstance(said, str) else json.dumps(said or {}, ensure_ascii=False)
    if isinstance(said, str):
        try:
            return parse(said or "{}")
        except ValueError:
            return said
    return said or {}


def _check(engine: Engine, characters: int) -> None:
    """An encoder-decoder has a source, which neither API has a field for.

    What is surely too long is not even cut into tokens: one takes some 150 bytes to be made.
    """
    if engine.reads_sources:
        raise BadRequest("the API does not serve encoder-decoders; `moeinf run` does")
    context = engine.placement.context
    if characters > _MOST_CHARACTERS * context:
        raise PromptTooLong(f"the prompt has {characters} characters, the context {context} tokens")


def embedding_prompt(engine: Engine, given: str | Sequence[int], truncate: bool) -> list[int]:
    """Token ids of a text that is embedded; special tokens in it are text. Or ids as they are.

    truncate: what is longer than the context is cut at its end. Raises BadRequest for ids that the
    model lacks, PromptTooLong.
    """
    if isinstance(given, str) and truncate:
        given = given[: _MOST_CHARACTERS * engine.placement.context]
    _check(engine, len(given))
    if isinstance(given, str):
        ids = engine.tokenizer.encode_text(given, plain=True)
    else:
        ids = list(given)
        if any(not 0 <= token < engine.model.vocab_size for token in ids):
            raise BadRequest("input has ids that are no tokens of this model")
    return ids[: engine.placement.context - 1] if truncate else ids
