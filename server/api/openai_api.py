"""OpenAI's endpoints: chat completions, completions, models. SSE streams end with [DONE]."""

from __future__ import annotations

import datetime
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field

from moeinf.errors import ContextExceeded, MoeinfError
from moeinf.runtime.config import Settings
from moeinf.runtime.generation.events import Ended, Failed, Reading, TokenInfo
from moeinf.runtime.generation.prompts import text_prompt
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.requests import Limits
from moeinf.runtime.sampling.grammar import call_of_one, json_of
from moeinf.server.api.answers import BadRequest, noted, words_of
from moeinf.server.api.chat_turn import (
    AnswerPiece,
    Chat,
    Reply,
    Text,
    ToolCall,
    begun,
    progress_of,
)
from moeinf.server.api.fields.bounds import Few, Inputs, Listed, StopText, Tokens
from moeinf.server.api.fields.optional import RequestObject
from moeinf.server.api.fields.sampling import Sampled
from moeinf.server.api.logprobs import LegacyWords, token_words
from moeinf.server.api.openai_format import (
    ChatTool,
    Message,
    ToolChoice,
    deltas_of,
    message_of,
    offered_by,
    plain,
    reason_of,
    usage_of,
)
from moeinf.server.api.prompts import refuse_sources
from moeinf.server.api.tool_choice import chosen_tools, effort_of
from moeinf.server.engines.jobs import Job
from moeinf.server.engines.model_manager import Loaded, ModelManager
from moeinf.server.http.bodies import JsonRoute, aside
from moeinf.server.http.json_text import Answer, dump

if TYPE_CHECKING:
    from moeinf.runtime.engine.engine import Engine

router = APIRouter(prefix="/v1", route_class=JsonRoute)
_CONTEXT_EXCEEDED = "context_length_exceeded"  # OpenAI's code for a ContextExceeded
_OPENING = {"role": "assistant", "content": ""}


class StreamOptions(RequestObject):
    include_usage: bool = False
    include_obfuscation: bool = False


class JsonSchema(RequestObject):
    """A JSON schema. Without one, or with an empty one, any JSON value is valid."""

    name: str = "answer"
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(RequestObject):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None


class CompletionFields(Sampled):
    """The common fields of both kinds of completions.

    max_tokens -1: until the context ends. return_progress is llama.cpp's.
    """

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_progress: bool = False
    keep_prefix: bool = True  # for later requests
    stop: StopText | Few[StopText] | None = None
    max_tokens: int | None = Field(None, ge=-1)

    def limits(self, most: int | None) -> Limits:
        """Return the limits of an answer of `most` tokens; -1: until the context ends."""
        return Limits(most, self.stops())

    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class ChatRequest(CompletionFields):
    messages: Listed[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=-1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: Listed[ChatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(CompletionFields):
    prompt: str | Inputs[str] | Tokens
    logprobs: int | None = Field(None, ge=0, le=20)


@dataclass
class _Kind:
    """The document form of one of the two endpoints."""

    id: str
    object: str
    chunk: str
    model: str
    whole: Callable[[Reply, list[Any], str], dict[str, Any]]  # …, logprobs, reason -> choice
    piece: Callable[[dict[str, Any], list[Any]], dict[str, Any]]  # a chat's delta, … -> choice
    last: Callable[[str], dict[str, Any]]
    created: int = field(default_factory=lambda: int(time.time()))

    def around(self, choices: list[Any], chunk: bool) -> dict[str, Any]:
        name = self.chunk if chunk else self.object
        about = {"id": self.id, "object": name, "created": self.created, "model": self.model}
        return {**about, "choices": choices}


@router.post("/chat/completions")
async def chat_completions(asked: ChatRequest, request: Request) -> Response:
    asked.check_others(request)
    messages = await aside(request, lambda: [plain(message) for message in asked.messages])
    named = asked.tool_choice.function.name if isinstance(asked.tool_choice, ToolChoice) else None
    choice = asked.tool_choice if isinstance(asked.tool_choice, str) else None
    tools, must_call = chosen_tools(offered_by(asked.tools or []), choice, named)
    turn = Chat(
        messages,
        tools,
        effort_of(asked.reasoning_effort),
        parallel_calls=asked.parallel_tool_calls is not False,
        variables=asked.chat_template_kwargs or {},
        shift=request.app.state.context_shift,
    )
    form = asked.response_format
    schema: Any = None
    if form is not None and form.type == "json_object":
        schema = "json"
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise BadRequest("response_format: json_schema is missing")
        schema = form.json_schema.schema_
    count = (asked.top_logprobs or 0) if asked.logprobs else None
    most = (
        asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
    )
    constrain = call_of_one(tools) if must_call else json_of(schema, tools)
    limits = asked.limits(most)
    job = Job(
        turn.prepare,
        asked.sampling(),
        limits,
        lambda _: None,
        count,
        constrain,
        kept=asked.keep_prefix,
    )

    def probabilities(found: list[Any]) -> Any:
        return {"content": found, "refusal": None} if count is not None else None

    kind = _Kind(
        f"chatcmpl-{secrets.token_hex(12)}",
        "chat.completion",
        "chat.completion.chunk",
        asked.model,
        whole=lambda reply, found, reason: {
            "index": 0,
            "message": message_of(reply),
            "logprobs": probabilities(found),
            "finish_reason": reason,
        },
        piece=lambda delta, found: {
            "index": 0,
            "delta": delta,
            "logprobs": probabilities(found) if found else None,
            "finish_reason": None,
        },
        last=lambda reason: {
            "index": 0, "delta": {}, "logprobs": None, "finish_reason": reason,
        },
    )  # fmt: skip
    return await _answer(request, asked, job, turn, kind, token_words, opening=True)


@router.post("/completions")
async def completions(asked: CompletionRequest, request: Request) -> Response:
    asked.check_others(request)
    prompt = asked.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        if len(prompt) > 1:
            raise BadRequest("prompt: a request has one prompt")
        prompt = prompt[0]

    def prepare(engine: Engine) -> list[int]:
        if isinstance(prompt, str):
            refuse_sources(engine)
            return text_prompt(engine, prompt)
        ids = [int(token) for token in prompt]
        if any(not 0 <= token < engine.info.vocab_size for token in ids):
            raise BadRequest("prompt has ids that are not tokens of this model")
        return ids

    limits = asked.limits(16 if asked.max_tokens is None else asked.max_tokens)
    about = (asked.sampling(), limits, lambda _: None, asked.logprobs)
    job = Job(prepare, *about, kept=asked.keep_prefix)

    words = LegacyWords()

    def choice(text: str, found: list[Any] | None, reason: str | None) -> dict[str, Any]:
        figures = words.add(found) if found else None
        return {"index": 0, "text": text, "logprobs": figures, "finish_reason": reason}

    kind = _Kind(
        f"cmpl-{secrets.token_hex(12)}",
        "text_completion",
        "text_completion",
        asked.model,
        whole=lambda reply, found, reason: choice(reply.answer, found, reason),
        piece=lambda delta, found: choice(delta["content"], found, None),
        last=lambda reason: choice("", None, reason),
    )
    return await _answer(request, asked, job, Text(""), kind, lambda engine, info: (engine, info))


async def _answer(
    request: Request,
    asked: CompletionFields,
    job: Job,
    turn: Text,
    kind: _Kind,
    word: Callable[[Engine, TokenInfo], Any],
    opening: bool = False,
) -> Response:
    loaded, told = await begun(request, asked.model, job, turn)
    if asked.stream:
        lines = _stream(loaded, told, asked, turn, kind, word, opening, request.app.state.settings)
        return StreamingResponse(lines, media_type="text/event-stream")
    reply, found = Reply(), list[Any]()
    async for event in told:
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Ended):
            choice = kind.whole(reply, found, reason_of(event, bool(reply.calls)))
            document = kind.around([choice], chunk=False)
            return Answer({**document, "usage": usage_of(event), **turn.about()})
        if isinstance(event, Reading):
            continue
        found += _words(loaded, event, word)
        for part in event.parts:
            reply.add(part)
    raise AssertionError("an answer has an end")


async def _stream(
    loaded: Loaded,
    answer: AsyncIterator[AnswerPiece | Reading | Ended | Failed],
    asked: CompletionFields,
    turn: Text,
    kind: _Kind,
    word: Callable[[Engine, TokenInfo], Any],
    opening: bool,
    settings: Settings,
) -> AsyncIterator[str]:
    """Yield SSE. An error is an event of its own, and no [DONE] follows it.

    A prompt's progress is a comment, which clients skip, unless they have requested it.
    """
    usage = asked.stream_options is not None and asked.stream_options.include_usage
    extra = {"usage": None} if usage else {}
    called = False
    if opening:
        yield _event({**kind.around([kind.piece(_OPENING, [])], chunk=True), **extra})
    async for event in answer:
        if isinstance(event, Failed):
            yield _event(error_document(noted(event.error, settings)))
            return
        if isinstance(event, Ended):
            choice = kind.last(reason_of(event, called))
            yield _event({**kind.around([choice], chunk=True), **extra, **turn.about()})
            if usage:
                yield _event({**kind.around([], chunk=True), "usage": usage_of(event)})
            continue
        if isinstance(event, Reading):
            if asked.return_progress:
                chunk = kind.around([kind.piece({"content": ""}, [])], chunk=True)
                yield _event({**chunk, **extra, "prompt_progress": progress_of(event)})
            else:
                yield f": prompt {event.read}/{event.tokens} tokens\n\n"
            continue
        called = called or any(isinstance(part, ToolCall) for part in event.parts)
        found = _words(loaded, event, word)
        deltas = [delta for part in event.parts for delta in deltas_of(part)]
        for delta in deltas or ([{"content": ""}] if found else []):
            yield _event({**kind.around([kind.piece(delta, found)], chunk=True), **extra})
            found = []
    yield "data: [DONE]\n\n"


def _words(
    loaded: Loaded, event: AnswerPiece, word: Callable[[Engine, TokenInfo], Any]
) -> list[Any]:
    engine = loaded.worker.engine
    return [] if event.info is None or engine is None else [word(engine, event.info)]


@router.get("/models")
def models(request: Request) -> dict[str, Any]:
    """Return all models, in the forms of OpenAI and Anthropic at once."""
    host: ModelManager = request.app.state.host
    found = [entry.manifest for entry in host.library.installed()]
    data = [_described(m) for m in found if m is not None]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return {"object": "list", "data": data, "has_more": False, **ends}


@router.get("/models/{name:path}")
def model(name: str, request: Request) -> dict[str, Any]:
    host: ModelManager = request.app.state.host
    return _described(host.library.read(name)[0])


def _described(m: Manifest) -> dict[str, Any]:
    created = int(datetime.datetime.fromisoformat(m.created_at).timestamp())
    openai = {"object": "model", "created": created, "owned_by": "moeinf"}
    anthropic = {"type": "model", "display_name": str(m.model), "created_at": m.created_at}
    return {"id": str(m.model), **openai, **anthropic, "max_input_tokens": m.max_context}


def _event(document: dict[str, Any]) -> str:
    return f"data: {dump(document)}\n\n"


def error_document(error: MoeinfError) -> dict[str, Any]:
    """Return OpenAI's form of an error.

    Clients shorten a conversation when they read "maximum context length" or its code.
    """
    kind = "server_error" if error.http_status >= 500 else "invalid_request_error"
    code, words = error.code, words_of(error)
    if isinstance(error, ContextExceeded):
        code = _CONTEXT_EXCEEDED
        words = f"this model's maximum context length is exceeded: {words}"
    field = error.field if isinstance(error, BadRequest) else None
    return {"error": {"message": words, "type": kind, "param": field, "code": code}}
