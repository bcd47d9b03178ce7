"""Serve `/api/plan`: whether a model runs on this machine, and how fast.

A web page can make a browser send a GET, but no POST that the Guard does not see. So only a POST
reads the headers of a source that the request names.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from moeinf.runtime.jobs.plan_model import plan_model
from moeinf.runtime.library.library import Library
from moeinf.runtime.names import is_path
from moeinf.server.api.answers import BadRequest
from moeinf.server.api.fields.optional import RequestObject
from moeinf.server.api.library.background import Client, Line, Turns, respond
from moeinf.server.http.bodies import JsonRoute

router = APIRouter(route_class=JsonRoute)
_TURNS = Turns()


class PlanRequest(RequestObject):
    """A plan of any model that has a name."""

    model: str


@router.get("/api/plan")
async def plan_installed(model: str, request: Request) -> Response:
    """Return the document of `moeinf plan MODEL --json` for the options of this server.

    The model must be pulled.
    """
    return await _planned(model, request, installed=True)


@router.post("/api/plan")
async def plan(asked: PlanRequest, request: Request) -> Response:
    """Return the same for any model. If it is not pulled, the headers of its source are read."""
    return await _planned(asked.model, request, installed=False)


async def _planned(model: str, request: Request, installed: bool) -> Response:
    if is_path(model):
        raise BadRequest("a folder of this machine is planned with `moeinf plan`, not over HTTP")
    config, settings = request.app.state.config, request.app.state.settings

    def work(client: Client) -> Line:
        with _TURNS.turn(client):
            if installed:
                Library(settings).find(model)
            return plan_model(model, config, settings, lambda _: None, client.stop).document()

    return await respond(request, "plan", work, stream=False)
