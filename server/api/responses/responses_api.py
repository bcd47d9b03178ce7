"""OpenAI's endpoints of responses: create, count, retrieve, delete, and list their input."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from moeinf.runtime.config import Settings
from moeinf.runtime.generation.events import Ended, Failed, Reading
from moeinf.runtime.requests import Limits, SamplingOptions
from moeinf.runtime.sampling.grammar import Constrain
from moeinf.server.api.answers import BadRequest, noted
from moeinf.server.api.chat_turn import AnswerPiece, Chat, begun
from moeinf.server.api.logprobs import token_words
from moeinf.server.api.openai_api import error_document
from moeinf.server.api.responses.output import Document, EventLines, Output, new_id
from moeinf.server.api.responses.request import InputItem, InputRequest, ResponsesRequest
from moeinf.server.api.responses.store import ResponseStore, Stored
from moeinf.server.engines.jobs import Job
from moeinf.server.engines.model_manager import Loaded, ModelManager
from moeinf.server.http.bodies import JsonRoute, aside, in_thread
from moeinf.server.http.json_text import Answer

router = APIRouter(prefix="/v1/responses", route_class=JsonRoute)
_KINDS = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


@router.post("")
async def create(asked: ResponsesRequest, request: Request) -> Response:
    """Answer as OpenAI's Responses API does, and keep the response unless `store` is false."""
    own, made, turn, constrain = await _turn(asked, request)
    job = Job(
        turn.prepare,
        asked.sampling(),
        asked.limits(),
        logprobs=asked.logprobs(),
        constrain=constrain,
        kept=asked.keep_prefix,
    )
    loaded, told = await begun(request, asked.model, job, turn)
    answering = _Answering(asked, own, made, request, loaded, turn)
    if asked.stream:
        lines = answering.stream(told)
        return StreamingResponse(lines, media_type="text/event-stream")
    async for event in told:
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Ended):
            list(answering.close(event))
            return Answer(await answering.whole(event))
        if isinstance(event, AnswerPiece):
            list(answering.add(event))
    raise AssertionError("an answer has an end")


@router.post("/input_tokens")
async def input_tokens(asked: InputRequest, request: Request) -> Response:
    """Return the number of tokens of a conversation, template included, without an answer."""
    _, _, turn, _ = await _turn(asked, request)
    turn.shift = False  # a client counts to drop turns of its own choice
    job = Job(turn.prepare, SamplingOptions(), Limits(0), counts=True)
    _, told = await begun(request, asked.model, job, turn)
    async for event in told:
        if isinstance(event, Ended):
            count = event.prompt_tokens
            return Answer({"object": "response.input_tokens", "input_tokens": count})
    raise AssertionError("a count has an end")


@router.get("/{name}")
async def retrieve(name: str, request: Request, stream: bool = False) -> Response:
    """Return a stored response, whole."""
    read = _store(request).document(name)
    if stream:
        raise BadRequest("stream: a stored response is not streamed again", "stream")
    return await in_thread(lambda: Answer(read()))


@router.delete("/{name}")
async def delete(name: str, request: Request) -> Response:
    _store(request).delete(name)
    return Answer({"id": name, "object": "response", "deleted": True})


@router.post("/{name}/cancel")
async def cancel(name: str, request: Request) -> Response:
    """Refuse to end a response: a stored one has ended, and another ends when its client leaves."""
    _store(request).document(name)
    raise BadRequest("only a response in the background can be cancelled")


@router.get("/{name}/input_items")
async def input_items(
    name: str,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """List the items that a response answers, those of earlier responses included."""
    items = await in_thread(_store(request).input_of(name, request.state.body))
    if order == "desc":
        items.reverse()
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise BadRequest(f"after: {after[:80]!r} is not an item of the response", "after")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
    more = len(items) > len(page)
    return Answer({"object": "list", "data": page, "has_more": more, **ends})


def _store(request: Request) -> ResponseStore:
    found: ResponseStore = request.app.state.responses
    return found


async def _turn(
    asked: InputRequest, request: Request
) -> tuple[list[InputItem], list[str], Chat, Constrain | None]:
    """Return the items of a request's input, ids, the turn, and what constrains its answer.

    A stored conversation is read last, and off the event loop. An id of the own conversation may be
    one that a client chose; the ids of other items that it refers to were made by this server, and
    are returned, too. Raises BadRequest, BadFormat, NoSuchModel, NoSuchResponse, BodiesTooLong.
    """
    said, store, body = asked.items(), _store(request), request.state.body
    names = [item.id or "" for item in said if item.refers()]
    if not all(names):
        raise BadRequest("input: an item_reference has no id", "input")
    previous = asked.previous_response_id
    if previous is None and not names:
        turn, constrain = await aside(request, asked.turn, request, said)
        return said, [], turn, constrain
    own = [item for item in said if not item.refers()]
    await aside(request, asked.turn, request, own, True)  # refuse before what is stored is read
    host: ModelManager = request.app.state.host
    await asyncio.to_thread(host.library.find, asked.model)
    own_names = set[str]() if previous is None else store.named(previous)
    made = [name for name in names if name not in own_names]
    referred = store.items(made, body)
    earlier = list if previous is None else store.conversation(previous, body)

    def read() -> tuple[list[InputItem], list[str], Chat, Constrain | None]:
        before = [InputItem.model_validate(item) for item in earlier()]
        found = {item.id: item for item in before if item.id}
        others = referred()
        found |= {name: InputItem.model_validate(others[name]) for name in made}
        own = [found[item.id] if item.id and item.refers() else item for item in said]
        return own, made, *asked.turn(request, [*before, *own])

    return await in_thread(read)


class _Answering:
    """One answer on its way to its client."""

    def __init__(
        self,
        asked: ResponsesRequest,
        own: list[InputItem],
        made: list[str],
        request: Request,
        loaded: Loaded,
        turn: Chat,
    ) -> None:
        self._asked, self._own, self._loaded, self._turn = asked, own, loaded, turn
        self._made, self._store, self._request = made, _store(request), request
        self._settings: Settings = request.app.state.settings
        self._output, self._document = Output(asked.namespaces()), Document(asked)

    def add(self, piece: AnswerPiece) -> Iterator[dict[str, Any]]:
        """Yield the events of a piece of the answer."""
        engine = self._loaded.worker.engine
        words = [] if piece.info is None or engine is None else [token_words(engine, piece.info)]
        for part in piece.parts:
            yield from self._output.add(part, words, piece.tokens)
            words = []

    def close(self, ended: Ended) -> Iterator[dict[str, Any]]:
        return self._output.close("completed" if ended.reason == "stop" else "incomplete")

    async def whole(self, ended: Ended) -> dict[str, Any]:
        """Return the response, and keep it if it is to be kept."""
        whole = self._document.ended(self._output, ended, self._turn.about())
        if self._asked.store:
            said = [_named(item) for item in self._own]
            fresh = [
                item["id"] for item, own in zip(said, self._own, strict=True) if own.id is None
            ]
            made = [*self._made, *fresh]
            kept = await aside(self._request, lambda: Stored.of(whole, said, made))
            self._store.put(whole["id"], kept)
        return whole

    async def stream(
        self, answer: AsyncIterator[AnswerPiece | Reading | Ended | Failed]
    ) -> AsyncIterator[str]:
        """Yield SSE. An error ends the stream with response.failed.

        A prompt's progress is a comment, which clients skip.
        """
        text = EventLines().text
        begun = self._document.begun()
        yield text({"type": "response.created", "response": begun})
        yield text({"type": "response.in_progress", "response": begun})
        async for event in answer:
            if isinstance(event, Reading):
                yield f": prompt {event.read}/{event.tokens} tokens\n\n"
            elif isinstance(event, AnswerPiece):
                for told in self.add(event):
                    yield text(told)
            elif isinstance(event, Failed):
                error = error_document(noted(event.error, self._settings))["error"]
                failed = self._document.failed(self._output, error)
                yield text({"type": "response.failed", "response": failed})
            else:
                for told in self.close(event):
                    yield text(told)
                whole = await self.whole(event)
                yield text({"type": f"response.{whole['status']}", "response": whole})


def _named(item: InputItem) -> dict[str, Any]:
    """Return an item as it is stored: with an id and a type."""
    name = new_id(_KINDS.get(item.type, "item"))
    return {"id": name, "type": item.type, **item.model_dump(exclude_unset=True)}
