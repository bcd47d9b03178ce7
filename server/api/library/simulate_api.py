"""Serve `/api/simulate`: the hit rate that other memory would give, from a model's recording."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from moeinf.runtime.jobs.memory_curve import MemoryCurves
from moeinf.server.api.library.background import Client, Line, Turns, respond

router = APIRouter()
_TURNS = Turns()


@router.get("/api/simulate")
async def simulate(model: str, request: Request) -> Response:
    """Return hit rates over memory, from replays of the model's newest `moeinf trace`.

    `trace` has the results of `moeinf simulate --json` for the server's policy, `lru` and `belady`,
    which no policy can exceed. The replays run in a process of low priority; a later request gets
    the same results until the next trace. A model without a trace gets status 404.
    """
    state = request.app.state

    def work(client: Client) -> Line:
        with _TURNS.turn(client):
            if state.curves is None:
                state.curves = MemoryCurves(state.settings)
            curves: MemoryCurves = state.curves
            return curves.curve(model, state.config.policy, client.check)

    return await respond(request, "simulate", work, stream=False)
