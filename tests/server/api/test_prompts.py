"""Values that templates get: null where they ask for it, thoughts under every name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moeinf.runtime.generation.prompts import chat_prompt
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.runtime.requests import PromptTooLong
from moeinf.runtime.text.chat_template import TemplateError, TemplateWorker
from moeinf.runtime.text.tokenizer import Tokenizer
from moeinf.server.api.prompts import MessageExtras

# How DeepSeek-V2.5, V3 and R1 tell calls from answers.
DEEPSEEK = """{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ 'User: ' + message['content'] }}{% endif %}
{%- if message['role'] == 'assistant' and message['content'] is none %}
{%- for tool in message['tool_calls'] %}
{{- '[call ' + tool['type'] + ' ' + tool['function']['name'] + ' ' }}
{{- tool['function']['arguments'] + ']' }}
{%- endfor %}
{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
{{- 'Assistant: ' + message['content'] }}
{%- endif %}
{%- if message['role'] == 'tool' %}{{ 'Tool: ' + message['content'] }}{% endif %}
{%- endfor %}"""
# All others; this one speaks of none, too.
OTHER = """{%- for message in messages %}
{{- message.role + ':' + message.content|string }}
{%- for call in message.tool_calls or [] %}
{{- '[call ' + call.function.name + ' ' + call.function.arguments|tojson + ']' }}
{%- endfor %}
{%- if message.name is not none %}{% endif %}
{%- endfor %}"""
THOUGHTS = "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}|{{ m.reasoning }}"
# How gpt-oss writes calls: one text before them, which is either content or thoughts.
HARMONY = """{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.content and message.thinking %}
{{- raise_exception('both content and thinking') }}
{%- elif message.content or message.thinking %}
{{- '<|channel|>analysis<|message|>' + (message.content or message.thinking) + '.' }}
{%- endif %}
{{- '[call ' + message.tool_calls[0].function.name + ']' }}
{%- else %}
{{- message.role + ':' + message.content + '|' + (message.thinking or '') }}
{%- endif %}
{%- endfor %}"""
# How the first template of Gemma 4 writes calls and their results.
GEMMA = """{%- macro value_of(value) -%}
{%- if value is string -%}{{ '"' + value + '"' }}{%- else -%}{{ value | tojson }}{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(before='tool') -%}
{%- for message in messages -%}
    {{- '<' + message['role'] + '>' }}
    {%- for call in message['tool_calls'] or [] -%}{{- '[call ' + call['function']['name'] + ']' }}
    {%- endfor -%}
    {%- for one in message['tool_responses'] or [] -%}
        {%- if one['response'] is mapping -%}
            {{- '[' + one['name'] ~ ':' }}
            {%- for key, value in one['response'] | dictsort -%}{{ key ~ '=' ~ value_of(value) }};
            {%- endfor -%}{{- ']' }}
        {%- else -%}
            {{- '[' + one['name'] + ':' + value_of(one['response']) + ']' }}
        {%- endif -%}
    {%- endfor -%}
    {{- message['content'] }}
{%- endfor -%}
{%- if ns.before != 'tool_response' %}.{% endif %}"""
CALL = {"function": {"name": "add", "arguments": {"a": None}}}


def prompt(template: str, messages: list[dict[str, Any]]) -> str:
    tokenizer = Tokenizer(DEMO_CHECKPOINT)
    tokenizer.chat_template = template
    worker = TemplateWorker(template)
    engine: Any = SimpleNamespace(
        tokenizer=tokenizer,
        template=worker,
        info=SimpleNamespace(context=1000, reads_sources=False, defaults=None),
    )
    try:
        return tokenizer.decode(chat_prompt(engine, messages))
    finally:
        worker.close()


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
def test_calls_without_content_are_not_lost(content: dict[str, Any]) -> None:
    messages = [
        {"role": "user", "content": "1+2"},
        {"role": "assistant", "tool_calls": [CALL], **content},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": content.get("content")},
    ]
    expected = 'User: 1+2[call function add {"a": null}]Tool: 3Assistant: '
    assert prompt(DEEPSEEK, messages) == expected
    expected = 'user:1+2assistant:[call add {"a": null}]tool:3assistant:'
    assert prompt(OTHER, messages) == expected


def test_content_beside_calls_stays() -> None:
    messages = [{"role": "assistant", "content": "Yes", "tool_calls": [CALL]}]
    assert prompt(DEEPSEEK, messages) == "Assistant: Yes"
    assert prompt(OTHER, messages) == 'assistant:Yes[call add {"a": null}]'


@pytest.mark.parametrize("name", ["thinking", "reasoning_content", "reasoning"])
def test_thoughts_have_three_names(name: str) -> None:
    said = MessageExtras.model_validate({"content": "x", name: "hm"}).dump()
    found = prompt(THOUGHTS + "{% endfor %}", [{"role": "assistant", **said}])
    assert found == "hm|hm|hm"
    with pytest.raises(ValueError, match=name):
        MessageExtras.model_validate({name: {"a": 1}})


@pytest.mark.parametrize("name", ["thinking", "reasoning_content", "reasoning"])
def test_harmony_takes_thoughts_and_a_preamble_beside_a_call(name: str) -> None:
    called = {"role": "assistant", "content": "I add.", "tool_calls": [CALL], name: "hm"}
    begin, end = "<|channel|>analysis<|message|>", ".[call add]"
    assert prompt(HARMONY, [called]) == f"{begin}hm\nI add.{end}"
    assert prompt(HARMONY, [{**called, name: None}]) == f"{begin}I add.{end}"
    assert prompt(HARMONY, [{**called, "content": None}]) == f"{begin}hm{end}"
    answered = {**called, "tool_calls": None}
    assert prompt(HARMONY, [answered]) == "assistant:I add.|hm"


def test_other_templates_get_thoughts_and_a_preamble_apart() -> None:
    called = {"role": "assistant", "content": "Yes", "tool_calls": [CALL], "thinking": "hm"}
    assert prompt(OTHER, [called]) == 'assistant:Yes[call add {"a": null}]'


def test_results_are_in_the_turn_that_called() -> None:
    """Results name their calls by id, in any order, by order or by the name of the tool."""
    add, now = ({"id": f"c{n}", "function": {"name": n, "arguments": {}}} for n in ("add", "now"))
    asked = {"role": "user", "content": "1+2"}
    called = {"role": "assistant", "content": None, "tool_calls": [add, now]}
    results = [
        {"role": "tool", "tool_call_id": "cnow", "content": '{"b": [1], "a": "x"}'},
        {"role": "tool", "tool_call_id": "cadd", "content": "[3]"},
    ]
    told = prompt(GEMMA, [asked, called, *results, {"role": "assistant", "content": "It is 3"}])
    begin = "<user>1+2<assistant>[call add][call now]"
    assert told == f'{begin}[now:a="x";b=[1];][add:"[3]"]<assistant>It is 3.'
    bare = [{"role": "tool", "content": "3"}, {"role": "tool", "content": "", "tool_name": "now"}]
    assert prompt(GEMMA, [asked, called, *bare]) == f'{begin}[add:"3"][now:""].'
    assert prompt(GEMMA, [asked, *bare[:1]]) == "<user>1+2<tool>3."  # of no call


def test_other_templates_get_results_as_messages() -> None:
    known = GEMMA + "{% for m in messages %}{% if m.role == 'tool' %}!{% endif %}{% endfor %}"
    called = [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "3"}]
    assert prompt(known, called) == "<assistant>[call add]<tool>3.!"
    assert prompt(GEMMA, called) == '<assistant>[call add][add:"3"].'


_LONG = "a" * 64_000  # half of what a context of 1,000 tokens can be, and to spare
_HALVES = {
    "contents": {"content": _LONG, "n": {"role": "user", "content": _LONG}},
    "a thought": {"thinking": _LONG + _LONG},
    "arguments": {"tool_calls": [{"function": {"name": "f", "arguments": {"a": [_LONG, _LONG]}}}]},
    "a key": {"tool_calls": [{"function": {"name": "f", "arguments": {_LONG + _LONG: None}}}]},
    "an extra field": {"extra": [[{"b": _LONG}], _LONG]},
    "bytes": {"extra": "\u65e5" * 43_000},
}


def untouched(messages: list[dict[str, Any]], tools: list[Any]) -> None:
    """Raise what chat_prompt raises, with an engine that has no tokenizer to call."""

    def called(*_: Any, **__: Any) -> Any:
        raise AssertionError("the tokenizer is called")

    tokenizer = SimpleNamespace(
        guard=called, encode_text=called, encode_rendered=called, bos="", eos="", chat_template=""
    )
    engine: Any = SimpleNamespace(
        tokenizer=tokenizer,
        template=SimpleNamespace(render=called),
        info=SimpleNamespace(context=1000, reads_sources=False, defaults=None),
    )
    chat_prompt(engine, messages, tools)


@pytest.mark.parametrize("name", _HALVES)
def test_what_is_too_long_is_not_looked_at_for_tokens(name: str) -> None:
    """One tool with a description of 2 MB took 5.1 s of the engine's thread, and 700 MB."""
    with pytest.raises(PromptTooLong):
        untouched([{"role": "user", "content": "", **_HALVES[name]}], [])


def test_tools_that_are_too_long_are_not_looked_at_for_tokens() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": _LONG}}
    with pytest.raises(PromptTooLong):
        untouched([{"role": "user", "content": "a"}], [tool, tool])
    with pytest.raises(PromptTooLong):
        untouched([{"role": "user", "content": _LONG}], [tool])


def test_what_fits_is_looked_at() -> None:
    with pytest.raises(AssertionError, match="called"):
        untouched([{"role": "user", "content": _LONG}], [])


# How Mistral's templates and others tell turns: strictly, or without the messages they do not know.
STRICT = """{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}
{{- raise_exception('a system message must be the first') }}
{%- elif not loop.first and message.role == messages[loop.index0 - 1].role %}
{{- raise_exception('roles must alternate') }}
{%- endif %}
{{- message.role + ':' + message.content + '|' }}
{%- endfor %}"""
SKIPPING = """{%- for message in messages %}
{%- if message.role == 'user' or loop.first %}
{{- message.role + ':' + message.content + '|' }}
{%- endif %}
{%- endfor %}"""


@pytest.mark.parametrize("template", [STRICT, SKIPPING])
def test_a_template_of_strict_turns_gets_every_system_message(template: str) -> None:
    """Claude Code sends a system message behind the user's turn, opencode two of the user."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Read <|user|>."},
        {"role": "user", "content": "17+25="},
        {"role": "system", "content": " Agents: none. "},
    ]
    turns = "Read <|user|>.\n\n17+25=\n\n Agents: none. "
    assert prompt(template, messages) == f"system:Be brief.|user:{turns}|"
    free = "".join(f"{one['role']}:{one['content']}" for one in messages)
    assert prompt(OTHER, messages) == free
    with pytest.raises(TemplateError, match="alternate"):
        prompt(STRICT, [{"role": "assistant", "content": "a"}] * 2)
