"""Start a server in the background for `moeinf run`, when none listens at MOEINF_HOST.

    run ──lock of run/.starting──▶ moeinf serve --background ──▶ entry in run/ ──▶ run uses it

The server has a session of its own and keeps no descriptor of `run`: a pipe that `run` writes to
ends with `run`. The server ends when it has had no model and no request for UNUSED_S seconds.
"""

from __future__ import annotations

import http.client
import ipaddress
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from moeinf.cli.chat.client import Client, ServerError
from moeinf.cli.output import Output
from moeinf.errors import problem
from moeinf.runtime.config import ServerSettings, Settings
from moeinf.runtime.files.atomic import make_folder_durably
from moeinf.runtime.library.processes import Registry
from moeinf.runtime.server_log import last_lines, open_log
from moeinf.runtime.system import check_locks, lock

UNUSED_S = 10.0
_START_S = 120.0  # until the new server listens, on a slow or busy machine
_LOOK_EVERY_S = 0.05
_CONNECT_S = 1.0
# -P: do not import a module from the working directory
_SERVE = (sys.executable, "-P", "-c", "from moeinf.cli.entry import main; main()", "serve")


class Service:
    """The server at MOEINF_HOST, which may or may not listen. `client` talks to it.

    may_start: True if a server may be started at this address.
    """

    def __init__(
        self, settings: Settings, server: ServerSettings, trusted: bool, out: Output
    ) -> None:
        self._settings, self._server, self._trusted, self._out = settings, server, trusted, out
        self.may_start = _may_start(server) and not trusted
        self.client = self._find()

    def start(self, *, note: bool = True) -> str:
        """Start a server; return why that failed, else "". note: print that it starts."""
        if note:
            self._out.note(f"starting the server at {self.client}, which ends by itself when idle")
        with self._out.spinner("starting a server"):
            why = _start_once(self._settings, self._server)
        self.client = self._find()
        return why

    def ready(self) -> Client:
        """Return a client for the next request; start the server again if it has ended.

        Raises ServerError.
        """
        ended = self.client.address is not None and not self.client.proved
        if ended and self.may_start and (why := self.start()):
            raise ServerError(why)
        return self.client

    def _find(self) -> Client:
        server, registry = self._server, Registry(self._settings.run)
        return Client.of(server.host, server.port, server.api_key, registry, self._trusted)


def _may_start(server: ServerSettings) -> bool:
    """Return True at an address that only this machine can reach, unless the user forbids it."""
    return server.autostart and server.port > 0 and _is_loopback(server.host)


def _start_once(settings: Settings, server: ServerSettings) -> str:
    """Start a server and wait until it listens; return why that failed, else an empty string.

    When several processes call this at the same time, the first one starts the server, and the
    others wait for it.
    """
    try:
        with _only_starter(settings):
            return "" if _listens(server) else _start(settings, server)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return f"no server could be started ({where}{problem(error)})"


def _start(settings: Settings, server: ServerSettings) -> str:
    log = open_log(settings)
    try:
        before = os.fstat(log).st_size
        process = subprocess.Popen(
            [*_SERVE, "--background", str(UNUSED_S)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=settings.home,  # so that no other folder is kept in use
            env={**os.environ, "MOEINF_HOME": settings.homes},
            start_new_session=True,  # the end of this terminal does not end the server
        )
        why = _wait(process, settings, server)
        said = last_lines(log, before) if why else ""
        return f"{why}: {said}" if said else why
    finally:
        os.close(log)


def _wait(process: subprocess.Popen[bytes], settings: Settings, server: ServerSettings) -> str:
    """Wait until the server answers; return why it does not, else an empty string."""
    registry, deadline = Registry(settings.run), time.monotonic() + _START_S
    answers = False
    try:
        while process.poll() is None and time.monotonic() < deadline:
            listens = any(one.pid == process.pid for one in registry.servers())
            status = _status(server, deadline - time.monotonic()) if listens else None
            answers = status == http.client.OK
            if answers:
                threading.Thread(target=process.wait, daemon=True).start()  # no zombie is left
                return ""
            if status is not None:  # such as no thread for an answer
                return f"the server answers with status {status} as it started"
            time.sleep(_LOOK_EVERY_S)
        if process.returncode is None:
            return f"the server did not start within {_START_S:.0f} s"
        return f"the server ended with exit code {process.returncode} as it started"
    finally:
        if not answers:  # also after Ctrl-C
            process.kill()
            process.wait()


@contextmanager
def _only_starter(settings: Settings) -> Iterator[None]:
    """Hold the lock of the one process that may start a server in this home. Raises OSError."""
    check_locks()
    make_folder_durably(settings.run)
    flags = os.O_RDWR | os.O_CREAT
    descriptor = os.open(settings.run / ".starting", flags, 0o600)
    try:
        lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _listens(server: ServerSettings) -> bool:
    try:
        socket.create_connection((server.host, server.port), _CONNECT_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:  # a full queue of connections: a process listens
        pass
    return True


def _status(server: ServerSettings, seconds: float) -> int | None:
    """Return the status of an answer of the server; None: it does not come in time."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=max(seconds, 0.1))
    try:
        connection.request("GET", "/")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
