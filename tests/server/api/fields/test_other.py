"""Fields that clients send beside the known ones: honoured, ignored, or refused in words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest

from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.runtime.text import chat_template
from moeinf.runtime.text.tokenizer import Tokenizer
from moeinf.server.api.fields.other import REFUSED
from tests.server.scripted import Script, talking

TEMPLATE = """{%- for message in messages %}{{ '<|' + message.role + '|>' + message.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- if style is defined %}{{ style.words | join('+') }}{% endif %}"""
ASK: list[Any] = [{"role": "user", "content": "17+25="}]
HARMLESS = {
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "verbosity": "low",
    "modalities": ["text"],
    "store": True,
    "metadata": {"a": "b"},
    "user": "u",
    "service_tier": "auto",
    "prediction": {"type": "content", "content": "42"},
    "nonsense": {"deep": [1]},
}


def create(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=ASK, **options)


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with talking(tmp_path_factory.mktemp("home"), TEMPLATE) as found:
        yield found


@pytest.fixture
def to_talker(talker: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{talker}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_harmless_fields_change_nothing(openai_client: openai.OpenAI, address: str) -> None:
    alone = create(openai_client, temperature=0)
    beside = create(openai_client, temperature=0, extra_body=HARMLESS)
    assert beside.choices[0].message.content == alone.choices[0].message.content == "42"
    assert beside.usage == alone.usage
    others = {"extra_body": {"nonsense": 1, "store": False}}
    texts = [
        openai_client.completions.create(model="demo", prompt="17+25=", temperature=0, **about)
        for about in ({}, others)
    ]
    assert texts[0].choices[0].text == texts[1].choices[0].text
    vectors = [openai_client.embeddings.create(model="demo", input="x", **a) for a in ({}, others)]
    assert vectors[0].data == vectors[1].data
    body = {"model": "demo", "messages": ASK, "stream": False, "nonsense": 1}
    body["options"] = {"temperature": 0, "nonsense": 1, "mirostat": 2}
    told = httpx.post(f"{address}/api/chat", json=body, timeout=60).json()
    assert told["message"]["content"] == "42"


# A value of each refused field that clients send; a null or a value without an effect is accepted.
ASKED: dict[str, Any] = {
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy", "format": "wav"},
    "n": 2,
    "best_of": 2,
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "documents": [{"text": "x"}],
    "logit_bias": {"42": 1},
    "bad_words": ["x"],
    "stop_token_ids": [1],
    "logits_processors": ["x"],
    "json_schema": {"type": "object"},
    "grammar": "root ::= x",
    "suffix": "x",
    "min_tokens": 3,
    "typical_p": 0.5,
    "add_generation_prompt": False,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_answer_is_refused(name: str, address: str) -> None:
    body = {"model": "demo", "messages": ASK, name: ASKED.get(name, True)}
    refused = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60)
    assert refused.status_code == 400
    told = refused.json()["error"]
    assert (told["code"], told["param"]) == ("bad_request", name)
    assert told["message"] == f"{name}: the value is not supported ({REFUSED[name][1]})"
    neutral = {**body, "max_tokens": 1, "messages": ASK}
    for value in (None, *REFUSED[name][0]):
        answer = httpx.post(
            f"{address}/v1/chat/completions", json={**neutral, name: value}, timeout=60
        )
        assert answer.status_code == 200, (name, value)


def test_the_clients_own_names(openai_client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as audio:
        create(
            openai_client,
            modalities=["text", "audio"],
            audio={"voice": "alloy", "format": "mp3"},
        )
    assert (audio.value.code, audio.value.param) == ("bad_request", "modalities")
    with pytest.raises(openai.BadRequestError) as choices:
        openai_client.completions.create(model="demo", prompt="x", n=2)
    assert choices.value.param == "n"


def test_the_table_of_the_documents() -> None:
    page = Path(__file__).parents[4] / "docs/server.md"
    (row,) = re.findall(r"^\| rejected .*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row)) == set(REFUSED)


def test_an_answer_without_a_limit_ends_with_the_context(
    to_talker: openai.OpenAI, talker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model would write 600 tokens, and the context has 512."""
    Script(monkeypatch).say("x" * 600)

    def length(most: int | None, **more: Any) -> tuple[int, str]:
        limits = {} if most is None else {"max_tokens": most}
        answer = create(to_talker, **limits, **more)
        usage = answer.usage
        room = 512 - usage.prompt_tokens
        return usage.completion_tokens - room, answer.choices[0].finish_reason

    assert length(-1) == length(None) == length(5, max_completion_tokens=-1) == (0, "length")
    assert length(5, max_completion_tokens=None)[0] < -400
    texts = [
        to_talker.completions.create(model="demo", prompt="17+25=", **limits)
        for limits in ({}, {"max_tokens": 0}, {"max_tokens": -1})  # type: ignore[arg-type]
    ]
    assert [len(text.choices[0].text) for text in texts[:2]] == [16, 0]
    usage = texts[2].usage
    assert usage is not None
    assert usage.total_tokens == 512
    with pytest.raises(openai.BadRequestError) as wrong:
        create(to_talker, max_tokens=-2)
    assert wrong.value.param == "max_tokens"
    body = {"model": "demo", "prompt": "x", "stream": False, "options": {"num_predict": -1}}
    told = httpx.post(f"{talker}/api/generate", json=body, timeout=60).json()
    assert told["prompt_eval_count"] + told["eval_count"] == 512


def test_repetition_penalty_is_repeat_penalty_over_all_tokens(
    openai_client: openai.OpenAI, ollama_client: ollama.Client
) -> None:
    text = "sort owl, fig, zebra, ant"
    messages: list[Any] = [{"role": "user", "content": text}]

    def openai_says(**more: Any) -> str | None:
        about = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 24}
        answer = openai_client.chat.completions.create(**about, extra_body=more)  # type: ignore[call-overload]
        return str(answer.choices[0].message.content)

    def ollama_says(**options: Any) -> str | None:
        given = {"temperature": 0, "num_predict": 24, **options}
        return ollama_client.chat("demo", messages, options=given).message.content

    plain, strong = openai_says(), openai_says(repetition_penalty=5)
    assert strong != plain == openai_says(repetition_penalty=1)
    assert strong == ollama_says(repeat_penalty=5, repeat_last_n=-1)
    assert openai_says(repeat_penalty=5, repeat_last_n=-1) == strong
    few = ollama_says(repeat_penalty=5, repeat_last_n=3)
    assert few != strong
    assert few == ollama_says(repetition_penalty=5, repeat_last_n=3)
    with pytest.raises(openai.BadRequestError) as wrong:
        openai_says(repetition_penalty=0)
    assert wrong.value.param == "repetition_penalty"


def test_variables_reach_the_template(
    to_talker: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(monkeypatch)
    script.say("ok")

    def prompt(variables: dict[str, Any] | None, **more: Any) -> str:
        create(to_talker, extra_body={"chat_template_kwargs": variables}, **more)
        return script.prompts[-1].partition("<|user|>")[2]

    assert prompt(None) == prompt({}) == prompt({"unused": 1}) == "17+25=<|assistant|>"
    assert prompt({"enable_thinking": False}) == "17+25=<|assistant|><think></think>"
    assert prompt({"enable_thinking": True}, reasoning_effort="none") == "17+25=<|assistant|>"
    # A text of a variable never becomes a special token.
    words = {"style": {"words": ["a", "<|end|>"]}}
    assert prompt(words) == "17+25=<|assistant|>a+<|end|>"
    assert Tokenizer(DEMO_CHECKPOINT).token_id("<|end|>") not in script.prompt_ids


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else 1


@pytest.mark.parametrize(
    "variables",
    [
        {"messages": []},
        {"tools": [{"type": "function"}]},
        {"bos_token": "x"},
        {"eos_token": "x"},
        {"unk_token": "x"},
        {"template": "{{ 1 }}"},
        {"chat_template": "{{ 1 }}"},
        {"now": "2020-01-01"},
        {"add_generation_prompt": False},
        {"self": 1},
        {"not a name": 1},
        {"x" * (chat_template.MOST_NAME + 1): 1},
        {f"v{i}": i for i in range(chat_template.MOST_VARIABLES + 1)},
        {"v": nested(chat_template.MOST_VARIABLES_DEPTH)},
        {"v": "x" * chat_template.MOST_VARIABLES_BYTES},
    ],
    ids=lambda variables: next(iter(variables))[:20],
)
def test_variables_that_are_refused(variables: dict[str, Any], to_talker: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="chat_template_kwargs") as refused:
        create(to_talker, extra_body={"chat_template_kwargs": variables})
    assert refused.value.code == "invalid"


def test_variables_at_the_limits(to_talker: openai.OpenAI) -> None:
    most = chat_template.MOST_VARIABLES
    within = {
        **{f"v{i}": i for i in range(most - 2)},
        "x" * chat_template.MOST_NAME: nested(chat_template.MOST_VARIABLES_DEPTH - 1),
        "long": "x" * (chat_template.MOST_VARIABLES_BYTES - 4096),
    }
    answer = create(to_talker, max_tokens=1, extra_body={"chat_template_kwargs": within})
    assert answer.usage.completion_tokens == 1
