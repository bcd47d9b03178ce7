"""Accept connections of a stage, and check their keys beside each other.

A connection that proves no key holds a thread for GREET_S, and delays no other connection.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from moeinf.errors import reason
from moeinf.runtime.engine.pipeline.wire import Lost, Wire
from moeinf.runtime.visible import visible

GREET_S = 2.0  # to prove the key
MOST_GREETED = 64  # connections whose key is checked at a time; others wait in the system's queue
_MOST_WAITING = 8  # connections with the key, while another one is served
_PAUSE_S = 1.0  # after a connection that could not be accepted
_LOOK_S = 0.5  # between two looks whether the stage has ended

Peer = tuple[str, Wire]


class Greeter:
    """Yields the connections of a door whose other side has proved the key."""

    def __init__(
        self, door: socket.socket, key: str | None, silence_s: float, tell: Callable[[str], None]
    ) -> None:
        """Begin to accept. tell: is told what happens, in words; one thread at a time calls it."""
        self._door, self._key, self._silence_s, self._tell = door, key, silence_s, tell
        self._places = threading.BoundedSemaphore(MOST_GREETED)
        self._waiting: queue.Queue[Peer | BaseException] = queue.Queue()
        self._lock, self._ended = threading.Lock(), threading.Event()
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def tell(self, line: str) -> None:
        """Tell a line, in any thread."""
        with self._lock:
            self._tell(line)

    def next(self) -> Peer:
        """Wait for a connection with the key. Raises what ended the thread that accepts."""
        while True:
            found = self._waiting.get()
            if isinstance(found, BaseException):
                raise found
            if not found[1].arrives(0):  # else it has left: it waits for a message
                return found
            found[1].close()

    def close(self) -> None:
        """Accept no more, and hang up on those that wait."""
        self._ended.set()
        with suppress(queue.Empty):
            while True:
                self._drop_oldest()

    def _accept(self) -> None:
        try:
            self._door.settimeout(_LOOK_S)
            while not self._ended.is_set():
                self._accept_one()
        except BaseException as error:
            self._waiting.put(error)

    def _accept_one(self) -> None:
        with self._places:  # waits while too many are greeted
            pass
        try:
            end, (host, *_) = self._door.accept()
        except TimeoutError:
            return
        except OSError as error:
            if not self._ended.is_set():
                self.tell(f"a connection failed: {reason(error)}")
                time.sleep(_PAUSE_S)
            return
        self._places.acquire()
        try:
            threading.Thread(target=self._greet, args=(end, host), daemon=True).start()
        except RuntimeError as error:  # the system has no thread left
            self._places.release()
            end.close()
            self.tell(f"a connection failed: {reason(error)}")
            time.sleep(_PAUSE_S)

    def _greet(self, end: socket.socket, host: str) -> None:
        try:
            wire = Wire(end, self._silence_s)
            wire.prove(self._key, first=False, seconds=GREET_S)
            if self._waiting.qsize() >= _MOST_WAITING:
                with suppress(queue.Empty):
                    self._drop_oldest()
            self._waiting.put((host, wire))
        except Exception as error:  # Lost, or such as no memory
            end.close()
            words = str(error) if isinstance(error, Lost) else visible(reason(error))
            self.tell(f"not connected with {host}: {words}")
        finally:
            self._places.release()

    def _drop_oldest(self) -> None:
        """Hang up on the connection that waits longest. Raises queue.Empty."""
        found = self._waiting.get_nowait()
        if isinstance(found, tuple):
            found[1].close()
        else:
            self._waiting.put(found)
            raise queue.Empty
