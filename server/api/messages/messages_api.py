"""Anthropic's endpoints: messages, whole or as a stream of events, and the count of a prompt."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import StreamingResponse

from moeinf.runtime.generation.events import Ended, Failed, Reading
from moeinf.runtime.requests import Limits, SamplingOptions
from moeinf.server.api.answers import BadRequest, noted
from moeinf.server.api.chat_turn import AnswerPiece, Chat, begun
from moeinf.server.api.messages.answer import (
    Content,
    error_document,
    event_text,
    message_of,
    request_id_of,
    stop_of,
    usage_of,
    usage_of_ended,
)
from moeinf.server.api.messages.request import CountRequest, MessagesRequest
from moeinf.server.engines.jobs import Job
from moeinf.server.http.bodies import JsonRoute, aside
from moeinf.server.http.json_text import Answer

router = APIRouter(prefix="/v1/messages", route_class=JsonRoute)
_OLDEST = "2023-06-01"  # its streams and those of later versions are the same here
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_PING = {"type": "ping"}
_UNENDED = {"stop_reason": None, "stop_sequence": None}
_Version = Annotated[str | None, Header(alias="anthropic-version")]


@router.post("")
async def messages(asked: MessagesRequest, request: Request, version: _Version = None) -> Response:
    """Answer as Anthropic's Messages API does.

    A stream sends a ping at the beginning, and twice a second while it reads a long prompt.
    """
    _check(version)
    turn, constrain = await aside(request, asked.turn, request)
    about = (turn.prepare, asked.sampling(), asked.limits())
    job = Job(*about, constrain=constrain, kept=asked.keep_prefix)
    _, told = await begun(request, asked.model, job, turn)
    if asked.stream:
        lines = _stream(told, job, asked, turn, request)
        return StreamingResponse(lines, media_type="text/event-stream")
    content = Content(asked.shows_thinking)
    async for event in told:
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Ended):
            list(content.close())
            stop = stop_of(event, content.called, asked.limits().max_tokens)
            whole = message_of(asked.model, content.blocks, stop, usage_of_ended(event))
            return Answer({**whole, **turn.about()})
        for part in event.parts if isinstance(event, AnswerPiece) else ():
            list(content.add(part))
    raise AssertionError("an answer has an end")


@router.post("/count_tokens")
async def count_tokens(asked: CountRequest, request: Request, version: _Version = None) -> Response:
    """Return the number of tokens of a prompt, template included, without an answer."""
    _check(version)
    turn, _ = await aside(request, asked.turn, request)
    turn.shift = False  # a client counts to drop turns of its own choice
    job = Job(turn.prepare, SamplingOptions(), Limits(0), counts=True)
    _, told = await begun(request, asked.model, job, turn)
    async for event in told:
        if isinstance(event, Ended):
            return Answer({"input_tokens": event.prompt_tokens})
    raise AssertionError("a count has an end")


def _check(version: str | None) -> None:
    """Check the header anthropic-version, which may be missing. Raises BadRequest."""
    if version is not None and not (_DATE.fullmatch(version) and version >= _OLDEST):
        words = f"expected a date from {_OLDEST} on"
        raise BadRequest(f"anthropic-version: {version[:64]!r} is invalid ({words})")


async def _stream(
    answer: AsyncIterator[AnswerPiece | Reading | Ended | Failed],
    job: Job,
    asked: MessagesRequest,
    turn: Chat,
    request: Request,
) -> AsyncIterator[str]:
    """Yield SSE. An error is an event of its own, and ends the stream."""
    content, opened = Content(asked.shows_thinking), False
    async for event in answer:
        if not opened:
            opened = True
            read = job.progress
            prompt, cached = (0, 0) if read is None else (read.tokens, read.cached)
            message = message_of(asked.model, [], _UNENDED, usage_of(prompt, cached, 0))
            yield event_text({"type": "message_start", "message": message})
            yield event_text(_PING)
        if isinstance(event, Failed):
            error = noted(event.error, request.app.state.settings)
            yield event_text(error_document(error, request_id_of(request.scope)))
            return
        if isinstance(event, Reading):
            yield f": prompt {event.read}/{event.tokens} tokens\n{event_text(_PING)}"
        elif isinstance(event, AnswerPiece):
            for part in event.parts:
                for told in content.add(part):
                    yield event_text(told)
        else:
            for told in content.close():
                yield event_text(told)
            stop = stop_of(event, content.called, asked.limits().max_tokens)
            usage = usage_of_ended(event)
            last = {"type": "message_delta", "delta": stop, "usage": usage, **turn.about()}
            yield event_text(last)
            yield event_text({"type": "message_stop"})
