"""Accept connections up to a bound, so that descriptors remain for models and their processes.

asyncio accepts without a bound, and writes a traceback for each connection that has no descriptor.
Here the connection that has waited longest for a request leaves for a new one. Where all have
requests, the new one is closed at once.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_LOG = logging.getLogger("uvicorn.error")
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_MOST_REFUSED = 64  # in a row: then the loop has its turn
_PAUSE_S = 0.01  # where the system has nothing left: a loop without it would burn a core
_TELL_EVERY_S = 1.0


class Listener(socket.socket):
    """A listening socket with at most `most` open connections.

    make_room: closes a connection without a request; returns whether it found one.
    """

    def __init__(self, family: int, most: int) -> None:
        super().__init__(family)
        self.make_room: Callable[[], bool] = lambda: False
        self._most = most
        self._open: list[socket.socket] = []
        self._spare = os.open(os.devnull, os.O_RDONLY)  # accepts what is then closed
        self._closed, self._told = 0, 0.0

    def accept(self) -> tuple[socket.socket, Any]:
        """Return a connection. Raises BlockingIOError if the loop is to look again later."""
        for _ in range(_MOST_REFUSED):
            full = self._is_full()
            if full and self.make_room():
                self._count()
                raise BlockingIOError  # the descriptor is free at the next look
            try:
                connection, address = super().accept()
            except OSError as error:
                if error.errno not in _SCARCE:
                    raise
                self._give_way()
                raise BlockingIOError from error
            if not full:
                self._open.append(connection)
                return connection, address
            connection.close()
            self._count()
        raise BlockingIOError

    def close(self) -> None:
        """Close the socket and the spare descriptor."""
        super().close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def _is_full(self) -> bool:
        if len(self._open) >= self._most:
            self._open = [one for one in self._open if one.fileno() >= 0]
        return len(self._open) >= self._most

    def _give_way(self) -> None:
        """Close a connection when no descriptor is left for a new one."""
        self._count()
        if self.make_room():
            return
        if self._spare < 0:
            time.sleep(_PAUSE_S)
        else:
            os.close(self._spare)
            self._spare = -1
            with suppress(OSError):
                super().accept()[0].close()
        with suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY)

    def _count(self) -> None:
        """Count a closed connection; write at most one line a second."""
        self._closed += 1
        if time.monotonic() - self._told >= _TELL_EVERY_S:
            _LOG.warning(
                "closed %d connections: more than %d are too many", self._closed, self._most
            )
            self._closed, self._told = 0, time.monotonic()
