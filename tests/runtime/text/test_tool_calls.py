"""Tool calls are parsed in every format, and other text is never parsed as a call."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeinf.runtime.text.answer_parser import AnswerParser
from moeinf.runtime.text.tool_calls import knows_tools
from moeinf.runtime.text.tool_values import load_json
from tests.runtime.text.recent_call_texts import RECENT
from tests.runtime.text.tool_call_texts import (
    ALL_TEMPLATES,
    CASES,
    CODER,
    GEMMA,
    HARMONY,
    HUNYUAN,
    KIMI,
    LFM2,
    MINIMAX,
    MISTRAL,
    MISTRAL_NAMED,
    SOLAR,
    TAGS,
    V4,
    answer,
    hermes,
)

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"type": ["number", "null"]},
                    "note": {"type": "string"},
                    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "list": {"type": "array"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def hear(template: str, text: str, size: int = 1000, tools: Any = TOOLS) -> list[Any]:
    """Return calls, and texts joined while their kind stays the same."""
    parser = AnswerParser(template, "", tools)
    said: list[Any] = []
    parts = [p for at in range(0, len(text), size) for p in parser.add(text[at : at + size])]
    for part in [*parts, *parser.rest()]:
        before = said[-1] if said else None
        if isinstance(part, tuple) and isinstance(before, tuple) and before[0] == part[0]:
            said[-1] = part[0], before[1] + part[1]
        else:
            said.append(part)
    return said


@pytest.mark.parametrize(("template", "text", "expected"), [*CASES, *RECENT])
@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_calls_however_the_text_is_cut(
    template: str, text: str, expected: list[Any] | None, size: int
) -> None:
    if len(text) > 10_000 and size < 1000:
        pytest.skip("the same again, slowly")
    assert hear(template, text, size) == ([answer(text)] if expected is None else expected)


def test_without_tools_marks_are_text() -> None:
    text = hermes("add", a=1)
    assert hear(TAGS, text, tools=[]) == [answer(text)]
    assert hear(HARMONY, "<|channel|>commentary to=functions.add<|message|>{}", tools=[]) == [
        ("thinking", "{}")
    ]


@given(
    st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", '{"name": "add", ', '"arguments": {}}', "<think>", "\n",
             "</think>", "<function=add>", "</function>", "<arg_key>", "</arg_value>", "x", '"',
             "<arg_value>", "add", "[TOOL_CALLS]", "<|channel|>", "<|message|>", "<|call|>", " to=",
             "<function=now>", "<parameter=a>", "</parameter>", "functions.add", "commentary",
             "final", "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="now">',
             "</invoke>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "{}",
             "<|tool_call_argument_begin|>", "<|tool_calls_section_end|>", "<|tool_call_start|>",
             "[now()", "]", "<|tool_call_end|>", "<|tool_call>", "<tool_call|>", "call:add{",
             "<|channel>", "<channel|>", '<|"|>', "<|think|>", "<|content|>", "<|end|>",
             "<|tool_calls|>", "<|calls|>", "<|tool_call:begin|>", "<|tool_call:name|>now",
             "<|tool_call:args|>{}", "<|tool_call:end|>", "now[ARGS]", "[THINK]", "[/THINK]",
             "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", '<｜DSML｜invoke name="now">',
             "</｜DSML｜invoke>", "<tool_calls>", "</tool_calls>"]
        ),
        max_size=30,
    ),
    st.sampled_from(
        [
            TAGS, CODER, MISTRAL, MISTRAL_NAMED, HARMONY, MINIMAX, KIMI, LFM2, GEMMA, SOLAR, V4,
            HUNYUAN,
        ]
    ),
    st.integers(1, 9),
)  # fmt: skip
def test_any_text_is_heard_the_same_in_pieces(words: list[str], template: str, size: int) -> None:
    text = "".join(words)
    assert hear(template, text, size) == hear(template, text)


@pytest.mark.parametrize("template", ALL_TEMPLATES)
def test_templates_that_know_tools(template: str) -> None:
    assert knows_tools(template)


def test_templates_that_do_not() -> None:
    for template in (None, "", "tools <tool_call>", "{{ messages }} tools <tool_call>"):
        assert not knows_tools(template)
    assert not knows_tools("{% if tools %}{{ tools }}{% endif %}")  # an unpublished format


def test_json_that_cannot_be_written_again() -> None:
    assert load_json('{"a": [1, "\\ud83d\\ude42"]}') == {"a": [1, "\U0001f642"]}
    for text in ("NaN", "-Infinity", "1e400", '"\\udc00"', "[" * 100_000, "1" * 5000, "", "{"):
        with pytest.raises(ValueError, match=r".*"):
            load_json(text)
