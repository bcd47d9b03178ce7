"""A model that likes white space best cannot fill an answer in JSON with it, in either API."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import ollama
import openai
import pytest
from numpy.typing import NDArray
from pydantic import BaseModel

from moeinf.cli.chat.local import LocalPartner, Opener
from moeinf.runtime.config import EngineConfig, read_environment
from moeinf.runtime.generation import scheduler
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.runtime.requests import Limits, SamplingOptions
from moeinf.runtime.text.tokenizer import Tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}, "list": {"type": "array", "items": {"enum": [3]}}},
    "required": ["n", "list"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
ASK: list[Any] = [{"role": "user", "content": "json"}]
RUN = re.compile(r"\s\s|[^,:]\s")


class Spacious:
    """Choose white space wherever it is allowed, else a token with a bracket or quotation mark."""

    def __init__(self, *_: object) -> None:
        tokenizer = Tokenizer(DEMO_CHECKPOINT)
        texts = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
        self._likes = np.array([2.0 * t.isspace() + (t in list('"}]')) for t in texts])

    def choose(self, logits: NDArray[np.float32], history: list[int]) -> int:
        allowed = np.isfinite(logits)
        return int(np.where(allowed, self._likes[: len(logits)], -1.0).argmax())


@pytest.fixture(autouse=True)
def spacious(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "Sampler", Spacious)


@pytest.fixture
def client(chatml: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{chatml}/v1", api_key="any", max_retries=0) as found:
        yield found


def check(text: str | None) -> None:
    """Check that a text is a value of the schema without a run of white space."""
    assert text is not None
    assert set(json.loads(text)) == {"n", "list"}
    assert not RUN.search(text)


def test_without_a_grammar_it_writes_white_space_only(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model="demo", messages=ASK, max_tokens=9)
    assert plain.choices[0].message.content == plain.choices[0].message.content[:1] * 9  # type: ignore[index]
    assert plain.choices[0].message.content[0].isspace()  # type: ignore[index]


def test_schemas_and_forced_calls(client: openai.OpenAI, chatml: str) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    answer = client.chat.completions.create(model="demo", messages=ASK, response_format=form)
    assert answer.choices[0].finish_reason == "stop"
    check(answer.choices[0].message.content)
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        called = client.chat.completions.create(
            model="demo",
            messages=ASK,
            tools=[TOOL],
            tool_choice=choice,  # type: ignore[arg-type]
        ).choices[0]
        assert called.finish_reason == "tool_calls"
        (call,) = called.message.tool_calls or ()
        assert set(json.loads(call.function.arguments)) == {"n", "list"}  # type: ignore[union-attr]
    for path in ("/api/chat", "/api/generate"):
        body = {"model": "demo", "messages": ASK, "prompt": "x", "stream": False, "format": SCHEMA}
        told = httpx.post(chatml + path, json=body, timeout=60).json()
        assert told["done_reason"] == "stop"
        check(told["message"]["content"] if "message" in told else told["response"])


def test_the_command_line(open_engine: Any) -> None:
    engine = open_engine()
    opener = Opener(EngineConfig(), read_environment())
    partner = LocalPartner(engine, opener)
    partner.form = SCHEMA
    pieces = partner.say("json", SamplingOptions(), Limits(), lambda: False)
    check("".join(text for _, text in pieces))
    assert partner.finish_reason == "stop"


class Answer(BaseModel):
    n: int
    list: list[int]


def test_an_answer_cut_off_within_a_schema_is_told(client: openai.OpenAI, chatml: str) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model="demo", messages=ASK, response_format=Answer, max_tokens=3
        )
    forced = client.chat.completions.create(
        model="demo", messages=ASK, tools=[TOOL], tool_choice="required", max_tokens=30
    ).choices[0]
    assert (forced.finish_reason, forced.message.tool_calls) == ("length", None)
    local = ollama.Client(chatml)
    cut = local.chat("demo", ASK, format=SCHEMA, options={"num_predict": 3})
    assert (cut.done_reason, cut.eval_count) == ("length", 3)
    local._client.close()
