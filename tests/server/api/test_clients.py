"""The official `openai` and `ollama` packages as clients: answers, streams, errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import ollama
import openai
import pytest
from jsonschema import Draft202012Validator

from moeinf.runtime.generation.chat import Conversation
from moeinf.runtime.requests import Limits
from moeinf.runtime.sampling.sampler import SamplingOptions

PROMPTS = [
    "17+25=", "sort owl, fig, zebra, ant", "reverse planet", "hi", "40917 in words", "upper fig",
    "json a=1 b=2", "spell tree",
]  # fmt: skip


@pytest.fixture
def alone(open_engine: Callable[..., object]) -> Callable[[str], str]:
    """Return the engine's greedy answer without a server."""
    engine = open_engine()

    def ask(text: str) -> str:
        conversation = Conversation(engine)  # type: ignore[arg-type]
        return "".join(conversation.ask(text, SamplingOptions(temperature=0), Limits(64)))

    return ask


def test_openai_chat(openai_client: openai.OpenAI, alone: Callable[[str], str]) -> None:
    messages = [{"role": "user", "content": "sort owl, fig, zebra, ant"}]
    whole = openai_client.chat.completions.create(model="demo", messages=messages, temperature=0)  # type: ignore[arg-type]
    assert whole.choices[0].message.content == alone("sort owl, fig, zebra, ant")
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 21
    pieces = list(
        openai_client.chat.completions.create(
            model="demo",
            messages=messages,  # type: ignore[arg-type]
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in pieces if c.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].usage == whole.usage
    assert pieces[-2].choices[0].finish_reason == "stop"
    assert len({piece.id for piece in pieces}) == 1


def test_openai_logprobs_stop_seed_and_length(openai_client: openai.OpenAI) -> None:
    def ask(text: str = "17+25=", **options: object) -> openai.types.chat.ChatCompletion:
        messages = [{"role": "user", "content": text}]
        return openai_client.chat.completions.create(model="demo", messages=messages, **options)  # type: ignore[call-overload,no-any-return]

    found = ask(temperature=0, logprobs=True, top_logprobs=3).choices[0]
    assert found.logprobs is not None
    tokens = found.logprobs.content
    assert tokens is not None
    assert [token.token for token in tokens[:2]] == ["4", "2"]
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 3 for token in tokens)
    assert tokens[0].top_logprobs[0].token == "4"
    assert ask(temperature=0, stop=["2"]).choices[0].message.content == "4"
    short = ask(temperature=0, max_completion_tokens=1).choices[0]
    assert (short.message.content, short.finish_reason) == ("4", "length")
    flat = {"temperature": 2, "top_p": 1, "max_tokens": 24, "extra_body": {"top_k": 0}}
    wild = [
        ask("sort qq wv qqw wvq qv", seed=seed, **flat).choices[0].message.content
        for seed in (7, 7, 8, 9, 10)
    ]
    assert wild[0] == wild[1]
    assert len(set(wild)) > 1


def test_openai_completions_and_models(openai_client: openai.OpenAI) -> None:
    whole = openai_client.completions.create(model="demo", prompt="17+25=", max_tokens=5, seed=1)
    assert whole.object == "text_completion"
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 5
    assert {m.id for m in openai_client.models.list()} == {"demo:bf16", "demo:f32"}
    assert openai_client.models.retrieve("demo:f32").owned_by == "moeinf"


def test_openai_legacy_logprobs(openai_client: openai.OpenAI) -> None:
    """Whole or in chunks: tokens join to the text, and each is where its offset says."""
    about = {"model": "demo", "prompt": "17+25=", "max_tokens": 8, "logprobs": 4, "seed": 3}
    wild = {"temperature": 2, "extra_body": {"top_k": 0}}
    whole = openai_client.completions.create(**about, **wild).choices[0]  # type: ignore[call-overload]
    pieces = list(openai_client.completions.create(**about, **wild, stream=True))  # type: ignore[call-overload]
    found = whole.logprobs
    assert len(found.tokens) == 8 or whole.finish_reason == "stop"
    for text, offset in zip(found.tokens, found.text_offset, strict=True):
        assert "\ufffd" in text or whole.text[offset:].startswith(text)
    for best in found.top_logprobs:
        assert list(best.values()) == sorted(best.values(), reverse=True)
    chunks = [piece.choices[0].logprobs for piece in pieces if piece.choices[0].logprobs]
    assert [offset for chunk in chunks for offset in chunk.text_offset] == found.text_offset


def test_openai_errors(openai_client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(openai.NotFoundError, match="no model 'nothing'"):
        openai_client.chat.completions.create(model="nothing", messages=messages)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError) as wrong:
        openai_client.chat.completions.create(
            model="demo",
            messages=messages,  # type: ignore[arg-type]
            temperature=3,
        )
    assert (wrong.value.code, wrong.value.param) == ("bad_request", "temperature")
    with pytest.raises(openai.BadRequestError, match="the context"):
        openai_client.completions.create(model="demo", prompt="x" * 4000)
    with pytest.raises(openai.NotFoundError):
        openai_client.models.retrieve("nothing")


def test_a_schema_is_obeyed(openai_client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    obeyed = 0
    for seed in range(8):
        answer = openai_client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "json a=1 b=x"}],
            temperature=1.5,
            seed=seed,
            max_tokens=100,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "ab", "schema": schema},
            },
        )
        if answer.choices[0].finish_reason == "stop":
            obeyed += 1
            Draft202012Validator(schema).validate(
                json.loads(answer.choices[0].message.content or "")
            )
    assert obeyed > 0


def test_ollama(ollama_client: ollama.Client, alone: Callable[[str], str]) -> None:
    options = {"temperature": 0, "num_ctx": 512}
    found = ollama_client.chat("demo", [{"role": "user", "content": "17+25="}], options=options)
    assert found.message.content == alone("17+25=") == "42"
    assert (found.done, found.done_reason, found.eval_count) == (True, "stop", 3)
    assert found.total_duration is not None
    assert found.total_duration >= (found.eval_duration or 0) > 0
    stream = list(ollama_client.generate("demo", "reverse planet", stream=True, options=options))
    assert "".join(piece.response for piece in stream) == alone("reverse planet")
    assert [piece.done for piece in stream] == [False] * (len(stream) - 1) + [True]
    assert {m.model for m in ollama_client.list().models} == {"demo:bf16", "demo:f32"}
    running = ollama_client.ps().models
    assert [m.model for m in running] == ["demo:bf16"]
    about = ollama_client.show("demo")
    assert about.modelinfo is not None
    sizes = [about.modelinfo[f"moeinf.{name}_bytes"] for name in ("experts", "least_memory")]
    assert sizes == [6 * 32 * 49152, 2 * 4 * 49152]  # the least: experts of two layers
    assert about.license is None  # no repository
    with pytest.raises(ollama.ResponseError, match="temperature: hot is invalid"):
        ollama_client.generate("demo", "x", options={"temperature": "hot"})
    with pytest.raises(ollama.ResponseError) as caught:
        ollama_client.generate("nothing", "x")
    assert caught.value.status_code == 404


def test_ollama_logprobs(ollama_client: ollama.Client) -> None:
    about = {"model": "demo", "options": {"temperature": 0}, "logprobs": True, "top_logprobs": 2}
    messages = [{"role": "user", "content": "17+25="}]
    found = ollama_client.chat(messages=messages, **about).logprobs  # type: ignore[call-overload]
    assert [token.token for token in found] == ["4", "2", ""]
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in found)
    assert found[0].top_logprobs[0].logprob == found[0].logprob
    lines = list(ollama_client.generate(prompt="17+25=", stream=True, **about))  # type: ignore[call-overload]
    assert [token.token for line in lines for token in line.logprobs or ()] == ["4", "2", ""]
    plain = ollama_client.chat("demo", messages, options={"temperature": 0})
    assert plain.logprobs is None


def test_what_ollama_knows_and_we_cannot_is_refused(ollama_client: ollama.Client) -> None:
    image = {"role": "user", "content": "What is it?", "images": ["aGVsbG8="]}
    with pytest.raises(ollama.ResponseError, match="text only"):
        ollama_client.chat("demo", [image])
    with pytest.raises(ollama.ResponseError, match="context"):
        ollama_client.generate("demo", "x", context=[1, 2])


def test_null_is_not_said(address: str) -> None:
    names = (*ollama.Options.model_fields, "num_gqa", "rope_frequency_base", "rope_frequency_scale")
    options = {**dict.fromkeys(names), "num_predict": 4}
    common = {"model": "demo", "stream": False, "keep_alive": None, "template": None}
    message = {"role": "user", "content": "17+25=", "images": None, "tool_calls": None}
    nulls = dict.fromkeys(("system", "raw", "context", "format", "think", "tools", "logprobs"))
    bodies = {
        "/api/generate": {**common, **nulls, "prompt": "17+25=", "options": options},
        "/api/chat": {**common, **nulls, "messages": [message], "options": None},
        "/api/embed": {"model": "demo", "input": "x", "truncate": None, "options": None},
        "/v1/chat/completions": {
            "model": "demo",
            "messages": [message, {"role": "assistant", "content": None}, message],
            **dict.fromkeys(("stream", "n", "tools", "response_format", "modalities", "audio")),
            "stream_options": {"include_usage": None},
        },
        "/v1/completions": {"model": "demo", "prompt": "x", "echo": None, "best_of": None},
    }
    for path, body in bodies.items():
        answer = httpx.post(f"{address}{path}", json=body, timeout=60)
        assert answer.status_code == 200, (path, answer.text)
    numbers = {name: 1 for name in ollama.Options.model_fields if name != "stop"} | {"num_ctx": 64}
    known = {**bodies["/api/generate"], "options": {**numbers, "stop": ["x"]}}
    assert httpx.post(f"{address}/api/generate", json=known, timeout=60).status_code == 200


def test_answers_together_are_answers_alone(
    ollama_client: ollama.Client, alone: Callable[[str], str]
) -> None:
    """Sixteen requests, four at a time in a batch: each gets what it would get alone."""

    def ask(text: str) -> str:
        options = {"temperature": 0, "num_predict": 64}
        messages = [{"role": "user", "content": text}]
        return ollama_client.chat("demo", messages, options=options).message.content or ""

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, PROMPTS * 2))
    assert answers == [alone(text) for text in PROMPTS] * 2


@pytest.mark.parametrize("model", ["demo", "demo:latest", "Demo:BF16"])
def test_spellings_of_a_model(
    model: str, openai_client: openai.OpenAI, ollama_client: ollama.Client
) -> None:
    message = {"role": "user", "content": "17+25="}
    chat = openai_client.chat.completions.create(model=model, messages=[message])  # type: ignore[list-item]
    assert chat.choices[0].message.content == "42"
    assert ollama_client.generate(model, "17+25=").response == "42"
