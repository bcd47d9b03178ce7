"""Request bodies from the fuzzer, through the whole application in this process.

An input is {"ENDPOINT": BODY}. A stub replaces the engine: it has the demo's template, tokenizer
and vocabulary, and always gives the same answer.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
from fastapi import FastAPI

from moeinf.offload.store.stats import StoreStats
from moeinf.runtime.config import EngineConfig, ServerSettings, Settings
from moeinf.runtime.generation.events import Ended, Failed, Piece, TokenInfo, Vector
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.runtime.names import parse_name
from moeinf.runtime.text.chat_template import TemplateWorker
from moeinf.runtime.text.tokenizer import Tokenizer
from moeinf.server.app import create_app
from moeinf.server.engines.jobs import Job
from moeinf.server.engines.model_manager import Loaded, ModelManager
from tests.server.scripted import CHATML

CONTEXT = 512  # tokens
_NAN, _INF = float("nan"), float("inf")
_SAYS = (
    "a",
    '<tool_call>{"name": "f", "arguments": {"a": [1, "b"]}}</tool_call>',
    "<think>b</think>\ud83d",
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}
_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_TURNS: tuple[dict[str, Any], ...] = (
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u", "name": "n"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL], "thinking": "t"},
    {"role": "tool", "content": "r", "tool_call_id": "1", "tool_name": "f"},
)
_PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
_OPTIONS = {"temperature": 0.5, "stop": ["x"], "num_predict": 3, "seed": 1, "num_ctx": 9}
_PLAIN = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
_NAMED = {"type": "function", "function": {"name": "f"}}
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
REQUESTS: dict[str, tuple[dict[str, Any], ...]] = {
    "/api/generate": (
        {"prompt": "a", "system": "s", "options": _OPTIONS, "keep_alive": "5m", "think": False},
        {"prompt": "a", "raw": True, "stream": False, "logprobs": True, "top_logprobs": 2},
        {"prompt": "", "images": [], "context": [], "suffix": "", "template": "", "format": "json"},
    ),
    "/api/chat": (
        {"messages": _TURNS, "tools": [_TOOL], "options": _OPTIONS, "think": "low"},
        {"messages": [*_TURNS, _PLAIN, _TURNS[3]], "stream": False, "format": {"type": "object"}},
    ),
    "/api/embed": ({"input": ["a", "b"], "truncate": True, "keep_alive": 3, "options": {}},),
    "/api/embeddings": ({"prompt": "a", "keep_alive": -1.5},),
    "/api/show": ({"name": "demo"},),
    "/api/copy": ({"source": "demo", "destination": "b"},),
    "/v1/chat/completions": (
        {
            "messages": [*_TURNS, {"role": "developer", "content": _PARTS}],
            "tools": [_TOOL],
            "tool_choice": "auto",
            "reasoning_effort": "low",
            "max_completion_tokens": 5,
            "metadata": {"a": "b"},
        },
        {
            "messages": [_TURNS[1]],
            "tools": [_TOOL],
            "tool_choice": _NAMED,
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "top_logprobs": 2,
            "stop": ["a"],
        },
        {"messages": [_TURNS[1]], "response_format": _SCHEMA, "temperature": 1, "n": 1, "seed": 3},
    ),
    "/v1/completions": (
        {"prompt": "a", "stream": True, "logprobs": 2, "top_p": 0.5, "stop": "x", "user": "u"},
        {"prompt": [1, 2, 3], "max_tokens": 2, "presence_penalty": 1, "logit_bias": {}},
        {"prompt": ["a"], "echo": False, "best_of": 1, "suffix": ""},
    ),
    "/v1/embeddings": (
        {"input": [[1, 2], [3]], "encoding_format": "base64", "user": "u"},
        {"input": ["a"], "encoding_format": "float"},
        {"input": [1, 2]},
    ),
}
REQUESTS |= {
    "/v1/messages": (
        {"max_tokens": 3, "system": "s", "messages": [_TURNS[1], _TURNS[1]]},
        {"max_tokens": 3, "messages": [{"role": "user", "content": _PARTS}]},
    ),
    "/v1/messages/count_tokens": ({"messages": [_TURNS[1]] * 3, "system": _PARTS},),
    "/v1/responses": (
        {"input": [_TURNS[1], _TURNS[1], {"type": "reasoning", "summary": []}], "store": False},
        {"input": "a", "instructions": "b", "previous_response_id": "resp_1"},
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
    ),
    "/v1/responses/input_tokens": ({"input": [_TURNS[1]] * 3},),
}


class RequestRefused(Exception):
    """An answer with a status of 400 to 499, or 503."""


class _Worker:
    """Answers at once, with the worst possible token figures."""

    failure, idle, last_used, running, waiting = None, True, 0.0, 0, 0

    def __init__(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="moeinf-fuzz-"))
        shutil.copytree(DEMO_CHECKPOINT, folder / "demo")
        (folder / "demo/chat_template.jinja").write_text(CHATML)
        tokenizer, template = Tokenizer(folder / "demo"), TemplateWorker(CHATML)
        atexit.register(template.close)
        shutil.rmtree(folder)
        self.engine: Any = SimpleNamespace(
            tokenizer=tokenizer,
            template=template,
            info=SimpleNamespace(
                defaults=None,
                name="demo:bf16",
                context=CONTEXT,
                vocab_size=300,
                reads_sources=False,
            ),
            store=SimpleNamespace(stats=StoreStats()),
        )

    def submit(self, job: Job) -> None:
        try:
            ids = job.prepare(self.engine)
        except Exception as error:
            job.emit(Failed(error))
            return
        if job.embed:
            job.emit(Vector(np.array([1, _NAN, _INF], np.float32)))
        for text in () if job.embed else _SAYS:
            figures = TokenInfo(3, _NAN, [(4, -_INF), (5, _NAN)][: job.logprobs or 0])
            job.emit(Piece(text, None if job.logprobs is None else figures))
        job.emit(Ended("stop", len(ids), 0, (3, 3, 3), 0.0, 0.0, _INF if job.embed else 0.1))


class _Host(ModelManager):
    async def model(
        self, name: str, keep_alive_s: float | None = None, context: int | None = None
    ) -> Loaded:
        parse_name(name)
        manifest: Any = SimpleNamespace(model=name, hidden_width=3)
        worker: Any = _worker()
        return Loaded(manifest, worker, keep_alive_s or 0)


@cache
def _application() -> FastAPI:
    settings, server = Settings(Path(tempfile.mkdtemp(prefix="moeinf-fuzz-"))), ServerSettings()
    app = create_app(settings, server, EngineConfig())
    app.state.host = _Host(settings, server, EngineConfig())
    return app


@cache
def _worker() -> _Worker:
    return _Worker()


def _request(data: bytes, _: Path) -> None:
    """Answer one request.

    Raises RequestRefused, or AssertionError for a bug of moeinf or a NaN.
    """
    where, _, body = data.partition(b": ")
    known = [path for path in REQUESTS if f'"{path}"'.encode() in where]
    status, answer = asyncio.run(answer_to(known[0] if known else "/api/chat", body[:-1]))
    for line in answer.decode().splitlines():
        text = line.removeprefix("data: ")
        if text and text != "[DONE]":
            json.loads(text, parse_constant=_no_number)
    assert status < 500 or status == 503, answer[:300]
    assert b"this is a bug" not in answer, answer[:300]
    if status >= 400:
        raise RequestRefused(answer.decode())


async def answer_to(path: str, body: bytes) -> tuple[int, bytes]:
    app = _application()
    sent, gone, said = [body], asyncio.Event(), list[Any]()

    async def receive() -> Any:
        if not sent:
            await gone.wait()
        return {"type": "http.request", "body": sent.pop(), "more_body": False}

    async def send(message: Any) -> None:
        said.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 1),
        "state": {},
    }
    await app(scope, receive, send)
    return said[0]["status"], b"".join(message.get("body", b"") for message in said)


def _no_number(name: str) -> NoReturn:
    raise AssertionError(f"{name} in an answer")


def _seeds() -> list[bytes]:
    return [
        json.dumps({path: {"model": "demo", **body}}).encode()
        for path, bodies in REQUESTS.items()
        for body in bodies
    ]


TARGET = _request, (RequestRefused,), _seeds
