"""Thinking and answers are separated, for every split of the text."""

from __future__ import annotations

import pytest

from moeinf.runtime.text.reasoning import (
    HarmonyParser,
    Parser,
    ThinkParser,
    marks_of,
    parser_for,
    thinks,
)


def parse(parser: Parser, pieces: list[str]) -> list[tuple[str, str]]:
    """Return (kind, text) pairs; a new pair starts where the kind changes."""
    found: list[tuple[str, str]] = []
    parts = [part for piece in pieces for part in parser.add(piece)]
    for kind, text in [*parts, *parser.rest()]:
        assert text
        if found and found[-1][0] == kind:
            found[-1] = kind, found[-1][1] + text
        else:
            found.append((kind, text))
    return found


HARMONY = (
    "<|channel|>analysis<|message|>Let me see: a<b<|end|><|start|>assistant<|channel|>commentary"
    " to=functions.f <|constrain|>json<|message|>{}<|call|><|start|>assistant<|channel|>final"
    "<|message|>It is <4.<|return|>"
)
CASES = [
    (lambda: ThinkParser(), "<think>\nhm <b>\n</think>\n\nYes.", ["hm <b>\n", "Yes."]),
    (lambda: ThinkParser(inside=True), "\nhm</think>\n\nYes.", ["hm", "Yes."]),
    (lambda: ThinkParser(inside=True), "never closed </thin", ["never closed </thin", None]),
    (lambda: ThinkParser(), "No thought <think> at all", [None, "No thought <think> at all"]),
    (lambda: ThinkParser(), "<think></think>\n\nA </think> b", [None, "A </think> b"]),
    (lambda: ThinkParser(), "", [None, None]),
    (lambda: ThinkParser(), "1 < 2 <t", [None, "1 < 2 <t"]),
    (HarmonyParser, HARMONY, ["Let me see: a<b{}", "It is <4."]),
    (HarmonyParser, "<|channel|>final<|message|>Hi", [None, "Hi"]),
    (HarmonyParser, "<|channel|>ana", [None, None]),
    (
        HarmonyParser,
        "<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look.<|end|>",
        ["x", "I look."],
    ),
    (HarmonyParser, " to=python<|channel|>commentary<|message|>x", ["x", None]),
]


@pytest.mark.parametrize(("make", "text", "expected"), CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
def test_at_any_cut(make, text, expected, size):
    found = parse(make(), [text[at : at + size] for at in range(0, len(text), size)])
    wanted = zip(("thinking", "answer"), expected, strict=True)
    assert found == [(kind, part) for kind, part in wanted if part is not None]


def test_nothing_is_held_back_longer_than_it_must() -> None:
    parser = ThinkParser()
    assert list(parser.add("<think>a <")) == [("thinking", "a ")]
    assert list(parser.add("b")) == [("thinking", "<b")]
    assert list(parser.add("</think>x<")) == [("answer", "x<")]


GLM = "{% if enable_thinking %}<think></think>{% endif %}"


@pytest.mark.parametrize("size", [1, 2, 1000])
@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        (
            "<|assistant|>",
            "\n<think>hm</think>\nYes.\n",
            [("thinking", "hm"), ("answer", "Yes.\n")],
        ),
        ("<|assistant|>\n<think></think>", "\nYes.", [("answer", "Yes.")]),
        ("<|assistant|>", "\n\nYes.", [("answer", "Yes.")]),
        ("<|assistant|>", "\n", []),
    ],
)
def test_line_ends_before_thinking_and_answer_are_neither(
    prompt: str, text: str, expected: list[tuple[str, str]], size: int
) -> None:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert parse(parser_for(GLM, prompt), pieces) == expected
    assert parse(parser_for("a model that does not think", prompt), ["\nYes"]) == [
        ("answer", "\nYes")
    ]


def test_marks_of_mistral() -> None:
    template = "[THINK]{{ thinking }}[/THINK]"
    assert thinks(template)
    assert marks_of(template) == ("[THINK]", "[/THINK]")
    thought = [("thinking", "a<b [THINK]"), ("answer", "c [/THINK]")]
    text = "a<b [THINK][/THINK]c [/THINK]"
    assert parse(parser_for(template, "[/INST]"), list("[THINK]" + text)) == thought
    assert parse(parser_for(template, "[/INST][THINK]"), list(text)) == thought


def test_which_parser() -> None:
    assert isinstance(parser_for("… <|channel|>final<|message|> …", ""), HarmonyParser)
    assert parse(parser_for("chatml", "assistant\n<think>\n"), ["a</think>b"])[0][0] == "thinking"
    assert parse(parser_for(None, "assistant\n"), ["a</think>b"]) == [("answer", "a</think>b")]
