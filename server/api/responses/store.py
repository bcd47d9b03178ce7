"""Keep responses for later requests, in RAM and within limits. They are gone after a restart."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from moeinf.errors import NotFound
from moeinf.server.http.bodies import Body

MOST_RESPONSES = 1000
MOST_STORED_BYTES = 32 << 20  # of their JSON

Items = Callable[[], list[dict[str, Any]]]


class NoSuchResponse(NotFound):
    """No response of the id is stored."""

    code = "response_not_found"
    hint = "the whole conversation in `input`"


@dataclass(frozen=True)
class Stored:
    """A response as JSON: its document; its own input items, `own` of them, and its output."""

    document: bytes
    items: bytes
    own: int
    containers: int  # objects and lists in items
    ids: tuple[str, ...]  # of the items that have an id of this server
    named: frozenset[str]  # all ids, those of clients too
    previous: str | None

    @classmethod
    def of(
        cls, document: dict[str, Any], items: list[dict[str, Any]], made: Iterable[str]
    ) -> Stored:
        """Return a response in the form that is kept. Any thread may call it.

        made: ids of items that this server made. Other clients may choose the others, too, so that
        `ResponseStore.items` does not find them.
        """
        output = [_plain(item) for item in document["output"]]
        said = [*items, *output]
        ids = tuple(dict.fromkeys([*made, *(item["id"] for item in output)]))
        named = frozenset(item["id"] for item in said)
        texts, previous = (_text(document), _text(said)), document["previous_response_id"]
        return cls(*texts, len(items), _containers(said), ids, named, previous)

    @property
    def size(self) -> int:
        return len(self.document) + len(self.items) + sum(map(len, self.named))

    def admit(self, body: Body) -> None:
        """Count the memory of the items that are about to be read. Raises BodiesTooLong."""
        body.hold(len(self.items))
        body.admit(self.containers)

    def read(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.items.decode("utf-8", "surrogatepass"))
        return found


class ResponseStore:
    """The responses used last. The event loop calls all methods.

    Long reading is returned as a function, for any thread. `body` is of the request that reads;
    it counts the memory.
    """

    def __init__(self) -> None:
        self._stored: OrderedDict[str, Stored] = OrderedDict()  # the oldest use first
        self._places: dict[str, list[str]] = {}  # the responses of each item, by ids of this server
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, name: str, one: Stored) -> None:
        """Keep a response; those with the oldest use leave. One beyond the limit is not kept."""
        if one.size > MOST_STORED_BYTES:
            return
        self._stored[name] = one
        for item in one.ids:
            self._places.setdefault(item, []).append(name)
        self.held_bytes += one.size
        while len(self._stored) > MOST_RESPONSES or self.held_bytes > MOST_STORED_BYTES:
            self._forget(next(iter(self._stored)))

    def document(self, name: str) -> Callable[[], dict[str, Any]]:
        """Return a function that reads a response's document. Raises NoSuchResponse."""
        text = self._used(name).document
        return lambda: dict(json.loads(text.decode("utf-8", "surrogatepass")))

    def delete(self, name: str) -> None:
        """Forget a response. Raises NoSuchResponse."""
        self._used(name)
        self._forget(name)

    def input_of(self, name: str, body: Body) -> Items:
        """Return a function that reads all items that a response answers, the oldest first.

        Raises NoSuchResponse also for an earlier response, BodiesTooLong.
        """
        *before, last = self._admitted(name, body)

        def read() -> list[dict[str, Any]]:
            return [*(item for one in before for item in one.read()), *last.read()[: last.own]]

        return read

    def conversation(self, name: str, body: Body) -> Items:
        """Return a function that reads a response's conversation, its output included.

        Raises NoSuchResponse, BodiesTooLong.
        """
        chain = self._admitted(name, body)
        return lambda: [item for one in chain for item in one.read()]

    def named(self, name: str) -> set[str]:
        """Return the ids of a conversation's items. Raises NoSuchResponse."""
        return {item for one in self._chain(name) for item in one.named}

    def items(self, names: Iterable[str], body: Body) -> Callable[[], dict[str, dict[str, Any]]]:
        """Return a function that reads stored items by their ids, which this server made.

        Raises NoSuchResponse, BodiesTooLong.
        """
        chosen: list[Stored] = []
        found: set[str] = set()
        for name in names:
            if name not in found:
                if name not in self._places:
                    raise NoSuchResponse(f"no stored response has the item {name[:80]!r}")
                newest = self._used(self._places[name][-1])
                newest.admit(body)
                chosen.append(newest)
                found.update(newest.ids)

        def read() -> dict[str, dict[str, Any]]:
            every = (item for one in chosen for item in one.read())
            return {item["id"]: item for item in every if item["id"] in found}

        return read

    def _admitted(self, name: str, body: Body) -> list[Stored]:
        """Return the responses of a conversation, the oldest first, with their memory counted."""
        chain = list(self._chain(name))[::-1]
        for one in chain:
            one.admit(body)
        return chain

    def _chain(self, name: str | None) -> Iterator[Stored]:
        """Yield a response and those before it, the newest first."""
        while name is not None:
            one = self._used(name)
            yield one
            name = one.previous

    def _used(self, name: str) -> Stored:
        one = self._stored.get(name)
        if one is None:
            raise NoSuchResponse(f"there is no response {name[:80]!r}")
        self._stored.move_to_end(name)
        return one

    def _forget(self, name: str) -> None:
        one = self._stored.pop(name)
        self.held_bytes -= one.size
        for item in one.ids:
            self._places[item].remove(name)
            if not self._places[item]:
                del self._places[item]


def _text(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _plain(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item of an answer without log-probabilities."""
    if item["type"] != "message":
        return item
    parts = [{key: part[key] for key in part if key != "logprobs"} for part in item["content"]]
    return {**item, "content": parts}


def _containers(value: Any) -> int:
    """Return the number of objects and lists in a value."""
    if isinstance(value, dict):
        return 1 + sum(map(_containers, value.values()))
    return 1 + sum(map(_containers, value)) if isinstance(value, list) else 0
