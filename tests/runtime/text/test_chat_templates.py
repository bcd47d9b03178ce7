"""Templates with the constructs of published ones render the same text as transformers.

The templates are our own. Each has the constructs of one group of families.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from moeinf.runtime.text.answer_parser import AnswerParser
from moeinf.runtime.text.chat_template import TemplateWorker, family_template
from moeinf.runtime.text.offered_tools import Call
from moeinf.runtime.text.tool_calls import format_of, knows_tools
from tests.runtime.text.long_templates import GEMMA, KIMI
from tests.runtime.text.more_templates import DEEPSEEK3, DOTS, HUNYUAN, LFM2, MINIMAX, SOLAR
from tests.runtime.text.recent_templates import DEEPSEEK4, GRANITE4, MISTRAL3, NEMOTRON

CHATML = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if not ns.found and message.role == "user" %}
        {%- set ns.found = true %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}{% generation %}{{- content }}{% endgeneration %}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
                {{- call.function.arguments if call.function.arguments is string
                    else call.function.arguments | tojson }}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool>' + message.content + '</tool><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

INSTRUCT = """{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message['role'] == 'user' %}
        {%- if loop.first and system_message is defined %}
            {{- ' [INST] ' + system_message + '\\n\\n' + message['content'] + ' [/INST]' }}
        {%- else %}
            {{- ' [INST] ' + message['content'] + ' [/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- else %}
        {%- continue %}
    {%- endif %}
{%- endfor %}
"""

SPOKEN = """{% if not add_generation_prompt is defined %}
{% set add_generation_prompt = false %}
{% endif %}
{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'user' %}
{{ 'User: ' + message['content'] + '\n\n' }}
{% elif message['role'] == 'assistant' %}
{{ 'Assistant: ' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ message['content'] + '\n\n' }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}
"""

HARMONY = """
{%- macro described(tools) -%}
    {%- for tool in tools %}
type {{ tool.function.name }} = (_: {{ tool.function.parameters | tojson(indent=2) }}) => any;
    {%- endfor %}
{%- endmacro -%}
<|start|>system<|message|>Knowledge cutoff: 2024-06
{%- if strftime_now is defined %}

Reasoning: {{ reasoning_effort | default('medium') }}
{%- endif %}<|end|>
{%- if tools %}<|start|>developer<|message|>{{ described(tools) }}<|end|>{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if "<|channel|>analysis" in message.content %}
            {{- raise_exception("marks in a message") }}
        {%- endif %}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
    {%- else %}
<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}
"""

GLM = """[gMASK]<sop>
{%- macro visible_text(content) -%}
    {%- if content is string -%}
        {{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}
            {%- if item is mapping and item.type == 'text' -%}
                {{- item.text }}
            {%- elif item is string -%}
                {{- item }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{- content }}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last_user=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' %}<|user|>
{{ visible_text(m.content) }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking) else '' }}
{%- elif m.role == 'assistant' %}
{%- set reasoning, content = '', visible_text(m.content) %}
{%- if m.reasoning_content is string %}{% set reasoning = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}<|assistant|>
{%- if loop.index0 > ns.last_user and reasoning %}
{{ '\n<think>' + reasoning.strip() + '</think>' }}
{%- else %}
{{ '\n<think></think>' }}
{%- endif %}
{%- if content.strip() %}
{{ '\n' + content.strip() }}
{%- endif %}
{% for tc in m.tool_calls or [] %}
{%- set tc = tc.function or tc -%}
{{ '\n<tool_call>' + tc.name }}
{% for k, v in tc.arguments.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}
</tool_call>{% endfor %}
{%- elif m.role == 'tool' -%}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
    {{- '<|observation|>' }}
{%- endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- else %}<|{{ m.role }}|>
{{ visible_text(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>
{{- '\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- endif -%}
"""

GRANITE = """{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = "Knowledge Cutoff Date: April 2024.\nToday's Date: "
        + strftime_now('%B %Y') + ".\nYou are Granite." %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\n' }}
{%- if tools %}
    {{- '<|start_of_role|>tools<|end_of_role|>' }}
    {{- tools | tojson(indent=4) }}
    {{- '<|end_of_text|>\n' }}
{%- endif %}
{%- for message in loop_messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] }}
    {{- '<|end_of_text|>\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}
"""

ROLES = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + '\n' }}
{% elif message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + '\n' }}
{% elif message['role'] == 'assistant' and not loop.last %}
{{ '<|assistant|>\n'  + message['content'] + eos_token + '\n' }}
{% elif message['role'] == 'assistant' and loop.last %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>\n' }}
{% endif %}
{% endfor %}"""
DEEPSEEK32, OUR_DEEPSEEK4 = (
    family_template(name) or "" for name in ("deepseek_v32", "deepseek_v4")
)
TEMPLATES = {  # with the families that use such constructs
    "chatml": CHATML,  # Qwen, Arctic, MiMo
    "instruct": INSTRUCT,  # Mixtral
    "spoken": SPOKEN,  # DeepSeek
    "harmony": HARMONY,  # gpt-oss
    "gemma": GEMMA,
    "glm": GLM,
    "granite": GRANITE,
    "granite 4": GRANITE4,
    "nemotron": NEMOTRON,
    "roles": ROLES,  # OLMoE, Phi
    "kimi": KIMI,
    "deepseek 3.2": DEEPSEEK32,
    "deepseek 4": OUR_DEEPSEEK4,
    "deepseek 4 in GGUF": DEEPSEEK4,
    "mistral 3": MISTRAL3,  # and Mistral Small 4
    "minimax": MINIMAX,
    "lfm2": LFM2,
    "solar": SOLAR,
    "dots": DOTS,
    "hunyuan": HUNYUAN,
    "deepseek 3": DEEPSEEK3,
}
ASK = {"role": "user", "content": "What is <2 & 'é'> \U0001f642?\n"}
SYSTEM = {"role": "system", "content": "Be kind."}
CALL = {"function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [ASK],
    "system": [SYSTEM, ASK],
    "turns": [
        SYSTEM,
        ASK,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFour. "},
        {"role": "user", "content": "And 3?"},
    ],
    "tools": [
        ASK,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "3"},
    ],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"ü": {}}}},
    }
]
VARIABLES: list[dict[str, Any]] = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": False},
    {"add_generation_prompt": True, "tools": TOOLS, "enable_thinking": False},
]


@pytest.mark.parametrize(
    ("template", "opening", "bare"),
    [
        (NEMOTRON, "<tool_call>", "<function="),
        (GRANITE4, "<tool_call>", None),
        (DEEPSEEK4, "<｜DSML｜tool_calls>", None),
        (OUR_DEEPSEEK4, "<｜DSML｜tool_calls>", None),
        (DEEPSEEK32, "<｜DSML｜function_calls>", None),
        (MISTRAL3, "[TOOL_CALLS]", None),
        (HUNYUAN, "<tool_calls>", None),
    ],
)
def test_their_tool_calls_are_known(template: str, opening: str, bare: str | None) -> None:
    assert knows_tools(template)
    form = format_of(template)
    assert form is not None
    assert form.open == opening
    assert (form.bare and form.bare.open) == bare


@pytest.mark.parametrize(
    "template",
    [DEEPSEEK4, OUR_DEEPSEEK4, DEEPSEEK32, MISTRAL3, GLM, NEMOTRON, MINIMAX, SOLAR, HUNYUAN],
    ids=len,
)
@pytest.mark.parametrize("size", [1, 1000])
def test_a_rendered_call_is_parsed_again(template: str, size: int) -> None:
    """A template writes a call as its model learned to write it."""
    arguments = {"a": [1, {"ü": None}], "note": 'a "b"\n<c>'}
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    worker, tokens = TemplateWorker(template), {"bos_token": "<s>", "eos_token": ""}
    try:
        before, after = (
            worker.render([ASK, *more], tools=TOOLS, **tokens) for more in ([], [answer])
        )
    finally:
        worker.close()
    parser, text = AnswerParser(template, before, TOOLS), after.removeprefix(before)
    heard = [part for at in range(0, len(text), size) for part in parser.add(text[at : at + size])]
    assert Call("add", arguments) in [*heard, *parser.rest()]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_the_same_text_as_transformers(template: str) -> None:
    renders_as_transformers(template)


def renders_as_transformers(template: str) -> None:
    """Assert the same text for several chats, with tools and without."""
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    worker = TemplateWorker(template)
    try:
        for name, messages in CHATS.items():
            for variables in VARIABLES:
                rest = {k: v for k, v in variables.items() if k != "tools"}
                expected, _ = render_jinja_template(
                    conversations=[messages],
                    tools=variables.get("tools"),
                    chat_template=template,
                    **rest,
                    **tokens,
                )
                assert worker.render(messages, **variables, **tokens) == expected[0], name
    finally:
        worker.close()
