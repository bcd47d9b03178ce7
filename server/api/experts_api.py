"""Serve `/api/experts`: where each expert of a loaded model is, and how it is used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from moeinf.errors import NotFound, Unavailable
from moeinf.server.api.answers import BadRequest
from moeinf.server.engines.expert_map import ExpertMap
from moeinf.server.engines.model_manager import Loaded, ModelManager
from moeinf.server.http.bodies import JsonRoute
from moeinf.server.http.json_text import Answer, dump

if TYPE_CHECKING:
    from moeinf.runtime.engine.engine import Engine

EVERY_S = 0.25  # between two frames
MOST_STREAMS = 16  # of one server

router = APIRouter(route_class=JsonRoute)


class NotLoaded(NotFound, LookupError):
    """The model is not loaded, so its experts are nowhere in memory."""

    code = "not_loaded"
    hint = "`moeinf run MODEL`, which loads it"
    serve_hint = "`moeinf run MODEL hi` or a request to /api/generate loads it"


class TooManyStreams(Unavailable, RuntimeError):
    """The maximum number of clients is already watching experts."""

    code = "too_many_streams"
    hint = "the same request later"


@router.get("/api/experts")
async def experts(
    request: Request,
    model: Annotated[str, Query(max_length=500)] = "",
    stream: bool = False,
) -> Response:
    """Return where each expert is and its use, `tokens_per_s` and other speeds of 0.25 s.

    With `?stream=1` a line of it every 0.25 s, until the model is unloaded. `model` may be left out
    where one model is loaded. `map` has a byte per expert in base64, layer by layer: bits 0 and 1
    are the tier (0 disk, 1 RAM, 2 GPU), bit 2 a read in flight, bit 3 a use since the line before,
    bits 4 to 7 the heat.
    """
    app = request.app.state
    loaded = await _loaded(app.host, model)
    engine = loaded.worker.engine
    if engine is None:
        raise _not_loaded(str(loaded.manifest.model))
    found = await asyncio.to_thread(_watched, loaded, engine)
    if stream:
        if len(app.expert_streams) >= MOST_STREAMS:
            raise TooManyStreams(f"{MOST_STREAMS} clients are watching experts already")
        lines = _lines(found)
        app.expert_streams.add(lines)  # until it is freed, at the end of its response
        return StreamingResponse(lines, media_type="application/x-ndjson")
    await asyncio.sleep(EVERY_S)
    return Answer(await asyncio.to_thread(found.frame))


def _watched(loaded: Loaded, engine: Engine) -> ExpertMap:
    return ExpertMap(loaded.worker, engine)


async def _lines(found: ExpertMap) -> AsyncIterator[str]:
    """Yield a line per frame. Starlette ends this when the client leaves."""
    await asyncio.sleep(EVERY_S)
    while not found.gone:
        yield dump(await asyncio.to_thread(found.frame)) + "\n"
        await asyncio.sleep(EVERY_S)


async def _loaded(host: ModelManager, model: str) -> Loaded:
    """Return the model of that name, or the only one. Raises NotLoaded, BadRequest, NoSuchModel."""
    running = host.loaded()
    if not model:
        if len(running) > 1:
            names = ", ".join(str(one.manifest.model) for one in running)
            raise BadRequest(f"several models are loaded: add ?model= and one of {names}", "model")
        if not running:
            raise NotLoaded("no model is loaded")
        return running[0]
    name, _ = await asyncio.to_thread(host.library.find, model)
    for one in running:
        if one.manifest.model == name:
            return one
    raise _not_loaded(str(name))


def _not_loaded(name: str) -> NotLoaded:
    error = NotLoaded(f"{name} is not loaded")
    error.hint = f"`moeinf run {name}`, which loads it"
    error.serve_hint = f"`moeinf run {name} hi` or a request to /api/generate loads it"
    return error
