"""Build the HTTP application: both APIs, health, metrics, and errors in each API's format."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any
from weakref import WeakSet

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from moeinf.errors import MoeinfError
from moeinf.runtime.config import EngineConfig, ServerSettings, Settings
from moeinf.runtime.library.blobs import Blobs
from moeinf.server import page
from moeinf.server.api import embeddings, experts_api, memory_api, ollama_api, openai_api
from moeinf.server.api.answers import BadRequest, noted
from moeinf.server.api.library import (
    blobs_api,
    create_api,
    plan_api,
    pull_api,
    simulate_api,
    verify_api,
)
from moeinf.server.api.messages import answer as messages_answer
from moeinf.server.api.messages import messages_api
from moeinf.server.api.responses import responses_api
from moeinf.server.api.responses.store import ResponseStore
from moeinf.server.engines.model_manager import ModelManager
from moeinf.server.http.json_text import Answer
from moeinf.server.http.refusals import Refusal, UnknownPath, WrongMethod
from moeinf.server.http.request_log import RequestLog
from moeinf.server.http.security import Guard
from moeinf.server.metrics import Metrics

_EXPIRE_EVERY_S = 60.0
_MOST_SHOWS = 1  # of /api/show at a time: an answer may have megabytes
_NOT_FIELDS = ("body", "str", "int", "float", "bool")
_FIELD = re.compile("[a-z0-9_]+")  # others are of forms: list[InputItem], literal['none','auto']

# The application's own endpoints, which belong to neither API.
router = APIRouter()


@router.get("/", response_class=PlainTextResponse)
@router.head("/", include_in_schema=False)
def root(request: Request) -> Response:
    """Return the page to a browser, and a line of text to everyone else."""
    if page.wanted(request):
        return page.answer(page.INDEX, request)
    return PlainTextResponse("moeinf is running", headers={"Vary": "Accept"})


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """Return status "ok"; 503 with the reason after a load that failed by a fault of the program.

    The next load that succeeds ends that.
    """
    failure = request.app.state.host.failure
    if failure:
        return JSONResponse({"status": "error", "error": failure}, 503)
    return JSONResponse({"status": "ok"})


@router.get("/metrics", response_class=PlainTextResponse)
def metrics(request: Request) -> str:
    """Return metrics in Prometheus' text format, under vLLM's names where it has them.

    The label `model_name` is on every sample. `request_success_total` also has `kind`
    (`generation`, `count`, or `embedding`, one per input) and `finished_reason`. Times are measured
    by the engine, from when a request reaches a loaded model.
    """
    found: Metrics = request.app.state.metrics
    return found.exposition()


def create_app(
    settings: Settings,
    server: ServerSettings,
    config: EngineConfig,
    say: Callable[[str], None] = lambda _: None,
) -> FastAPI:
    """Build the application; a request loads the engine that it names.

    say: receives a line per choice or note of an engine, and per request with server.verbose.
    """

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        keepers = [asyncio.create_task(app.state.host.run()), asyncio.create_task(_expire(app))]
        yield
        for keeper in keepers:
            keeper.cancel()
        for keeper in keepers:
            with suppress(asyncio.CancelledError):
                await keeper

    app = _Application(
        title="moeinf",
        lifespan=life,
        docs_url=None,
        redoc_url=None,
    )
    app.state.host = ModelManager(settings, server, config, say)
    app.state.metrics = Metrics(lambda: app.state.host.loaded())
    app.state.settings = settings
    app.state.config = config
    app.state.curves = None
    app.state.expert_streams = WeakSet()
    app.state.responses = ResponseStore()
    app.state.blobs = Blobs(settings.home / "blobs")
    app.state.uploads = set()
    app.state.shows = asyncio.Semaphore(_MOST_SHOWS)
    app.state.context_shift = server.context_shift
    for routes in (
        ollama_api,
        openai_api,
        messages_api,
        responses_api,
        embeddings,
        pull_api,
        create_api,
        blobs_api,
        verify_api,
        plan_api,
        simulate_api,
        memory_api,
        experts_api,
    ):
        app.include_router(routes.router)
    app.include_router(router)
    app.include_router(page.router)
    _word_errors(app, settings)
    # Each layer wraps those before it. The Guard has refused every origin that is not allowed.
    app.add_middleware(
        CORSMiddleware, allow_origin_regex=".*", allow_methods=["*"], allow_headers=["*"]
    )
    app.add_middleware(Guard, settings=server, document=document_of)
    if server.verbose:
        app.add_middleware(RequestLog, say=say)
    app.add_middleware(messages_answer.RequestIds)
    return app


async def _expire(app: FastAPI) -> None:
    """Remove uploads that nothing has used in time."""
    while True:
        await asyncio.to_thread(app.state.blobs.remove_expired)
        await asyncio.sleep(_EXPIRE_EVERY_S)


class _Application(FastAPI):
    """An application whose OpenAPI document has its errors and its streams."""

    def openapi(self) -> dict[str, Any]:
        """Return the document; FastAPI writes it with errors of its own, which are never sent."""
        if self.openapi_schema is not None:
            return self.openapi_schema
        document = super().openapi()
        for name in ("HTTPValidationError", "ValidationError"):
            del document["components"]["schemas"][name]
        for path, verbs in document["paths"].items():
            schema = _schema_of(document_of({"path": path}, BadRequest("")))
            told = {"description": "An error", "content": {"application/json": {"schema": schema}}}
            for verb, operation in verbs.items():
                operation["responses"].pop("422", None)
                operation["responses"] |= {"4XX": told, "5XX": told}
                if _streams(operation, document) and (verb == "post" or path.startswith("/api/")):
                    lines = (
                        "text/event-stream" if path.startswith("/v1/") else "application/x-ndjson"
                    )
                    operation["responses"]["200"]["content"][lines] = {"schema": {}}
        return document


def _streams(operation: dict[str, Any], document: dict[str, Any]) -> bool:
    """Return whether an endpoint has a field or a parameter `stream`."""
    names = [one["name"] for one in operation.get("parameters", ())]
    for content in operation.get("requestBody", {}).get("content", {}).values():
        name = content["schema"].get("$ref", "").rpartition("/")[2]
        names += document["components"]["schemas"].get(name, {}).get("properties", ())
    return "stream" in names


def _schema_of(value: Any) -> dict[str, Any]:
    """Return the JSON schema of an error's document; its members may not be missing."""
    if isinstance(value, dict):
        members = {name: _schema_of(member) for name, member in value.items()}
        return {"type": "object", "properties": members, "required": list(members)}
    return {"type": "string"} if isinstance(value, str) else {}


def _word_errors(app: FastAPI, settings: Settings) -> None:
    """Answer each error in the form of the API that was called."""

    @app.exception_handler(RequestValidationError)
    async def refuse(request: Request, error: RequestValidationError) -> JSONResponse:
        names, words = invalid_field(error.errors())
        words = f"{'.'.join(names)}: {words}" if names else words
        return _told(request, BadRequest(words, names[0] if names else None))

    @app.exception_handler(Refusal)
    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> JSONResponse:
        answer = _told(request, _refused(request, error))
        answer.status_code = error.status_code
        answer.headers.update(error.headers or {})
        return answer

    async def tell(request: Request, error: Exception) -> JSONResponse:
        return _told(request, noted(error, settings))

    # Register builtin ancestors: Starlette logs an error as a bug if only `Exception` handles it.
    for kind in (MoeinfError, LookupError, ValueError, RuntimeError, OSError, MemoryError):
        app.add_exception_handler(kind, tell)
    app.add_exception_handler(Exception, tell)


def invalid_field(errors: Sequence[Mapping[str, Any]]) -> tuple[list[str], str]:
    """Return the path of an invalid field and what is wrong with it, from pydantic's errors.

    A field that may have several forms gives errors for each of them. The form that fits furthest
    is the one that the client meant.
    """
    paths = [_path(error["loc"]) for error in errors]
    whole = [path for path in paths if path[: len(paths[0])] == paths[0]]
    longest = max(whole, key=len)
    error = errors[paths.index(longest)]
    is_object = error["type"] in ("model_type", "model_attributes_type")
    return longest, "Input should be an object" if is_object else error["msg"]


def _path(location: Sequence[str | int]) -> list[str]:
    """Return the names and places of a location, without pydantic's names of forms."""
    names = (part for part in location if isinstance(part, int) or part not in _NOT_FIELDS)
    return [str(part) for part in names if isinstance(part, int) or _FIELD.fullmatch(part)]


def _refused(request: Request, error: HTTPException) -> MoeinfError:
    """Return the error itself if it is ours, else the refusal that matches its status."""
    if isinstance(error, Refusal):
        return error
    for kind in (UnknownPath, WrongMethod):
        if kind.http_status == error.status_code:
            return kind(f"{request.method} {request.url.path} is not an endpoint")
    return BadRequest(error.detail)


def _told(request: Request, error: MoeinfError) -> JSONResponse:
    answer = Answer(document_of(request.scope, error), error.http_status)
    if name := messages_answer.request_id_of(request.scope):
        answer.headers["request-id"] = name  # a bug is answered outside the layer that adds it
    return answer


def document_of(scope: Mapping[str, Any], error: MoeinfError) -> dict[str, Any]:
    """Return an error in the form of the API that a request's path belongs to."""
    path = scope["path"]
    if messages_answer.owns(path):
        return messages_answer.error_document(error, messages_answer.request_id_of(scope))
    if path.startswith("/v1/"):
        return openai_api.error_document(error)
    return ollama_api.error_document(error)
