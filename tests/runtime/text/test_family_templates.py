"""Our templates of DeepSeek-V3.2 and V4 write prompts as the published encoders do.

tests/data/README.md says how the expected texts were made.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moeinf.runtime.generation.prompts import chat_prompt
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.runtime.text.answer_parser import AnswerParser
from moeinf.runtime.text.chat_template import TemplateError, TemplateWorker, family_template
from moeinf.runtime.text.offered_tools import Call
from moeinf.runtime.text.reasoning import thinks
from moeinf.runtime.text.tokenizer import Tokenizer, chat_template
from moeinf.runtime.text.tool_calls import knows_tools

DATA = json.loads(
    (Path(__file__).parents[2] / "data/deepseek_prompts.json").read_text(encoding="utf-8")
)
FAMILIES = ("deepseek_v32", "deepseek_v4")
MARKS = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}
ASK = {"role": "user", "content": "a"}
SYSTEM = {"role": "system", "content": "Be kind."}


@pytest.fixture(scope="module")
def workers() -> Iterator[dict[str, TemplateWorker]]:
    found = {family: TemplateWorker(family_template(family) or "") for family in FAMILIES}
    yield found
    for worker in found.values():
        worker.close()


def render(worker: TemplateWorker, messages: list[Any], **variables: Any) -> str:
    return worker.render(messages, add_generation_prompt=True, **MARKS, **variables)


@pytest.mark.parametrize(
    "case", DATA["prompts"], ids=lambda case: f"{case['family']}-{case['chat']}"
)
def test_the_text_of_the_published_encoder(
    case: dict[str, Any], workers: dict[str, TemplateWorker]
) -> None:
    family = case["family"]
    tools = {"tools": DATA["tools"]} if case["tools"] else {}
    text = render(workers[family], DATA["chats"][case["chat"]], **tools, **case["variables"])
    assert text == case["text"].replace("{tools}", DATA["tools_text"][family])


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("case", DATA["answers"])
def test_the_answers_of_the_published_parser(case: dict[str, Any], size: int) -> None:
    opened = "<think>" if case["thinking"] else "</think>"
    parser = AnswerParser(
        family_template(case["family"]), f"<｜Assistant｜>{opened}", DATA["tools"]
    )
    text = case["text"]
    parts = [p for at in range(0, len(text), size) for p in parser.add(text[at : at + size])]
    parts += parser.rest()
    said = {"thinking": "", "answer": ""}
    for part in parts:
        if not isinstance(part, Call):
            said[part[0]] += part[1]
    assert said == {"thinking": case["reasoning"], "answer": case["content"]}
    calls = [[part.name, part.arguments] for part in parts if isinstance(part, Call)]
    assert calls == case["calls"]


@pytest.mark.parametrize(("family", "opened"), [("deepseek_v32", "</"), ("deepseek_v4", "<")])
def test_what_a_request_without_a_choice_gets(
    family: str, opened: str, workers: dict[str, TemplateWorker]
) -> None:
    worker = workers[family]
    assert render(worker, [ASK]).endswith(f"<｜User｜>a<｜Assistant｜>{opened}think>")
    for thinking, mark in ((True, "<think>"), (False, "</think>")):
        assert render(worker, [ASK], enable_thinking=thinking).endswith(mark)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("messages", [[SYSTEM], [ASK, {"role": "assistant", "content": "b"}], []])
def test_an_answer_begins_after_any_message(
    family: str, messages: list[Any], workers: dict[str, TemplateWorker]
) -> None:
    text = render(workers[family], messages, thinking=False)
    assert text.endswith("<｜Assistant｜></think>")
    assert text.count("<｜Assistant｜>") == 1 + (len(messages) == 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_that_the_encoder_refuses(family: str, workers: dict[str, TemplateWorker]) -> None:
    """Arguments that are not JSON, one result for two calls, and a tool without `type`."""
    calls = [{"id": n, "function": {"name": "now", "arguments": "{a"}} for n in "xy"]
    messages = [
        ASK,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "x", "content": "1"},
    ]
    text = render(workers[family], messages, tools=[{"name": "now"}], thinking=False)
    assert text.count('<｜DSML｜parameter name="arguments" string="true">{a</') == 2
    assert '{"name": "now"}\n' in text
    results = {
        "deepseek_v32": "\n\n<function_results>\n<result>1</result>\n</function_results>\n\n",
        "deepseek_v4": "<｜User｜><tool_result>1</tool_result><｜Assistant｜>",
    }
    assert text.endswith(f"{MARKS['eos_token']}{results[family]}</think>")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_system_message_behind_a_question(
    family: str, workers: dict[str, TemplateWorker]
) -> None:
    """The encoder would write it into the answer; it becomes part of the question instead."""
    messages = [ASK, SYSTEM]
    with pytest.raises(TemplateError):
        render(workers[family], messages)
    tokenizer = Tokenizer(DEMO_CHECKPOINT, family_template(family))
    engine: Any = SimpleNamespace(
        tokenizer=tokenizer,
        template=workers[family],
        info=SimpleNamespace(context=1000, reads_sources=False, defaults=None),
    )
    text = tokenizer.decode(chat_prompt(engine, messages, think=False))
    assert text.endswith("<｜User｜>a\n\nBe kind.<｜Assistant｜></think>")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a checkpoint of DeepSeek-V3.2 as far as its text goes, without a chat template."""
    shutil.copy(DEMO_CHECKPOINT / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v32"}))
    return tmp_path


def test_a_model_without_a_template_has_its_familys(folder: Path) -> None:
    template = Tokenizer(folder).chat_template
    assert template == family_template("deepseek_v32")
    assert "function_calls>" in (template or "")
    for text in (template, family_template("deepseek_v4")):
        assert knows_tools(text)
        assert thinks(text)


def test_a_template_of_the_model_comes_first(folder: Path) -> None:
    about = folder / "tokenizer_config.json"
    about.write_text(json.dumps({"chat_template": "{{ config }}"}))
    assert chat_template(folder) == "{{ config }}"
    (folder / "chat_template.jinja").write_text("{{ file }}")
    assert chat_template(folder) == "{{ file }}"


@pytest.mark.parametrize("family", ["deepseek_v3", "../text/family_templates/deepseek_v4", ["x"]])
def test_other_families_have_none(folder: Path, family: object) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    assert chat_template(folder) is None
