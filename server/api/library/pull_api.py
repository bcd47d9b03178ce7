"""Serve `/api/pull`: fetch and repack a model for a client, with Ollama's progress lines.

A pull ends when the client that reads its lines leaves. The fetched bytes are kept, and the next
pull resumes there.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from moeinf.runtime.config import Settings
from moeinf.runtime.hub.resolve import find_source
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.repacking.repack import repack
from moeinf.runtime.names import is_path
from moeinf.server.api.answers import BadRequest
from moeinf.server.api.fields.optional import RequestObject
from moeinf.server.api.library.background import Client, Line, Progress, Turns, respond
from moeinf.server.http.bodies import JsonRoute

router = APIRouter(route_class=JsonRoute)
_SUCCESS = {"status": "success"}
_TURNS = Turns(at_once=4)  # each has up to ten threads


class PullRequest(RequestObject):
    """A pull. Old clients send `name` instead of `model`. `insecure` has no effect here."""

    model: str = ""
    name: str = ""
    insecure: bool = False
    stream: bool = True
    username: str | None = None
    password: str | None = None


@router.post("/api/pull")
async def pull(asked: PullRequest, request: Request) -> Response:
    """Send a line per phase and per hundredth of it; the last line is success or an error."""
    wanted = asked.model or asked.name
    if not wanted:
        raise BadRequest("model is missing")
    if is_path(wanted):
        raise BadRequest("a folder of this machine is pulled with `moeinf pull`, not over HTTP")
    settings = request.app.state.settings

    def work(client: Client) -> Line:
        with _TURNS.turn(client):
            return _pull(wanted, settings, client)

    return await respond(request, f"pull {wanted[:40]}", work, asked.stream)


def _pull(wanted: str, settings: Settings, client: Client) -> Line:
    def note(text: str) -> None:
        client.say({"status": text})

    name, source = find_source(wanted, None, settings, note, stop=client.stop)
    note("pulling manifest")
    library = Library(settings)
    progress = Progress(client, source.revision or str(name))
    if library.made_of(name, source.origin, source.revision) is None:
        repack(source, library, name, progress, note)
    else:
        note(f"{name} is up to date")
    return _SUCCESS
