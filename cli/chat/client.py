"""Talk to a moeinf server: exchange JSON documents, and stream answers line by line.

A blocking read cannot notice Ctrl-C, so a separate thread reads. When the caller leaves an answer,
its connection is closed, and the server stops the answer.

Where MOEINF_API_KEY is set, the key and all requests but two go to a proved listener only. A
listener is proved when a live process has entered the address in $MOEINF_HOME/run and still holds
the lock of that entry. This is checked before each request. A server that the user trusts needs no
proof.
"""

from __future__ import annotations

import http.client
import json
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from moeinf.errors import Unavailable, reason
from moeinf.runtime.library.processes import LiveServer, Registry
from moeinf.runtime.sampling.schema_limits import BadFormat

_GOODBYE_SECONDS = 1.0
_MOST_LINE_BYTES = 16 << 20
_LOOK_EVERY_S = 0.05  # between two checks for Ctrl-C
UNPROVED = "unproved"  # ServerError.said: the key is set, and the listener may be a stranger's
_OPEN = ("/", "/api/version")  # they tell a stranger nothing
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # any address -> loopback


class ServerError(Unavailable, RuntimeError):
    """A server has refused, or its answer was cut off.

    said: the server's error code, empty without one. status: the HTTP status, 0 without one.
    """

    code = "server"
    hint = "`moeinf stop --all`, which ends that server, or `moeinf run --no-server`"

    def __init__(self, message: str, said: str = "", status: int = 0) -> None:
        super().__init__(message)
        self.said = said
        self.status = status
        if said == BadFormat.code:  # wrong usage, as without a server
            self.code, self.hint = BadFormat.code, BadFormat.hint
            self.exit_code = BadFormat.exit_code


@dataclass(frozen=True)
class Client:
    """One server. address: HOST:PORT in the entry that proves the server; None without one."""

    host: str
    port: int
    api_key: str | None = None
    address: str | None = None
    registry: Registry | None = None
    trusted: bool = False  # by the user: it gets the key

    @classmethod
    def of(
        cls, host: str, port: int, api_key: str | None, registry: Registry, trusted: bool = False
    ) -> Client:
        """Return the client of a server; connect to the numeric address if an entry has it."""
        host = _ANYWHERE.get(host, host)
        for server in registry.servers():
            named, _, number = server.address.rpartition(":")
            named = named.strip("[]")
            if number == str(port) and host in _names_of(named):
                here = _ANYWHERE.get(named, named)
                return cls(here, port, api_key, server.address, registry, trusted)
        return cls(host, port, api_key, None, registry, trusted)

    @classmethod
    def at(cls, server: LiveServer, api_key: str | None, registry: Registry) -> Client:
        """Return the client of a live server."""
        host, _, port = server.address.rpartition(":")
        return cls.of(host.strip("[]"), int(port), api_key, registry)

    @property
    def proved(self) -> bool:
        """True while a live process of this home listens at the address."""
        if self.registry is None or self.address is None:
            return False
        return any(server.address == self.address for server in self.registry.servers())

    @property
    def unproved(self) -> bool:
        """True if a key is set for servers of this home, and this may not be one of them."""
        return bool(self.api_key) and not (self.trusted or self.proved)

    def __str__(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def post(self, path: str, body: dict[str, Any], timeout: float | None = None) -> dict[str, Any]:
        """Send a JSON document and return the answer's. Raises ServerError, OSError."""
        return self.ask("POST", path, body, timeout)

    def ask(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: float | None = None
    ) -> dict[str, Any]:
        """Send a JSON document and return the answer's. Raises ServerError, OSError."""
        connection = self.connection(timeout)
        try:
            found = json.loads(self.sent(connection, method, path, body).read() or b"{}")
        except (http.client.HTTPException, ValueError, RecursionError) as error:
            raise ServerError(
                f"{self} does not answer in HTTP and JSON: {reason(error)}"
            ) from error
        finally:
            connection.close()
        return found if isinstance(found, dict) else {}

    def lines(
        self,
        path: str,
        body: dict[str, Any] | None,
        stopped: Callable[[], bool],
        method: str = "POST",
    ) -> Iterator[dict[str, Any]]:
        """Yield the documents of a stream until it ends or `stopped` is true.

        Raises ServerError.
        """
        connection = self.connection(None)
        arrived: queue.Queue[dict[str, Any] | Exception | None] = queue.Queue()
        reader = threading.Thread(
            target=self._read, args=(connection, method, path, body, arrived), daemon=True
        )
        reader.start()
        try:
            while not stopped():
                try:
                    found = arrived.get(timeout=_LOOK_EVERY_S)
                except queue.Empty:
                    continue
                if found is None:
                    return
                if isinstance(found, Exception):
                    raise found
                yield found
        finally:
            with suppress(OSError, AttributeError):  # not connected yet, or closed already
                connection.sock.shutdown(2)
            reader.join(_GOODBYE_SECONDS)
            connection.close()

    def _read(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        arrived: queue.Queue[dict[str, Any] | Exception | None],
    ) -> None:
        try:
            response = self.sent(connection, method, path, body)
            while line := response.readline(_MOST_LINE_BYTES):
                found = json.loads(line)
                if not isinstance(found, dict):
                    raise ServerError(f"{self} answers with something other than JSON documents")
                if "error" in found:
                    raise _error(found)
                arrived.put(found)
            arrived.put(None)
        except ServerError as error:
            arrived.put(error)
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            arrived.put(ServerError(f"the connection to {self} was lost ({reason(error)})"))

    def connection(self, timeout: float | None) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout)

    def sent(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
    ) -> http.client.HTTPResponse:
        """Send a request and return its response. Raises ServerError, OSError, HTTPException."""
        headers = {"Content-Type": "application/json"}
        if self.unproved:
            if path not in _OPEN:
                raise _unproved(self)
        elif self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        if response.status >= 400:
            raise _error(response.read(_MOST_LINE_BYTES), response.status)
        return response


def serving(registry: Registry, model: str) -> list[LiveServer]:
    """Return the servers that have an engine of the model."""
    pids = {engine.pid for engine in registry.engines() if engine.model == model}
    return [server for server in registry.servers() if server.pid in pids]


def _unproved(client: Client) -> ServerError:
    error = ServerError(
        f"the server at {client} is not one of this home, and gets no MOEINF_API_KEY and no "
        "prompt unless --server is given",
        UNPROVED,
    )
    error.hint = "--server, if you trust that server"
    return error


def _names_of(host: str) -> tuple[str, ...]:
    """Return the names by which a client on this machine can reach a listening address."""
    if host in ("127.0.0.1", "::1"):
        return (host, "localhost")
    return (host, _ANYWHERE[host], "localhost") if host in _ANYWHERE else (host,)


def _error(said: Any, status: int = 0) -> ServerError:
    """Return the error of a {"error": words, "code": name} document or of its bytes."""
    if isinstance(said, bytes):
        try:
            said = json.loads(said)
        except (ValueError, RecursionError):
            said = {}
    about = said if isinstance(said, dict) else {}
    words = str(about.get("error") or f"the server answers with status {status}")
    return ServerError(words, str(about.get("code") or ""), status)
