"""Change the memory of a loaded model's experts, without an end to its answers."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from moeinf.offload.store.budget import DoesNotFit
from moeinf.runtime.sizes import parse_memory_or_auto
from moeinf.server.api.answers import BadRequest
from moeinf.server.api.fields.optional import RequestObject
from moeinf.server.engines.model_manager import ModelManager
from moeinf.server.http.bodies import JsonRoute

router = APIRouter(route_class=JsonRoute)


class MemoryRequest(RequestObject):
    """memory: a size (6GiB), a number of bytes, a share of all experts (50%), or auto."""

    model: str
    memory: str | int


@router.post("/api/memory")
async def memory(asked: MemoryRequest, request: Request) -> dict[str, Any]:
    """Return the memory that the experts have from now on."""
    host: ModelManager = request.app.state.host
    name, _ = await asyncio.to_thread(host.library.find, asked.model)
    found = [one for one in host.loaded() if one.manifest.model == name]
    engine = found[0].worker.engine if found else None
    if engine is None:
        raise BadRequest(f"{name} is not loaded", "model")
    size = parse_memory_or_auto(str(asked.memory))
    try:
        await asyncio.to_thread(engine.set_memory, size)
    except DoesNotFit as error:
        if size is not None:
            error.http_status = 400  # the same request fails at any time
        raise
    info = engine.info
    return {
        "model": str(name),
        "memory": info.experts_bytes,
        "slots": info.slots,
        "experts": info.experts,
        "auto": size is None,
    }
