"""Talks to a server of ours: whether there is one, and answers line by line.

Does not know models or conversations. A waiting read could not notice Ctrl-C, so a thread of its
own reads; leaving an answer closes its connection, and that is how a server hears that it may stop.
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

from moeinf.runtime.config import ServerSettings

_HELLO = b"moeinf is running"
_HELLO_SECONDS = 1.0
_LOOK_EVERY_S = 0.05  # whether Ctrl-C has been pressed
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # a server's way to say: here


class ServerError(RuntimeError):
    """A server has refused, or its answer was cut off. code: the error's name there, if it said."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Client:
    """One server."""

    host: str
    port: int
    api_key: str | None = None

    @classmethod
    def of(cls, settings: ServerSettings) -> Client:
        host = _ANYWHERE.get(settings.host, settings.host)
        return cls(host, settings.port, settings.api_key)

    def __str__(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def version(self) -> str | None:
        """The version of the moeinf that listens there; None when none does."""
        connection = self._connection(_HELLO_SECONDS)
        try:
            if self._ask(connection, "GET", "/") != _HELLO:
                return None
            said = json.loads(self._ask(connection, "GET", "/api/version"))
            return str(said["version"])
        except (
            ServerError,
            OSError,
            ValueError,
            LookupError,
            TypeError,
            http.client.HTTPException,
        ):
            return None  # nobody, or somebody else
        finally:
            connection.close()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """One JSON document for another. Raises ServerError, OSError."""
        connection = self._connection(None)
        try:
            found = json.loads(self._ask(connection, "POST", path, body))
        except http.client.HTTPException as error:
            raise ServerError(f"{self} does not answer in HTTP: {error!r}") from error
        finally:
            connection.close()
        return found if isinstance(found, dict) else {}

    def lines(
        self, path: str, body: dict[str, Any], stopped: Callable[[], bool]
    ) -> Iterator[dict[str, Any]]:
        """The documents of a stream, until it ends or `stopped` says so. Raises ServerError."""
        connection = self._connection(None)
        arrived: queue.Queue[dict[str, Any] | Exception | None] = queue.Queue()
        reader = threading.Thread(
            target=self._read, args=(connection, path, body, arrived), daemon=True
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
            with suppress(OSError, AttributeError):  # it may not be connected yet, or no more
                connection.sock.shutdown(2)
            reader.join(_HELLO_SECONDS)
            connection.close()

    def _read(
        self,
        connection: http.client.HTTPConnection,
        path: str,
        body: dict[str, Any],
        arrived: queue.Queue[dict[str, Any] | Exception | None],
    ) -> None:
        try:
            response = self._sent(connection, "POST", path, body)
            while line := response.readline():
                found = json.loads(line)
                if "error" in found:
                    raise _error(found)
                arrived.put(found)
            arrived.put(None)
        except ServerError as error:
            arrived.put(error)
        except (OSError, ValueError, http.client.HTTPException) as error:
            arrived.put(ServerError(f"the connection to {self} was lost ({error!r})"))

    def _connection(self, timeout: float | None) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout)

    def _ask(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
    ) -> bytes:
        return self._sent(connection, method, path, body).read()

    def _sent(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
    ) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        if response.status >= 400:
            raise _error(response.read(), response.status)
        return response


def _error(said: Any, status: int = 0) -> ServerError:
    """From {"error": words, "code": name}, as it is or as bytes; status: of HTTP."""
    if isinstance(said, bytes):
        try:
            said = json.loads(said)
        except ValueError:
            said = {}
    about = said if isinstance(said, dict) else {}
    words = str(about.get("error") or f"the server answers with status {status}")
    return ServerError(words, str(about.get("code") or ""))
