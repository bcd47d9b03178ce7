"""OpenAI's endpoints of responses: create, count, retrieve, delete, and list their input."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from moeinf.runtime.config import Settings
from moeinf.runtime.generation.events import Ended, Failed, Reading
from moeinf.runtime.requests import Limits, SamplingOptions
from moeinf.server.api.answers import BadRequest, noted
from moeinf.server.api.chat_turn import AnswerPiece, Chat, begun
from moeinf.server.api.logprobs import token_words
from moeinf.server.api.openai_api import error_document
from moeinf.server.api.responses.output import Document, EventLines, Output, new_id
from moeinf.server.api.responses.request import InputItem, InputRequest, ResponsesRequest
from moeinf.server.api.responses.store import ResponseStore
from moeinf.server.engines.jobs import Job
from moeinf.server.engines.model_manager import Loaded
from moeinf.server.http.bodies import JsonRoute
from moeinf.server.http.json_text import Answer

router = APIRouter(prefix="/v1/responses", route_class=JsonRoute)
_KINDS = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


@router.post("")
async def create(asked: ResponsesRequest, request: Request) -> Response:
    """Answer as OpenAI's Responses API does, and keep the response unless `store` is false."""
    own = _own(asked, request)
    turn, constrain = asked.turn(request, [*_earlier(asked, request), *own])
    job = Job(
        turn.prepare,
        asked.sampling(),
        asked.limits(),
        logprobs=asked.logprobs(),
        constrain=constrain,
        kept=asked.keep_prefix,
    )
    loaded, told = await begun(request, asked.model, job, turn)
    answering = _Answering(asked, own, request, loaded, turn)
    if asked.stream:
        lines = answering.stream(told)
        return StreamingResponse(lines, media_type="text/event-stream")
    async for event in told:
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Ended):
            list(answering.close(event))
            return Answer(answering.whole(event))
        if isinstance(event, AnswerPiece):
            list(answering.add(event))
    raise AssertionError("an answer has an end")


@router.post("/input_tokens")
async def input_tokens(asked: InputRequest, request: Request) -> Response:
    """Return the number of tokens of a conversation, template included, without an answer."""
    turn, _ = asked.turn(request, [*_earlier(asked, request), *_own(asked, request)])
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
    document = _store(request).document(name)
    if stream:
        raise BadRequest("stream: a stored response is not streamed again", "stream")
    return Answer(document)


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
    items = _store(request).input_of(name, request.state.body)
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


def _earlier(asked: InputRequest, request: Request) -> list[InputItem]:
    """Return the items before a request's input. Raises NoSuchResponse, BodiesTooLong."""
    if asked.previous_response_id is None:
        return []
    found = _store(request).conversation(asked.previous_response_id, request.state.body)
    return [InputItem.model_validate(item) for item in found]


def _own(asked: InputRequest, request: Request) -> list[InputItem]:
    """Return the items of a request's input, with the stored items that it refers to.

    Raises BadRequest, NoSuchResponse, BodiesTooLong.
    """
    said = asked.items()
    names = [item.id or "" for item in said if item.refers()]
    if not all(names):
        raise BadRequest("input: an item_reference has no id", "input")
    found = _store(request).items(names, request.state.body)
    return [
        InputItem.model_validate(found[item.id]) if item.id and item.refers() else item
        for item in said
    ]


class _Answering:
    """One answer on its way to its client."""

    def __init__(
        self,
        asked: ResponsesRequest,
        own: list[InputItem],
        request: Request,
        loaded: Loaded,
        turn: Chat,
    ) -> None:
        self._asked, self._own, self._loaded, self._turn = asked, own, loaded, turn
        self._store = _store(request)
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

    def whole(self, ended: Ended) -> dict[str, Any]:
        """Return the response, and keep it if it is to be kept."""
        whole = self._document.ended(self._output, ended, self._turn.about())
        if self._asked.store:
            self._store.put(whole, [_named(item) for item in self._own])
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
                whole = self.whole(event)
                yield text({"type": f"response.{whole['status']}", "response": whole})


def _named(item: InputItem) -> dict[str, Any]:
    """Return an item as it is stored: with an id and a type."""
    name = new_id(_KINDS.get(item.type, "item"))
    return {"id": name, "type": item.type, **item.model_dump(exclude_unset=True)}
