"""Texts with tool calls in every format, and what is to be read in them."""

from __future__ import annotations

import json
from typing import Any

from moeinf.runtime.text.offered_tools import Call

TAGS = "{% if tools %}<tool_call>{% endif %}"
CODER = "{% if tools %}<tool_call><function=NAME>{% endif %}"
MISTRAL = "{% if tools %}[TOOL_CALLS]{% endif %}"
MISTRAL_NAMED = "{% if tools %}[TOOL_CALLS]{{ name }}[ARGS]{% endif %}[THINK]x[/THINK]"
HUNYUAN = "{%- if tools %}<tool_calls>{% endif %}"
GRANITE = "{%- if tools %}<|tool_call|>{% endif %}"
DEEPSEEK = "{% for tool in tools %}<｜tool▁calls▁begin｜>{% endfor %}"
GEMMA = "{% if tools %}<|tool_call>{% endif %}<|channel>thought\n<channel|>"
V32 = "{% set mark = '｜DSML｜' %}{% if tools %}<{{ mark }}function_calls>{% endif %}"
V4 = "{% set mark = '｜DSML｜' %}{% if tools %}<{{ mark }}tool_calls>{% endif %}<think></think>"
HARMONY = "{% if tools %}<|channel|>x<|message|>{% endif %}"
MINIMAX = "{%- if tools -%}<minimax:tool_call>{% endif %}"
KIMI = "{%- if tools -%}x{% endif %}<|tool_calls_section_begin|>"
SOLAR = "{%- if tools -%}<|tool_call:begin|>{% endif %}<|think|><|content|>"
LFM2 = "{%- if tools -%}<|tool_list_start|>{% endif %}"
LFM2_5 = "{%- if tools -%}x{% endif %}<|tool_call_start|>"


ALL_TEMPLATES = [
    TAGS, CODER, MISTRAL, MISTRAL_NAMED, GRANITE, DEEPSEEK, HARMONY, MINIMAX, KIMI, LFM2, LFM2_5,
    GEMMA, V32, V4, SOLAR, HUNYUAN,
]  # fmt: skip


def answer(text: str) -> tuple[str, str]:
    return "answer", text


def hermes(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def solar(name: str, arguments: str) -> str:
    """Return a call in Solar's format."""
    marks = ("<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>")
    return f"<|tool_call:begin|>a1b2c3d4e5{marks[0]}{name}{marks[1]}{arguments}{marks[2]}"


DSML_END = "</｜DSML｜function_calls>"


def dsml(name: str, *arguments: tuple[str, str, str]) -> str:
    """Return a call in DeepSeek-V3.2's format; arguments: (name, whether a string, text)."""
    lines = [
        f'<｜DSML｜parameter name="{key}" string="{kind}">{text}</｜DSML｜parameter>\n'
        for key, kind, text in arguments
    ]
    return (
        f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="{name}">\n{"".join(lines)}'
        f"</｜DSML｜invoke>\n{DSML_END}"
    )


ADD = Call("add", {"a": 1})
CASES: list[tuple[str, str, list[Any]]] = [
    (TAGS, hermes("add", a=1), [ADD]),
    (TAGS, "Let me see. \n\n" + hermes("add", a=1), [answer("Let me see."), ADD]),
    (
        TAGS,
        "<think>\nhm <tool_call>\n</think>\n\n" + hermes("add", a=1) + "\n" + hermes("now"),
        [("thinking", "hm <tool_call>\n"), ADD, Call("now", {})],
    ),
    (TAGS, hermes("add", note="</tool_call>"), [Call("add", {"note": "</tool_call>"})]),
    (TAGS, hermes("add", note="<tool_call>"), [Call("add", {"note": "<tool_call>"})]),
    (TAGS, hermes("add", a=1) + " and more ", [ADD, answer("and more ")]),
    (TAGS, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', [ADD]),  # no end
    # invalid calls stay text
    (TAGS, hermes("delete", a=1), [answer(hermes("delete", a=1))]),
    (TAGS, "<tool_call>{]}</tool_call> x", [answer("<tool_call>{]}</tool_call> x")]),
    (
        TAGS,
        "<tool_call>no</tool_call>" + hermes("add", a=1),
        [answer("<tool_call>no</tool_call>"), ADD],
    ),
    (TAGS, '<tool_call>{"name": "add", "argu', [answer('<tool_call>{"name": "add", "argu')]),
    (TAGS, '<tool_call>{"name": ["add"]}</tool_call>', None),
    (TAGS, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', None),
    (TAGS, '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', None),
    (TAGS, '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', None),
    (TAGS, '<tool_call>{"name": "add", "arguments": {"note": "\\ud800"}}</tool_call>', None),
    (TAGS, f'<tool_call>{{"name": "add", "arguments": {"[" * 100_000}</tool_call>', None),
    (TAGS, f"<tool_call>{'9' * 5000}</tool_call>", None),
    (TAGS, "<tool_call>", [answer("<tool_call>")]),
    (TAGS, "a <tool_ca", [answer("a <tool_ca")]),
    # Qwen3-Coder
    (
        TAGS,
        "<tool_call>\n<function=add>\n<parameter=a>\n12\n</parameter>\n<parameter=note>\n"
        "12\n</parameter>\n<parameter=list>\n[1, 2]\n</parameter>\n</function>\n</tool_call>",
        [Call("add", {"a": 12, "note": "12", "list": [1, 2]})],
    ),
    (
        TAGS,
        "<tool_call><function=add><parameter=note>\n a\n</parameter>\n</tool_call> b\n"
        "</parameter></function></tool_call>",
        [Call("add", {"note": " a\n</parameter>\n</tool_call> b"})],
    ),
    (TAGS, "<tool_call><function=add><parameter=a>1</function></tool_call>", None),
    (TAGS, "<tool_call><function=rm></function></tool_call>", None),
    (TAGS, "<tool_call><function=add>", [answer("<tool_call><function=add>")]),
    # Qwen3-Coder: several between the same marks
    (
        TAGS,
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n"
        "<function=now>\n</function>\n<function=add>\n<parameter=note>\nx\n</parameter>\n"
        "</function>\n</tool_call> y",
        [ADD, Call("now", {}), Call("add", {"note": "x"}), answer("y")],
    ),
    (
        CODER,
        "<tool_call><function=now></function><function=now></function><function=add>"
        "<parameter=note></tool_call></parameter></function></tool_call>",
        [Call("now", {}), Call("now", {}), Call("add", {"note": "</tool_call>"})],
    ),
    (
        TAGS,
        "<tool_call><function=add><parameter=a>1</parameter></function><function=now>?"
        "<parameter=a>1</parameter></function></tool_call>",
        None,
    ),
    (
        TAGS,
        "<tool_call><function=add><parameter=note></function><function=now><function=now>"
        "</function><function=now></function></parameter></function></tool_call>",
        [
            Call(
                "add",
                {
                    "note": "</function><function=now><function=now></function><function=now>"
                    "</function>"
                },
            )
        ],
    ),
    (
        TAGS,
        "<tool_call><function=add><parameter=note>a</parameter></function><function=NAME>"
        "</parameter></function></tool_call>",
        [Call("add", {"note": "a</parameter></function><function=NAME>"})],
    ),
    # Qwen3-Coder without its first mark, and with it
    (
        CODER,
        "I add.\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n",
        [answer("I add."), ADD],
    ),
    (CODER, "<function=add><parameter=a>1</parameter></function>", [ADD]),
    (CODER, "<function=now></function> </tool_call> x", [Call("now", {}), answer("x")]),
    (CODER, "<function=now></function> </tool", [Call("now", {}), answer("</tool")]),
    (
        CODER,
        "<function=now></function></tool_call><tool_call><function=now></function></tool_call>"
        "<function=now></function>\n<function=now></function>",
        [Call("now", {})] * 4,
    ),
    (
        CODER,
        "<function=add><parameter=note>a</function></tool_call></parameter></function>",
        [Call("add", {"note": "a</function></tool_call>"})],
    ),
    (
        CODER,
        "A <function=NAME> is said:\n<tool_call><function=now></function></tool_call>",
        [answer("A <function=NAME> is said:"), Call("now", {})],
    ),
    (CODER, "<function=rm></function>", None),
    (CODER, "<function=add><parameter=a>1</function> x", None),
    (CODER, "<function=", None),
    (CODER, hermes("add", a=1), [ADD]),
    (TAGS, "<function=now></function>", None),  # the template does not contain this format
    # GLM
    (
        TAGS,
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>7</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value>null</arg_value><arg_key>maybe</arg_key><arg_value>7</arg_value></tool_call>",
        [Call("add", {"a": 7, "b": None, "maybe": "7"})],
    ),
    (TAGS, "<tool_call>now</tool_call>", [Call("now", {})]),
    (
        TAGS,
        "<tool_call>add<arg_key>note</arg_key><arg_value></tool_call></arg_value></tool_call>",
        [Call("add", {"note": "</tool_call>"})],
    ),
    (TAGS, "<tool_call>add<arg_key>a</arg_key> and so on</tool_call>", None),
    # one mark, then JSON to the end
    (MISTRAL, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "1"}]', [ADD]),
    (MISTRAL, "[TOOL_CALLS] are marks", [answer("[TOOL_CALLS] are marks")]),
    # Mistral's newer one: a mark and a name before each
    (
        MISTRAL_NAMED,
        '[THINK]hm[/THINK]Yes.[TOOL_CALLS]add[ARGS]{"a": 1, "note": "[TOOL_CALLS]now[ARGS]{}"}'
        "[TOOL_CALLS]now[ARGS]{}",
        [
            ("thinking", "hm"),
            answer("Yes."),
            Call("add", {"a": 1, "note": "[TOOL_CALLS]now[ARGS]{}"}),
            Call("now", {}),
        ],
    ),
    (MISTRAL_NAMED, '[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}', [ADD]),
    (MISTRAL_NAMED, '[TOOL_CALLS]add[ARGS]{"a": 1} and', None),
    (MISTRAL_NAMED, '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]', None),
    (MISTRAL_NAMED, '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]rm[ARGS]{}', None),
    (MISTRAL_NAMED, '[TOOL_CALLS]add[ARGS]{"a": ', None),
    (MISTRAL_NAMED, "[TOOL_CALLS]add[ARGS]", None),
    (MISTRAL_NAMED, '[TOOL_CALLS]add[ARGS]{"a": NaN}', None),
    (MISTRAL_NAMED, f"[TOOL_CALLS]add[ARGS]{'[' * 100_000}", None),
    (
        GRANITE,
        '<|tool_call|>[{"name":"add","arguments":{"a":1}},{"name":"now","arguments":{}}]',
        [ADD, Call("now", {})],
    ),
    (GRANITE, '<|tool_call|>[{"name":"add","arguments":{"a":1}},{"name":"rm"}]', None),
    # DeepSeek: V3 and R1, then V3.1
    (
        DEEPSEEK,
        "Yes<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n'
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [answer("Yes"), ADD, Call("now", {})],
    ),
    (
        DEEPSEEK,
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        [ADD],
    ),
    (DEEPSEEK, "<｜tool▁calls▁begin｜>?<｜tool▁calls▁end｜>", None),
    # Gemma 4
    (
        GEMMA,
        'Yes.<|tool_call>call:add{a:1,b:-2.5,list:[1,<|"|>x, y<|"|>,{k:null}],'
        'note:<|"|>a "b": {c}\n<|"|>}<tool_call|><|tool_call>call:now{}<tool_call|>',
        [
            answer("Yes."),
            Call(
                "add", {"a": 1, "b": -2.5, "list": [1, "x, y", {"k": None}], "note": 'a "b": {c}\n'}
            ),
            Call("now", {}),
        ],
    ),
    (
        GEMMA,
        "<|channel>thought\nI <|tool_call> add.\n<channel|>"
        '<|tool_call>call:add{note:<|"|><tool_call|><|"|>,<|"|>a<|"|>:None, b :1}<tool_call|>',
        [
            ("thinking", "I <|tool_call> add.\n"),
            Call("add", {"note": "<tool_call|>", "a": None, "b": 1}),
        ],
    ),
    (GEMMA, "Four.<|channel>thought\n<channel|>", [answer("Four.")]),
    (GEMMA, "<|channel><channel|>Four.<channel|>", [answer("Four.")]),
    (GEMMA, "<|channel>thought\nhm", [("thinking", "hm")]),
    (GEMMA, "<|tool_call>call:rm{a:1}<tool_call|>", None),
    (GEMMA, "<|tool_call>call:add{a:one}<tool_call|>", None),
    (GEMMA, "<|tool_call>call:add{a:1<tool_call|>", None),
    (GEMMA, "<|tool_call>call:add[1]<tool_call|>", None),
    (GEMMA, '<|tool_call>call:add{note:<|"|>x}<tool_call|>', None),
    (GEMMA, f"<|tool_call>call:add{{a:{'[' * 100_000}<tool_call|>", None),
    # Gemma 4, as forced: JSON
    (
        GEMMA,
        '<|tool_call>call:add{"a": 1, "note": "<tool_call|>{"}<tool_call|>',
        [Call("add", {"a": 1, "note": "<tool_call|>{"})],
    ),
    (GEMMA, '<|tool_call>call:add{"a": one}<tool_call|>', None),
    # Solar-Open: turns of thinking, of an answer and of calls
    (
        SOLAR,
        "<|think|>hm<|end|><|begin|>assistant<|content|>Adding.<|end|><|begin|>assistant"
        "<|tool_calls|>"
        + solar("add", '{"a": 1, "note": "<|tool_call:end|><|end|>"}')
        + solar("now", "{}")
        + "<|calls|>",
        [
            ("thinking", "hm"),
            answer("Adding."),
            Call("add", {"a": 1, "note": "<|tool_call:end|><|end|>"}),
            Call("now", {}),
        ],
    ),
    (SOLAR, "<|tool_calls|>" + solar("add", '{"a": 1}')[: -len("<|tool_call:end|>")], [ADD]),
    (SOLAR, "<|content|>" + solar("rm", "{}") + "<|end|>", [answer(solar("rm", "{}"))]),
    (SOLAR, "<|content|>" + solar("add", "[1]"), [answer(solar("add", "[1]"))]),
    (SOLAR, "<|content|>" + solar("add", "{a"), [answer(solar("add", "{a"))]),
    (SOLAR, "No mark", None),
    # DeepSeek-V3.2
    (
        V32,
        "<think>hm</think>Yes\n\n"
        + dsml("add", ("a", "false", "1"), ("note", "true", "1"), ("list", "false", "[1, null]"))
        + "<｜end",
        [
            ("thinking", "hm"),
            answer("Yes"),
            Call("add", {"a": 1, "note": "1", "list": [1, None]}),
            answer("<｜end"),
        ],
    ),
    (V32, dsml("now") + dsml("add", ("a", "false", "1")), [Call("now", {}), ADD]),
    (
        V32,
        dsml("now").replace(DSML_END, dsml("add", ("a", "false", "1")).partition(">\n")[2]),
        [Call("now", {}), ADD],  # two between the same marks
    ),
    (
        V32,
        dsml("add", ("note", "true", f'\n</｜DSML｜parameter>x{DSML_END}"> ')),
        [Call("add", {"note": f'\n</｜DSML｜parameter>x{DSML_END}"> '})],
    ),
    (V32, dsml("rm"), None),
    (V32, dsml("add", ("a", "maybe", "1")), None),
    (V32, dsml("add").replace("</｜DSML｜invoke>", ""), None),
    (V32, "<｜DSML｜function_calls>", None),
    # DeepSeek-V4: the same with another mark
    (
        V4,
        "<think>hm</think>Yes.\n\n"
        + dsml("add", ("note", "true", f"{DSML_END}"), ("b", "false", "-2.5")).replace(
            "function_calls", "tool_calls"
        ),
        [
            ("thinking", "hm"),
            answer("Yes."),
            Call("add", {"note": "</｜DSML｜tool_calls>", "b": -2.5}),
        ],
    ),
    (V4, dsml("now"), [answer(dsml("now"))]),  # V3.2's mark
    # harmony
    (
        HARMONY,
        "<|channel|>analysis<|message|>Add.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.add <|constrain|>json<|message|>{"a": 1}',
        [("thinking", "Add."), ADD],
    ),
    (
        HARMONY,
        " to=functions.now<|channel|>commentary<|message|>{}<|call|><|start|>assistant"
        "<|channel|>final<|message|>Done to=functions.now",
        [Call("now", {}), answer("Done to=functions.now")],
    ),
    (HARMONY, "<|channel|>commentary to=functions.rm<|message|>{}", [answer("{}")]),
]
