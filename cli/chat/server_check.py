"""Check, with one deadline, if `run` can use the server at MOEINF_HOST.

Any program may listen there. It may send nothing, a byte a second, an endless line, or something
else than HTTP. In every case the check ends in time, and its outcome is a server or a reason.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from moeinf.cli.chat.client import UNPROVED, Client, ServerError
from moeinf.runtime.library.library import NoSuchModel
from moeinf.runtime.names import BadName, parse_name
from moeinf.runtime.version import version

LOOK_S = 2.0
KNOWN_LOOK_S = 30.0  # a process of ours listens: it may be starting, or loading a model
_HELLO = b"moeinf is running"
_MOST_BYTES = 4 << 20
_ABSENT = (NoSuchModel.code, BadName.code)  # for example a path, which this process pulls


@dataclass(frozen=True)
class Found:
    """The outcome of a check.

    about    the document of /api/show for the model; None: the server cannot answer with it
    reason   why no server can be used; empty when one can
    silent   nothing listens, so that no note is needed
    """

    about: dict[str, Any] | None = None
    reason: str = ""
    silent: bool = False


@dataclass
class _Look:
    """The requests of a check, on a separate thread."""

    client: Client
    model: str
    connection: http.client.HTTPConnection
    found: Found | None = None
    error: ServerError | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        try:
            self.found = self._find()
        except ServerError as error:
            self.error = error
        except ConnectionRefusedError:
            self.found = Found(reason=f"no server at {self.client}", silent=True)
        except Exception as error:  # a server of moeinf does not answer like this
            self.found = _other(self.client, type(error).__name__)
        finally:
            self.connection.close()
            self.ended.set()

    def _find(self) -> Found:
        client = self.client
        try:
            if self._ask("GET", "/") != _HELLO:
                return _other(client, "its answer to GET / is unexpected")
            theirs = json.loads(self._ask("GET", "/api/version"))["version"]
        except ServerError as error:
            return _other(client, str(error))
        if not isinstance(theirs, str) or theirs != version():
            reason = f"the server at {client} is moeinf {str(theirs)[:40]}, this is {version()}"
            return Found(reason=reason)
        try:
            about = json.loads(self._ask("POST", "/api/show", {"model": self.model}))
        except ServerError as error:
            if error.said in _ABSENT:
                return Found()
            if error.said == UNPROVED:
                return Found(reason=str(error))
            raise
        capabilities = about.get("capabilities") or ()
        try:
            parse_name(about["model"])
        except BadName:
            return _other(client, "its model has no name")
        return Found(about if "completion" in capabilities else None)  # else: for translation

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        data = self.client.sent(self.connection, method, path, body).read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError("the answer is too long")
        return data


def look(client: Client, model: str) -> Found:
    """Return what listens there.

    Takes at most LOOK_S, or KNOWN_LOOK_S for a server that is trusted or of this home. Raises
    ServerError when a moeinf server refuses.
    """
    seconds = KNOWN_LOOK_S if client.trusted or client.proved else LOOK_S
    one = _Look(client, model, client.connection(seconds))
    threading.Thread(target=one.run, daemon=True).start()
    if not one.ended.wait(seconds):
        with suppress(OSError, AttributeError):  # not connected yet, or closed already
            one.connection.sock.shutdown(socket.SHUT_RDWR)
        return _other(client, f"it does not answer within {seconds:.0f} s")
    if one.error is not None:
        raise one.error
    assert one.found is not None
    return one.found


def _other(client: Client, why: str) -> Found:
    return Found(reason=f"no moeinf server at {client} ({why[:200]})")
