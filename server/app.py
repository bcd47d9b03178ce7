"""Build the HTTP application: both APIs, health, metrics, and errors in each API's format."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from moeinf.errors import MoeinfError
from moeinf.runtime.config import EngineConfig, ServerSettings, Settings
from moeinf.server.api import embeddings, memory_api, ollama_api, openai_api, pull_api
from moeinf.server.api.answers import BadRequest, noted
from moeinf.server.api.messages import answer as messages_answer
from moeinf.server.api.messages import messages_api
from moeinf.server.api.responses import responses_api
from moeinf.server.api.responses.store import ResponseStore
from moeinf.server.engines.model_manager import Host
from moeinf.server.http.json_text import Answer
from moeinf.server.http.refusals import Refusal, UnknownPath, WrongMethod
from moeinf.server.http.request_log import RequestLog
from moeinf.server.http.security import Guard
from moeinf.server.metrics import Metrics

# The application's own endpoints, which belong to neither API.
router = APIRouter()


@router.get("/", response_class=PlainTextResponse)
def root() -> str:
    return "moeinf is running"


@router.head("/", include_in_schema=False)
def alive() -> Response:
    return Response()


@router.get("/health")
def health() -> dict[str, str]:
    return {"status": "ok"}


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
        keeper = asyncio.create_task(app.state.host.run())
        yield
        keeper.cancel()
        with suppress(asyncio.CancelledError):
            await keeper

    app = FastAPI(
        title="moeinf",
        lifespan=life,
        docs_url=None,
        redoc_url=None,
        strict_content_type=False,  # curl -d sends the type of a form, which Ollama accepts
    )
    app.state.host = Host(settings, server, config, say)
    app.state.metrics = Metrics(lambda: app.state.host.loaded())
    app.state.settings = settings
    app.state.responses = ResponseStore()
    app.state.context_shift = server.context_shift
    for routes in (
        ollama_api,
        openai_api,
        messages_api,
        responses_api,
        embeddings,
        pull_api,
        memory_api,
    ):
        app.include_router(routes.router)
    app.include_router(router)
    _word_errors(app, settings)
    # Each layer wraps those before it. The Guard has refused every origin that is not allowed.
    app.add_middleware(
        CORSMiddleware, allow_origin_regex=".*", allow_methods=["*"], allow_headers=["*"]
    )
    app.add_middleware(Guard, settings=server, document=_document)
    if server.verbose:
        app.add_middleware(RequestLog, say=say)
    return app


def _word_errors(app: FastAPI, settings: Settings) -> None:
    """Answer each error in the form of the API that was called."""

    @app.exception_handler(RequestValidationError)
    async def refuse(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        names = [str(part) for part in first["loc"] if part != "body"]
        words = f"{'.'.join(names)}: {first['msg']}" if names else first["msg"]
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


def _refused(request: Request, error: HTTPException) -> MoeinfError:
    """Return the error itself if it is ours, else the refusal that matches its status."""
    if isinstance(error, Refusal):
        return error
    for kind in (UnknownPath, WrongMethod):
        if kind.http_status == error.status_code:
            return kind(f"{request.method} {request.url.path} is not an endpoint")
    return BadRequest(error.detail)


def _told(request: Request, error: MoeinfError) -> JSONResponse:
    return Answer(_document(request.url.path, error), error.http_status)


def _document(path: str, error: MoeinfError) -> dict[str, Any]:
    """Return an error in the form of the API that the path belongs to."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return messages_answer.error_document(error)
    if path.startswith("/v1/"):
        return openai_api.error_document(error)
    return ollama_api.error_document(error)
