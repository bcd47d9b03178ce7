"""Build the HTTP application: both APIs, health, metrics, and errors in each API's format."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from moeinf.errors import MoeinfError
from moeinf.runtime.config import EngineConfig, ServerSettings, Settings
from moeinf.server.api import embeddings, ollama_api, openai_api, pull_api
from moeinf.server.api.answers import BadRequest, noted
from moeinf.server.engines.model_manager import Host
from moeinf.server.http.refusals import Refusal, UnknownPath, WrongMethod
from moeinf.server.http.security import Guard
from moeinf.server.metrics import Metrics

_LOCAL_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


def create_app(
    settings: Settings,
    server: ServerSettings,
    config: EngineConfig,
    say: Callable[[str], None] = lambda _: None,
) -> FastAPI:
    """Build the application; a request loads the engine that it names.

    say: receives a line per choice or note of an engine.
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
    app.include_router(ollama_api.router)
    app.include_router(openai_api.router)
    app.include_router(embeddings.router)
    app.include_router(pull_api.router)

    @app.get("/", response_class=PlainTextResponse)
    def root() -> str:
        return "moeinf is running"

    @app.head("/", include_in_schema=False)
    def alive() -> Response:
        return Response()

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    def metrics(request: Request) -> str:
        """Return metrics in Prometheus' text format, under vLLM's names where it has them.

        The label `model_name` is on every sample. `request_success_total` also has `kind`
        (`generation` or `embedding`, one per input) and `finished_reason`. Times are measured by
        the engine, from when a request reaches a loaded model.
        """
        found: Metrics = request.app.state.metrics
        return found.exposition()

    @app.exception_handler(RequestValidationError)
    async def refuse(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        return _told(request, BadRequest(f"{where}: {first['msg']}" if where else first["msg"]))

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

    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(server.origins),
        allow_origin_regex=_LOCAL_ORIGIN,
        allow_methods=["*"],
        allow_headers=["*"],
    )
    app.add_middleware(Guard, settings=server)
    return app


def _refused(request: Request, error: HTTPException) -> MoeinfError:
    """Return the error itself if it is ours, else the refusal that matches its status."""
    if isinstance(error, Refusal):
        return error
    for kind in (UnknownPath, WrongMethod):
        if kind.http_status == error.status_code:
            return kind(f"{request.method} {request.url.path} is not an endpoint")
    return BadRequest(error.detail)


def _told(request: Request, error: MoeinfError) -> JSONResponse:
    if request.url.path.startswith("/v1/"):
        return openai_api.error_response(error)
    return ollama_api.error_response(error)
