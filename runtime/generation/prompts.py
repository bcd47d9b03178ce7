"""Render messages, or a plain text, to the token ids of a prompt.

Messages go through the model's own chat template. It runs on the engine's thread.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from moeinf.runtime.generation.strict_turns import later_systems, strict_turns
from moeinf.runtime.generation.tool_results import results_in_turns, wants_results_in_turns
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.library.defaults import with_defaults
from moeinf.runtime.request_json import parse
from moeinf.runtime.requests import MAX_TEXT_BYTES, PromptTooLong
from moeinf.runtime.text.chat_template import TemplateError, check_variables
from moeinf.runtime.text.reasoning import is_harmony, thinking_variables

if TYPE_CHECKING:
    from moeinf.runtime.engine.engine import Engine
    from moeinf.runtime.text.tokenizer import Tokenizer

_TOKEN_BYTES = 128  # of a token, on average; longer text cannot fit and is not tokenised
_LONG_TEXT_BYTES, _LONG_TOKEN_BYTES = 1 << 20, 16  # beyond a MiB, 16 for each more token
_THOUGHTS = ("thinking", "reasoning_content", "reasoning")  # templates' and clients' names
_ASKS_FOR_NULL = re.compile(r"\bis\s++(?:not\s++)?none\b", re.IGNORECASE)
_BILLING = re.compile(
    r"\s*+x-anthropic-billing-header:(?:[ \t]*+[\w-]++=[^;\n]*+;)*+[ \t]*+\n{0,2}"
)
Message = Mapping[str, Any]  # role, content, and other keys that a template may read


def chat_prompt(
    engine: Engine,
    messages: Sequence[Message],
    tools: Sequence[Any] = (),
    think: bool | str | None = None,
    now: str | None = None,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> list[int]:
    """Return token ids that end where the assistant's answer begins.

    think: the value for templates with a thinking switch; now: their date, today if None;
    variables: more values for the template, stronger than think. Raises TemplateError,
    InvalidValue for a variable, PromptTooLong, TokenizerFailed.
    """
    check_variables(variables)
    messages = [_without_billing(message) for message in messages]
    messages = with_defaults(engine.info.defaults, messages)
    _check(engine, *_texts([*messages, *tools, variables]))  # before any of them is tokenised
    tokenizer = engine.tokenizer
    if engine.template is None:  # a base model: it continues the text
        text = "\n\n".join(str(message.get("content") or "") for message in messages)
        return tokenizer.encode_text(text, plain=True)
    chosen = {name: _guarded(value, tokenizer) for name, value in variables.items()}
    extra: dict[str, Any] = {**thinking_variables(think), **chosen, **({"now": now} if now else {})}
    if tools:
        extra["tools"] = _guarded(list(tools), tokenizer)
    extra |= {"bos_token": tokenizer.bos or "", "eos_token": tokenizer.eos or ""}
    rendered = _rendered_turns(engine, messages, extra)
    _check(engine, rendered)  # a template may write a text more than once
    return tokenizer.encode_rendered(rendered)


def _without_billing(message: Message) -> Message:
    """Return a system message without the line that Claude Code puts before it.

    The line is for the billing of another service. It differs in every request, so no prompt would
    begin like an earlier one.
    """
    text = message.get("content")
    if message.get("role") not in ("system", "developer") or not isinstance(text, str):
        return message
    found = _BILLING.match(text)
    return message if found is None else {**message, "content": text[found.end() :]}


def _rendered_turns(engine: Engine, messages: Sequence[Message], extra: dict[str, Any]) -> str:
    """Return the text of a template, with strict turns if it refuses or drops the given ones.

    Raises TemplateError.
    """
    strict = strict_turns(messages)
    try:
        rendered = _rendered(engine, messages, extra)
    except TemplateError:
        if strict == list(messages):
            raise
        return _rendered(engine, strict, extra)
    later = [str(message.get("content") or "").strip() for message in later_systems(messages)]
    shown = _all_in(rendered, map(engine.tokenizer.guard, later))
    return rendered if shown else _rendered(engine, strict, extra)


def _all_in(whole: str, texts: Iterable[str]) -> bool:
    """Return whether a text has all others; in linear time where they follow each other."""
    at = 0
    for text in texts:
        place = whole.find(text, at)
        if place < 0 and text not in whole:
            return False
        at = max(at, place + len(text))
    return True


def _rendered(engine: Engine, messages: Sequence[Message], extra: dict[str, Any]) -> str:
    """Return the text of a template. Raises TemplateError.

    Missing content is "", because most templates would write "None" for null. The templates of
    DeepSeek-V2.5 and V3 look for calls only where content is null. It is null if that renders more
    of the calls.
    """
    calling = [m["tool_calls"] for m in messages if m.get("tool_calls") and not m.get("content")]
    rendered = _with_calls(engine, messages, extra, null=False)
    if not calling or not _ASKS_FOR_NULL.search(engine.tokenizer.chat_template or ""):
        return rendered
    try:
        other = _with_calls(engine, messages, extra, null=True)
    except TemplateError:
        return rendered
    names = {str(call.get("function", {}).get("name", "")) for calls in calling for call in calls}
    shown = [sum(text.count(name) for name in names if name) for text in (rendered, other)]
    return other if shown[1] > shown[0] else rendered


def _with_calls(
    engine: Engine, messages: Sequence[Message], extra: dict[str, Any], null: bool
) -> str:
    """Render with calls; null: see _complete.

    DeepSeek's templates join arguments as text, where all others write values as JSON.
    """
    assert engine.template is not None
    harmony = is_harmony(engine.tokenizer.chat_template)
    values = _guarded(_completed(engine, messages, null, harmony), engine.tokenizer)
    try:
        return engine.template.render(values, add_generation_prompt=True, **extra)
    except TemplateError:
        if not any(message.get("tool_calls") for message in values):
            raise
    text = _guarded(_completed(engine, messages, null, harmony, True), engine.tokenizer)
    return engine.template.render(text, add_generation_prompt=True, **extra)


def text_prompt(engine: Engine, text: str, *, plain: bool = False) -> list[int]:
    """Return token ids of a prompt without a template; special tokens in it count.

    plain: special tokens are text. Raises PromptTooLong, TokenizerFailed.
    """
    _check(engine, text)
    return engine.tokenizer.encode_text(text, plain=plain)


def cut_text(engine: Engine, text: str) -> str:
    """Return the beginning of a text, short enough to be tokenised."""
    most = _most_bytes(engine)
    return text[:most].encode("utf-8", "replace")[:most].decode("utf-8", "ignore")


def check_length(prompt: Sequence[int], context: int) -> None:
    """Check a prompt's length; context: of prompt and answer, in tokens.

    Raises InvalidValue for an empty prompt, PromptTooLong for one without room to answer.
    """
    if not prompt:
        raise InvalidValue("the prompt has no tokens")
    if len(prompt) >= context:
        raise PromptTooLong(f"the prompt has {len(prompt)} tokens, the context {context}")


def _guarded(value: Any, tokenizer: Tokenizer) -> Any:
    """Return a value with every text in it fenced, so that no text becomes a special token."""
    if isinstance(value, str):
        return tokenizer.guard(value)
    if isinstance(value, list):
        return [_guarded(one, tokenizer) for one in value]
    if isinstance(value, dict):
        return {tokenizer.guard(k): _guarded(one, tokenizer) for k, one in value.items()}
    return value


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a value, keys too, in any order."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, list):
            left += one
        elif isinstance(one, Mapping):
            left += [*one.keys(), *one.values()]


def _completed(engine: Engine, messages: Sequence[Message], *how: bool) -> list[dict[str, Any]]:
    """Return messages with all keys that the template reads; how: see _complete."""
    found = _complete(messages, *how)
    if wants_results_in_turns(engine.tokenizer.chat_template):
        return results_in_turns(found)
    return found


def _complete(
    messages: Sequence[Message], null: bool, harmony: bool, arguments_as_text: bool = False
) -> list[dict[str, Any]]:
    """Return messages with all keys that templates read, for messages of either API.

    Calls without an id get one, and so do, in the same order, results that name no call. Thoughts
    are stored under all names that templates use. null: missing content of a call is null, not "".
    harmony: gpt-oss's template raises where calls have both thoughts and content, so the content
    becomes the end of the thoughts.
    """
    found, open_ids, number = [], deque[str](), 0
    for message in messages:
        about = {**message, "content": str(message.get("content") or "")}
        thinking = next((said for key in _THOUGHTS if (said := about.get(key))), None)
        if harmony and thinking and about["content"] and about.get("tool_calls"):
            thinking, about["content"] = f"{thinking}\n{about['content']}", ""
        if thinking:
            about |= dict.fromkeys(_THOUGHTS, thinking)
        if calls := about.get("tool_calls"):
            about["content"] = about["content"] or (None if null else "")
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
    """Return the arguments of a call: values where possible."""
    if as_text:
        return said if isinstance(said, str) else json.dumps(said or {}, ensure_ascii=False)
    if isinstance(said, str):
        try:
            return parse(said or "{}")
        except ValueError:
            return said
    return said or {}


def _check(engine: Engine, *texts: str) -> None:
    """Raise PromptTooLong for texts that are surely too long, before they are tokenised.

    Making a token takes some 150 bytes.
    """
    if sum(len(text.encode("utf-8", "replace")) for text in texts) > _most_bytes(engine):
        characters, context = sum(map(len, texts)), engine.info.context
        raise PromptTooLong(f"the prompt has {characters} characters, the context {context} tokens")


def _most_bytes(engine: Engine) -> int:
    context = engine.info.context
    long = _LONG_TEXT_BYTES + _LONG_TOKEN_BYTES * context
    return min(_TOKEN_BYTES * context, long, MAX_TEXT_BYTES)
