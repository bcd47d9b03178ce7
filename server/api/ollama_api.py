"""Ollama's endpoints, with its field names, its NDJSON streams and its durations in nanoseconds."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from moeinf.errors import MoeinfError
from moeinf.runtime.config import Settings, parse_duration
from moeinf.runtime.generation.events import Ended, Failed, Reading
from moeinf.runtime.library.clone import copy_model
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.sampling.grammar import json_of
from moeinf.runtime.version import version
from moeinf.server.api.answers import BadRequest, events, noted, words_of
from moeinf.server.api.chat_turn import (
    AnswerPiece,
    Chat,
    Reply,
    Text,
    called_ollama,
    experts_since,
    parsed,
    progress_of,
)
from moeinf.server.api.fields.bounds import Few, Listed, Tokens
from moeinf.server.api.fields.optional import RequestObject
from moeinf.server.api.logprobs import token_words
from moeinf.server.api.ollama_options import read_options, without_effect
from moeinf.server.api.ollama_show import details_of, shown
from moeinf.server.api.openai_format import lossy_of
from moeinf.server.api.prompts import MessageExtras
from moeinf.server.engines.jobs import Job
from moeinf.server.engines.model_manager import Loaded, ModelManager
from moeinf.server.http.bodies import JsonRoute, aside
from moeinf.server.http.json_text import Answer, dump
from moeinf.server.http.request_log import notes_of

router = APIRouter(route_class=JsonRoute)
Seconds = str | int | float | None
_JSON_TIMES = 6  # a control character is \u0001


class Message(MessageExtras):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    images: Few[str] | None = None


class GenerationFields(RequestObject):
    """The common fields of generate and chat. Unknown ones are ignored."""

    model_config = ConfigDict(extra="allow")
    model: str
    stream: bool = True
    keep_prefix: bool = True  # for later requests
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    keep_alive: Seconds = None
    think: bool | Literal["low", "medium", "high"] | None = None
    template: str | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)


class GenerateRequest(GenerationFields):
    prompt: str = ""
    system: str = ""
    raw: bool = False
    suffix: str | None = None
    images: Few[str] | None = None
    context: Tokens | None = None


class ChatRequest(GenerationFields):
    messages: Listed[Message] = Field(default_factory=list)
    tools: Listed[dict[str, Any]] = Field(default_factory=list)


class ModelRequest(RequestObject):
    """A request that names a model: old clients send `name`, new ones `model`."""

    model: str = ""
    name: str = ""

    @property
    def wanted(self) -> str:
        if not (self.model or self.name):
            raise BadRequest("model is missing")
        return self.model or self.name


class CopyRequest(BaseModel):
    source: str
    destination: str


@router.post("/api/generate")
async def generate(asked: GenerateRequest, request: Request) -> Response:
    if asked.images or asked.suffix:
        raise BadRequest("models here read text only, and do not fill in the middle")
    if asked.context:
        raise BadRequest("context is not supported: use /api/chat, which takes the turns")

    if asked.raw:
        turn = Text("\n\n".join(t for t in (asked.system, asked.prompt) if t))
    else:
        system = [{"role": "system", "content": asked.system}] if asked.system else []
        messages = [*system, {"role": "user", "content": asked.prompt}]
        turn = Chat(messages, think=asked.think, strict=True)

    def said(reply: Reply) -> dict[str, Any]:
        thought = {"thinking": reply.thinking} if reply.thinking else {}
        return {"response": reply.answer, **thought}

    return await _answer(request, asked, turn, not asked.prompt, said)


@router.post("/api/chat")
async def chat(asked: ChatRequest, request: Request) -> Response:
    if any(message.images for message in asked.messages):
        raise BadRequest("models here read text only")
    messages = await aside(request, lambda: [message.dump() for message in asked.messages])

    def said(reply: Reply) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": reply.answer}
        if reply.thinking:
            message["thinking"] = reply.thinking
        if reply.calls:
            message["tool_calls"] = [called_ollama(called) for called in reply.calls]
        return {"message": message}

    shift = request.app.state.context_shift
    turn = Chat(messages, asked.tools, asked.think, strict=True, shift=shift)
    return await _answer(request, asked, turn, not messages, said)


async def _answer(
    request: Request,
    asked: GenerationFields,
    turn: Text,
    nothing_to_say: bool,
    said: Callable[[Reply], dict[str, Any]],
) -> Response:
    """Answer, streamed or whole. Without a prompt the model is only loaded, or unloaded."""
    host: ModelManager = request.app.state.host
    if asked.template:
        raise BadRequest("template is not supported: the model has its own", "template")
    options = read_options(asked.options)
    notes_of(request).ignore([*(asked.model_extra or ()), *without_effect(asked.options)])
    keep_alive = None if asked.keep_alive is None else parse_duration(asked.keep_alive)
    form = _Form(asked.model, said, turn)
    if nothing_to_say and keep_alive == 0:
        await host.unload(asked.model)
        return Answer(form.end("unload"))
    turn.context = options.limits.context
    loaded = await host.model(asked.model, keep_alive, turn.context)
    form.load_seconds = time.perf_counter() - form.start
    form.experts = experts_since(loaded)
    if nothing_to_say:
        return Answer(form.end("load"))
    constrain = json_of(asked.format, getattr(asked, "tools", ()))
    count = asked.top_logprobs if asked.logprobs else None
    said_by, kept = (options.sampling, options.limits), asked.keep_prefix
    job = Job(turn.prepare, *said_by, lambda _: None, count, constrain, kept=kept)
    answer = events(loaded, job, request)
    first = await anext(answer)
    if isinstance(first, Failed):
        raise first.error
    told = parsed(first, answer, turn)
    if asked.stream:
        lines = _stream(loaded, told, form, request.app.state.settings)
        return StreamingResponse(lines, media_type="application/x-ndjson")
    return await _whole(loaded, told, form)


@dataclass
class _Form:
    """The documents of one answer.

    said: returns the endpoint's own fields for a part. experts: what experts did since the start.
    """

    model: str
    said: Callable[[Reply], dict[str, Any]]
    turn: Text
    start: float = field(default_factory=time.perf_counter)
    load_seconds: float = 0.0
    experts: Callable[[], dict[str, int]] = dict

    def line(self, reply: Reply, found: list[Any], ended: Ended | None = None) -> dict[str, Any]:
        """Return a part of the answer. found: its log-probabilities."""
        about = {"model": self.model, "created_at": _now(), **self.said(reply), "done": bool(ended)}
        about |= {"logprobs": found} if found else {}
        return about if ended is None else {**about, **_figures(ended, self)}

    def end(self, reason: str) -> dict[str, Any]:
        """Return the end of a request without a prompt."""
        return {**self.line(Reply(), []), "done": True, "done_reason": reason}


async def _stream(
    loaded: Loaded,
    answer: AsyncIterator[AnswerPiece | Reading | Ended | Failed],
    form: _Form,
    settings: Settings,
) -> AsyncIterator[str]:
    async for event in answer:
        if isinstance(event, Failed):
            yield dump(error_document(noted(event.error, settings))) + "\n"
        elif isinstance(event, Reading):
            progress = {"prompt_progress": progress_of(event)}
            yield dump({**form.line(Reply(), []), **progress}) + "\n"
        elif isinstance(event, Ended):
            yield dump(form.line(Reply(), [], event)) + "\n"
        else:
            found = _probabilities(loaded, event)
            replies = [Reply.of(part) for part in event.parts]
            for reply in replies or [Reply()] * len(found):
                yield dump(form.line(reply, found)) + "\n"
                found = []


async def _whole(
    loaded: Loaded, answer: AsyncIterator[AnswerPiece | Reading | Ended | Failed], form: _Form
) -> Response:
    reply, found = Reply(), list[Any]()
    async for event in answer:
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Ended):
            return Answer(form.line(reply, found, event))
        if isinstance(event, Reading):
            continue
        found += _probabilities(loaded, event)
        for part in event.parts:
            reply.add(part)
    raise AssertionError("an answer has an end")


def _probabilities(loaded: Loaded, event: AnswerPiece) -> list[dict[str, Any]]:
    """Return the log-probabilities of the new token, if they were requested."""
    engine = loaded.worker.engine
    return [] if event.info is None or engine is None else [token_words(engine, event.info)]


def _figures(ended: Ended, form: _Form) -> dict[str, Any]:
    ns = 1_000_000_000
    return {
        **form.turn.about(),
        "done_reason": "stop" if ended.reason == "stop" else "length",
        "total_duration": round((time.perf_counter() - form.start) * ns),
        "load_duration": round(form.load_seconds * ns),
        "prompt_eval_count": ended.prompt_tokens,
        "prompt_eval_duration": round(ended.prefill_seconds * ns),
        "eval_count": ended.tokens,
        "eval_duration": round(ended.decode_seconds * ns),
        **form.experts(),
        **lossy_of(ended),
    }


@router.get("/api/tags")
def tags(request: Request) -> dict[str, Any]:
    found = [entry.manifest for entry in request.app.state.host.library.installed()]
    return {"models": [_described(manifest) for manifest in found if manifest is not None]}


@router.get("/api/ps")
def ps(request: Request) -> dict[str, Any]:
    host: ModelManager = request.app.state.host
    loading = [{"model": str(name), **vars(read)} for name, read in host.starting().items()]
    return {"models": [_living(loaded) for loaded in host.loaded()], "loading": loading}


def _living(loaded: Loaded) -> dict[str, Any]:
    engine = loaded.worker.engine
    about = _described(loaded.manifest)
    about.pop("modified_at")
    until = min(loaded.expires_at, 253402300799.0)  # the year 9999 stands for never
    expires = datetime.datetime.fromtimestamp(until, datetime.UTC).isoformat()
    size, vram, context = loaded.manifest.size_bytes, 0, 0
    if engine is not None:
        place = engine.info.placement
        vram = 0 if place.on_device is None else place.on_device.peak_bytes
        size, context = place.peak_bytes + vram, place.context
    if engine is not None and engine.prefixes is not None:
        prefixes = engine.prefixes
        about["prefix_cache"] = {
            "tokens_reused": loaded.worker.reused_tokens,
            "bytes": prefixes.bytes_used,
            "bytes_on_disk": prefixes.disk_bytes,
        }
    sizes = {"size": size, "size_vram": vram}  # in all, and the GPU's part
    prompts = [progress_of(reading) for reading in loaded.worker.reading]
    return {**about, **sizes, "expires_at": expires, "context_length": context, "prompts": prompts}


@router.post("/api/show")
async def show(asked: ModelRequest, request: Request) -> Response:
    library, wanted = request.app.state.host.library, asked.wanted
    async with request.app.state.shows:
        document = await asyncio.to_thread(shown, library, wanted)
        texts = (text for text in document.values() if isinstance(text, str))
        request.state.body.hold(_JSON_TIMES * sum(map(len, texts)))  # before they are written
        return await asyncio.to_thread(Answer, document)


@router.post("/api/copy")
def copy(asked: CopyRequest, request: Request) -> Response:
    copy_model(request.app.state.settings, asked.source, asked.destination)
    return Response()


@router.delete("/api/delete")
async def delete(asked: ModelRequest, request: Request) -> Response:
    host: ModelManager = request.app.state.host
    await host.unload(asked.wanted, only_idle=True)
    await asyncio.to_thread(host.library.remove, asked.wanted)
    return Response()


@router.get("/api/version")
def this_version() -> dict[str, str]:
    return {"version": version()}


def _described(m: Manifest) -> dict[str, Any]:
    return {
        "name": str(m.model),
        "model": str(m.model),
        "modified_at": m.created_at,
        "size": m.size_bytes,
        "digest": m.digest,
        "details": details_of(m),
    }


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")


def error_document(error: MoeinfError) -> dict[str, str]:
    """Return Ollama's form of an error. `moeinf run` tells errors apart by code, which is ours."""
    return {"error": words_of(error), "code": error.code}
