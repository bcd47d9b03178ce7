"""Grammars hold an answer to a form, and leave thinking alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moeinf.runtime.constrain import BadFormat, Constrain, call_of_one, json_of
from moeinf.runtime.library import DEMO_CHECKPOINT
from moeinf.runtime.tokenizer import Tokenizer
from tests.runtime.test_tools import GRANITE, HARMONY, MISTRAL, TAGS, TOOLS

END = 4
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture
def engine() -> Callable[[str], Any]:
    """What a constraint asks of an engine, with the demo's real tokenizer."""

    def make(template: str) -> Any:
        tokenizer = Tokenizer(DEMO_CHECKPOINT)
        tokenizer.chat_template = template
        manifest = SimpleNamespace(model="demo", created_at="now")
        return SimpleNamespace(
            tokenizer=tokenizer, ends=frozenset({END}), folder=DEMO_CHECKPOINT, manifest=manifest
        )

    return make


def follow(constrain: Constrain | None, engine: Any, text: str, prompt: str = "x") -> str:
    """The part of `text` that may be said; with an end mark when the answer may end there."""
    assert constrain is not None
    tokenizer = engine.tokenizer
    constraint = constrain(engine, tokenizer.encode_text(prompt, plain=True))
    logits = np.zeros(tokenizer.vocab_size, np.float32)
    said = ""
    ids = tokenizer._tokenizer.encode(text, add_special_tokens=False).ids
    for token in ids:
        if not np.isfinite(constraint.mask(logits)[token]):
            return said
        constraint.took(token)
        said += tokenizer.decode([token])
    return said + ("$" if np.isfinite(constraint.mask(logits)[END]) else "")


def test_json(engine: Callable[[str], Any]) -> None:
    plain = engine("")
    assert follow(json_of("json"), plain, '{"x": [1, null]}') == '{"x": [1, null]}$'
    assert follow(json_of("json"), plain, '{"x": [1') == '{"x": [1'
    assert follow(json_of("json"), plain, "Yes") == ""
    assert follow(json_of({}), plain, "[1]") == "[1]$"  # any value
    assert follow(json_of({}), plain, "Yes") == ""
    assert json_of("") is None
    assert follow(json_of(SCHEMA), plain, '{"a": 12}') == '{"a": 12}$'
    assert follow(json_of(SCHEMA), plain, '{"a": "12"}') == '{"a": '
    with pytest.raises(BadFormat, match="format"):
        follow(json_of({"type": "nonsense"}), plain, "")


def test_a_grammar_that_is_lost_is_told(engine: Callable[[str], Any]) -> None:
    """llguidance would allow only the end from there on: half a document, as if it were whole."""
    plain = engine("")
    constrain = json_of(SCHEMA)
    assert constrain is not None
    constraint = constrain(plain, [])
    with pytest.raises(BadFormat, match="doesn't satisfy the grammar"):
        constraint.took(plain.tokenizer.encode_text("x", plain=True)[-1])


def test_thinking_is_free(engine: Callable[[str], Any]) -> None:
    thinker = engine("{% if x %}<think></think>")
    text = 'hm {"</think>{"a": 1}'
    assert follow(json_of(SCHEMA), thinker, text, prompt="<think>\n") == text + "$"
    assert follow(json_of(SCHEMA), thinker, "hm", prompt="<think>\n") == "hm"  # and no end
    assert follow(json_of(SCHEMA), thinker, "hm", prompt="x</think>\n") == ""
    harmony = engine(HARMONY)
    text = "<|channel|>analysis<|message|>So<|start|>assistant<|channel|>final<|message|>"
    assert follow(json_of(SCHEMA), harmony, text + '{"a": 1}') == text + '{"a": 1}$'
    assert follow(json_of(SCHEMA), harmony, text + "Yes") == text


@pytest.mark.parametrize(
    ("template", "before", "after"),
    [
        (TAGS, "<tool_call>\n", "\n</tool_call>"),
        (GRANITE, "<|tool_call|>[", "]"),
        (MISTRAL, "[TOOL_CALLS][", "]"),
    ],
)
def test_calls(engine: Callable[[str], Any], template: str, before: str, after: str) -> None:
    constrain = call_of_one(TOOLS)
    call = before + json.dumps({"name": "add", "arguments": {"a": 1}}) + after
    assert follow(constrain, engine(template), call) == call + "$"
    wrong = before + '{"name": "'
    assert follow(constrain, engine(template), wrong + "rm") == wrong
    typed = before + '{"name": "add", "arguments": {"a": '
    assert follow(constrain, engine(template), typed + '"1"') == typed
    assert follow(constrain, engine(template), "No") == ""


def test_calls_that_cannot_be_forced(engine: Callable[[str], Any]) -> None:
    for template in ("", HARMONY, TAGS + "<function=", TAGS + "<arg_key>"):
        with pytest.raises(BadFormat, match="auto and none"):
            follow(call_of_one(TOOLS), engine(template), "")
