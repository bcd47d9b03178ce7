"""Serve `/api/create`: a name with defaults of its own, with Ollama's request and statuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import ConfigDict, Field

from moeinf.runtime.config import Settings
from moeinf.runtime.jobs.create import create_model
from moeinf.runtime.library.blobs import Blobs
from moeinf.runtime.library.defaults import DefaultMessage
from moeinf.runtime.library.library import NoSuchModel
from moeinf.runtime.library.modelfile import Modelfile, jinja, set_parameter
from moeinf.runtime.names import is_path
from moeinf.runtime.sizes import Progress as Bar
from moeinf.server.api.answers import BadRequest
from moeinf.server.api.fields.bounds import Listed, Named
from moeinf.server.api.fields.optional import RequestObject
from moeinf.server.api.library.background import Client, Line, Progress, Turns, respond
from moeinf.server.api.ollama_api import ModelRequest
from moeinf.server.http.bodies import JsonRoute
from moeinf.server.http.request_log import notes_of

router = APIRouter(route_class=JsonRoute)
_TURNS = Turns()
_REFUSED = {
    "modelfile": "send its commands as from, system, template, parameters, messages and license, "
    "or use `moeinf create NAME -f Modelfile`",
    "path": "use `moeinf create NAME -f Modelfile`",
    "adapters": "adapters (LoRA) are not supported; merge them into the checkpoint first",
    "quantize": "name the model with a tag, as in from: mixtral:q8",
    "quantization": "name the model with a tag, as in from: mixtral:q8",
    "renderer": "a model's chat template writes its prompts; use template",
    "parser": "answers are parsed by the model's chat template",
}


class CreateMessage(RequestObject):
    """A message that stands before those of every chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class CreateRequest(ModelRequest):
    """A new name. files: names of GGUF files, with the digests of their uploads."""

    model_config = ConfigDict(extra="allow")
    from_: str = Field("", alias="from")
    files: Named[str] = {}  # noqa: RUF012  # pydantic copies it
    template: str | None = None
    license: str | Listed[str] | None = None
    system: str | None = None
    parameters: dict[str, Any] = {}  # noqa: RUF012
    messages: Listed[CreateMessage] = []  # noqa: RUF012
    stream: bool = True

    def modelfile(self) -> Modelfile:
        """Return the request as a Modelfile. Raises BadRequest and InvalidValue."""
        others = self.model_extra or {}
        for name, why in _REFUSED.items():
            if others.get(name):
                raise BadRequest(f"{name} is not supported ({why})", name)
        base = self.from_
        if bool(base) == bool(self.files):
            raise BadRequest("one of from (a model) and files (uploads) is needed", "from")
        if is_path(base):
            raise BadRequest("from: a folder of this machine needs `moeinf create`", "from")
        licences = [self.license] if isinstance(self.license, str) else list(self.license or ())
        messages = [DefaultMessage(one.role, one.content) for one in self.messages]
        found = Modelfile(base, self.system, messages=messages, licences=licences)
        found.template = None if self.template is None else jinja(self.template)
        for name, value in self.parameters.items():
            if value is not None:
                set_parameter(found, name, value)
        return found


@router.post("/api/create")
async def create(asked: CreateRequest, request: Request) -> Response:
    """Send a line per step; the last line is success or an error."""
    target, given = asked.wanted, asked.modelfile()
    notes_of(request).ignore(name for name in asked.model_extra or () if name not in _REFUSED)
    with suppress(NoSuchModel):
        await request.app.state.host.unload(target, only_idle=True)
    settings, blobs = request.app.state.settings, request.app.state.blobs

    def work(client: Client) -> Line:
        with _TURNS.turn(client):
            return _create(target, given, asked.files, settings, blobs, client)

    return await respond(request, f"create {target[:40]}", work, asked.stream)


def _create(
    target: str,
    given: Modelfile,
    files: dict[str, str],
    settings: Settings,
    blobs: Blobs,
    client: Client,
) -> Line:
    def note(text: str) -> None:
        client.say({"status": text})

    @contextmanager
    def bars(name: str) -> Iterator[Bar]:
        yield Progress(client, name)

    uploads = blobs.opened(files) if files else nullcontext()
    with uploads as folder:
        uploaded = None if folder is None else folder / min(files)
        create_model(settings, target, given, note, bars, note, uploaded)
    for digest in files.values():
        blobs.remove(digest)
    return {"status": "success"}
