"""Serve `/api/verify`: hash a model's files again for a client, which reads how far it is."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from moeinf.runtime.library import verify as checks
from moeinf.runtime.library.library import Library
from moeinf.server.api.fields.optional import RequestObject
from moeinf.server.api.library.background import Client, Line, Progress, Turns, respond
from moeinf.server.http.bodies import JsonRoute

router = APIRouter(route_class=JsonRoute)
_TURNS = Turns()


class VerifyRequest(RequestObject):
    """A check of an installed model. It repairs nothing."""

    model: str
    stream: bool = True


@router.post("/api/verify")
async def verify(asked: VerifyRequest, request: Request) -> Response:
    """Send a line per hundredth; the last has the `damaged` files of `moeinf verify --json`.

    Damaged files are restored by `moeinf verify MODEL --repair`.
    """
    library = Library(request.app.state.settings)

    def work(client: Client) -> Line:
        return _verify(asked.model, library, client)

    return await respond(request, "verify", work, asked.stream)


def _verify(model: str, library: Library, client: Client) -> Line:
    with _TURNS.turn(client):
        manifest, folder = library.read(model)
        damages = checks.verify(folder, manifest, Progress(client, manifest.digest))
    found = [{"path": one.path, "problem": one.problem} for one in damages]
    about = {"model": str(manifest.model), "files": len(manifest.files), "damaged": found}
    return {"status": "damaged" if found else "success", **about, "repaired": False}
