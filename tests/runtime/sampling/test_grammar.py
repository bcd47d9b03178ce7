"""Grammars constrain an answer's form and leave thinking unconstrained."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.runtime.sampling.grammar import BadFormat, Constrain, call_of_one, json_of
from moeinf.runtime.sampling.grammar_processes import Grammars
from moeinf.runtime.text.offered_tools import Call
from moeinf.runtime.text.tokenizer import Tokenizer
from tests.runtime.text.test_tool_calls import TOOLS, hear
from tests.runtime.text.tool_call_texts import (
    GEMMA,
    GRANITE,
    HARMONY,
    MISTRAL,
    MISTRAL_NAMED,
    SOLAR,
    TAGS,
)

END = 4
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    found = Grammars(DEMO_CHECKPOINT / "tokenizer.json", END)
    yield found
    found.close()


@pytest.fixture
def engine(grammars: Grammars) -> Callable[[str], Any]:
    """Return the engine parts that a constraint uses, with the demo's real tokenizer."""

    def make(template: str) -> Any:
        tokenizer = Tokenizer(DEMO_CHECKPOINT)
        tokenizer.chat_template = template
        info = SimpleNamespace(ends=frozenset({END}))
        return SimpleNamespace(tokenizer=tokenizer, info=info, grammars=grammars)

    return make


def follow(constrain: Constrain | None, engine: Any, text: str, prompt: str = "x") -> str:
    """Return the allowed prefix of `text`, plus an end mark if the answer may end there."""
    assert constrain is not None
    tokenizer = engine.tokenizer
    logits = np.zeros(tokenizer.vocab_size, np.float32)
    said = ""
    ids = tokenizer._tokenizer.encode(text, add_special_tokens=False).ids
    with closing(constrain(engine, tokenizer.encode_text(prompt, plain=True))) as constraint:
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


@pytest.mark.parametrize(
    ("text", "said"),  # $: the answer may end there
    [
        ('{"a":1,"b":[1,{"c":null}]}', '{"a":1,"b":[1,{"c":null}]}$'),
        ('{"a": 1, "b": [1, {"c": null}]}', '{"a": 1, "b": [1, {"c": null}]}$'),
        ('{"a":  1', '{"a": '),
        ('{"a": 1,  "b', '{"a": 1, '),
        ('{\n  "a"', "{"),
        ('{ "a"', "{"),
        ('{"a": [ 1', '{"a": ['),
        ('{"a": 1 }', '{"a": 1'),
        (' {"a"', ""),
        ('{"a": 1}\n', '{"a": 1}'),
    ],
)
@pytest.mark.parametrize("greedy", [{}, {"x-guidance": {"whitespace_flexible": True}}])
def test_white_space_is_bounded(
    engine: Callable[[str], Any], greedy: dict[str, Any], text: str, said: str
) -> None:
    """At most one space follows a comma or a colon, whatever the schema allows."""
    assert follow(json_of({"type": "object", **greedy}), engine(""), text) == said
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object"} | greedy},
    }
    before = '<tool_call>\n{"name": "f", "arguments": '
    assert follow(call_of_one([tool]), engine(TAGS), before + text) == before + said.rstrip("$")


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_at_random_has_no_run_of_white_space(
    engine: Callable[[str], Any], seed: int
) -> None:
    """All allowed tokens are equally likely, except that spaces are preferred."""
    schema = {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"enum": [1]}},
            "additionalProperties": False,
        },
        "maxItems": 3,
    }
    random, plain = np.random.default_rng(seed), engine("")
    constrain = json_of(schema)
    assert constrain is not None
    tokenizer, ids = plain.tokenizer, list[int]()
    with closing(constrain(plain, [])) as constraint:
        while not ids or ids[-1] != END:
            logits = random.random(tokenizer.vocab_size, np.float32)
            for token in range(tokenizer.vocab_size):
                logits[token] += tokenizer.decode([token]).isspace()
            ids.append(int(constraint.mask(logits).argmax()))
            constraint.took(ids[-1])
            assert len(ids) < 5_000
    text = tokenizer.decode(ids[:-1])
    assert isinstance(json.loads(text), list)
    assert not re.search(r"\s\s|[^,:]\s", text)


def test_schemas_of_tools_are_bounded(engine: Callable[[str], Any]) -> None:
    def tool(number: int, parameters: dict[str, Any]) -> dict[str, Any]:
        return {"type": "function", "function": {"name": f"f{number}", "parameters": parameters}}

    with pytest.raises(BadFormat, match="required"):
        call_of_one([tool(0, {"required": [f"n{i}" for i in range(3000)]})])
    with pytest.raises(BadFormat, match="bytes"):
        call_of_one([tool(i, {"description": "x" * 200_000}) for i in range(3)])


def test_a_grammar_that_is_lost_is_told(engine: Callable[[str], Any]) -> None:
    """The matcher of llguidance would then allow only the end: half a document that looks whole."""
    plain = engine("")
    constrain = json_of(SCHEMA)
    assert constrain is not None
    with (
        closing(constrain(plain, [])) as constraint,
        pytest.raises(BadFormat, match="doesn't satisfy the grammar"),
    ):
        constraint.took(plain.tokenizer.encode_text("x", plain=True)[-1])


def test_thinking_is_free(engine: Callable[[str], Any]) -> None:
    thinker = engine("{% if x %}<think></think>")
    text = 'hm {"</think>{"a": 1}'
    assert follow(json_of(SCHEMA), thinker, text, prompt="<think>\n") == text + "$"
    assert follow(json_of(SCHEMA), thinker, "hm", prompt="<think>\n") == "hm"  # but no end
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


@pytest.mark.parametrize(
    ("template", "before", "after"),
    [
        (GEMMA, "<|tool_call>call:add", "<tool_call|>"),
        (MISTRAL_NAMED, "[TOOL_CALLS]add[ARGS]", ""),
        (
            SOLAR,
            "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>add<|tool_call:args|>",
            "<|tool_call:end|>",
        ),
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_calls_of_other_formats(
    engine: Callable[[str], Any], template: str, before: str, after: str, size: int
) -> None:
    """A forced call is parsed again as a call, also character by character."""
    constrain, call = call_of_one(TOOLS), before + '{"a": 1, "note": "x"}' + after
    assert follow(constrain, engine(template), call) == call + "$"
    assert follow(constrain, engine(template), before + '{"a": "1"') == before + '{"a": '
    assert hear(template, call, size) == [Call("add", {"a": 1, "note": "x"})]


def test_calls_that_cannot_be_forced(engine: Callable[[str], Any]) -> None:
    for template in ("", HARMONY, TAGS + "<function=", TAGS + "<arg_key>"):
        with pytest.raises(BadFormat, match="auto and none"):
            follow(call_of_one(TOOLS), engine(template), "")
