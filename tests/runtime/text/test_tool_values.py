"""Argument values written without types: the parser recovers the template's input."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeinf.runtime.text.answer_parser import AnswerParser
from moeinf.runtime.text.chat_template import TemplateWorker
from moeinf.runtime.text.offered_tools import Call
from moeinf.runtime.text.tool_values import load_value

# The formats of Qwen3-Coder (with `sequence`: Qwen3.5) and GLM-4.5 for an earlier call.
CODER = """{%- if tools %}{% endif %}{%- for call in messages[0].tool_calls %}
{{- '<tool_call>\\n<function=' + call.name + '>\\n' }}
{%- for name, value in call.arguments|items %}
{{- '<parameter=' + name + '>\\n' }}
{%- set value = value | tojson | safe if value is mapping else value | string %}
{{- value }}{{- '\\n</parameter>\\n' }}
{%- endfor %}{{- '</function>\\n</tool_call>' }}
{%- endfor %}"""
GLM = """{%- if tools %}{% endif %}{%- for call in messages[0].tool_calls %}
{{- '<tool_call>' + call.name }}
{%- for k, v in call.arguments.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson if v is not string else v }}</arg_value>
{%- endfor %}
</tool_call>{% endfor %}"""

ARGUMENTS: dict[str, tuple[dict[str, Any], Any]] = {
    "yes": ({"type": "boolean"}, True),
    "no": ({}, False),
    "nothing": ({"type": ["integer", "null"]}, None),
    "untyped": ({}, None),
    "perhaps": ({"type": ["string", "null"]}, None),
    "either": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
    "nullable": ({"type": "string", "nullable": True}, None),
    "text": ({"type": "string"}, "None"),
    "digits": ({"type": "string"}, "12"),
    "truth": ({"type": "string"}, "True"),
    "mode": ({"enum": ["1", "2"]}, "1"),
    "said": ({"const": "true"}, "true"),
    "count": ({"type": "integer"}, -12),
    "share": ({"type": "number"}, 1e-09),
    "list": ({"type": "array"}, ["a", "it's", 'a "b"', True, None, 1.5, {"k": [False]}]),
    "object": ({"type": "object"}, {"k": [None, "x\n"], "it's": {}}),
    "named": ({"$ref": "#/$defs/Mode"}, "1"),
    "quoted": ({}, "'a'"),
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "properties": {name: schema for name, (schema, _) in ARGUMENTS.items()},
                "$defs": {"Mode": {"type": "string", "enum": ["1", "2"]}},
            },
        },
    }
]


@pytest.mark.parametrize("template", [CODER, GLM])
def test_what_a_template_writes_is_read_back(template: str) -> None:
    arguments = {name: value for name, (_, value) in ARGUMENTS.items()}
    worker = TemplateWorker(template)
    try:
        calls: Any = [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}]
        text = worker.render(calls, tools=TOOLS)
    finally:
        worker.close()
    parser = AnswerParser(template, "", TOOLS)
    assert [*parser.add(text), *parser.rest()] == [Call("f", arguments)]


def like(value: Any, wanted: Any) -> bool:
    """Compare values, and distinguish True from 1."""
    return repr(value) == repr(wanted)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=12,
)  # fmt: skip


@given(JSON)
def test_any_value_in_pythons_spelling(value: Any) -> None:
    if isinstance(value, str):
        assert load_value(value, {"type": "string"}, {}) == value
    else:
        assert like(load_value(str(value), {}, {}), value)


@given(st.text(alphabet="[]{}'\"\\\\xuU0N,:.-eTrueFalson1 \n", max_size=20))
def test_any_text_is_a_value(text: str) -> None:
    load_value(text, {}, {})


def test_what_is_no_literal_stays_text() -> None:
    for text in ("nan", "(1, 2)", "{1, 2}", "b'x'", "__import__('os')", "[1", "1_0", "['a' 'b']"):
        assert load_value(text, {"type": "array"}, {}) == text
    for text in ("[" * 100_000, "['" * 50_000, "9" * 5000):
        assert load_value(text, {}, {}) == text


def test_schemas_that_are_none_say_nothing() -> None:
    endless: dict[str, Any] = {"anyOf": []}
    endless["anyOf"] += [endless, endless]
    circle = {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 99}}}
    schemas = [None, 3, {"type": [["string"]]}, {"type": {}}, {"anyOf": 5}, {"oneOf": {}}, endless,
               {"$ref": 1}, {"$ref": "#/x/y"}, {"$ref": "#/$defs/a"}, {"enum": 3}]  # fmt: skip
    for schema in schemas:
        assert load_value("True", schema, circle) is True


def test_long_values_take_time_in_proportion() -> None:
    start = time.process_time()
    assert len(load_value(str(["a\\n'", None] * 20_000), {}, {})) == 40_000
    assert time.process_time() - start < 5
