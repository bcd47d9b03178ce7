"""Keep responses for later requests, in RAM and within limits. They are gone after a restart."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from moeinf.errors import NotFound
from moeinf.server.http.bodies import Body

MOST_RESPONSES = 1000
MOST_STORED_BYTES = 32 << 20  # of their JSON


class NoSuchResponse(NotFound):
    """No response of the id is stored."""

    code = "response_not_found"
    hint = "the whole conversation in `input`"


@dataclass(frozen=True)
class _Stored:
    """A response as JSON: its document; its own input items, `own` of them, and its output."""

    document: bytes
    items: bytes
    own: int
    containers: int  # objects and lists in items
    ids: tuple[str, ...]  # of the items that have an id of this server
    previous: str | None

    @property
    def size(self) -> int:
        return len(self.document) + len(self.items) + sum(map(len, self.ids))

    def read(self, body: Body) -> list[dict[str, Any]]:
        """Return the items; body: of the request that reads them, which counts their memory."""
        body.hold(len(self.items))
        body.admit(self.containers)
        found: list[dict[str, Any]] = json.loads(self.items.decode("utf-8", "surrogatepass"))
        return found


class ResponseStore:
    """The responses used last. The event loop calls all methods."""

    def __init__(self) -> None:
        self._stored: OrderedDict[str, _Stored] = OrderedDict()  # the oldest use first
        self._places: dict[str, list[str]] = {}  # the responses of each item, by ids of this server
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(
        self, document: dict[str, Any], items: list[dict[str, Any]], made: Iterable[str]
    ) -> None:
        """Keep a response; those with the oldest use leave. One beyond the limit is not kept.

        made: ids of items that this server made. Other clients may choose the others, too, so that
        `items` does not find them.
        """
        output = [_plain(item) for item in document["output"]]
        said = [*items, *output]
        previous = document["previous_response_id"]
        ids = tuple(dict.fromkeys([*made, *(item["id"] for item in output)]))
        count = _containers(said)
        one = _Stored(_text(document), _text(said), len(items), count, ids, previous)
        if one.size > MOST_STORED_BYTES:
            return
        self._stored[document["id"]] = one
        for item in ids:
            self._places.setdefault(item, []).append(document["id"])
        self.held_bytes += one.size
        while len(self._stored) > MOST_RESPONSES or self.held_bytes > MOST_STORED_BYTES:
            self._forget(next(iter(self._stored)))

    def document(self, name: str) -> dict[str, Any]:
        """Return a response's document. Raises NoSuchResponse."""
        text = self._used(name).document.decode("utf-8", "surrogatepass")
        found: dict[str, Any] = json.loads(text)
        return found

    def delete(self, name: str) -> None:
        """Forget a response. Raises NoSuchResponse."""
        self._used(name)
        self._forget(name)

    def input_of(self, name: str, body: Body) -> list[dict[str, Any]]:
        """Return all items that a response answers, from the first of its conversation.

        body: of the request that reads them, which then counts their memory. Raises NoSuchResponse
        also for an earlier response, BodiesTooLong.
        """
        one = self._used(name)
        before = [] if one.previous is None else self.conversation(one.previous, body)
        return [*before, *one.read(body)[: one.own]]

    def conversation(self, name: str, body: Body) -> list[dict[str, Any]]:
        """Return the items of a response's conversation, its output included.

        body: as of input_of. Raises NoSuchResponse, BodiesTooLong.
        """
        chain = reversed(list(self._chain(name)))
        return [item for one in chain for item in one.read(body)]

    def items(self, names: Iterable[str], body: Body) -> dict[str, dict[str, Any]]:
        """Return stored items by their ids, which this server made.

        body: as of input_of. Raises NoSuchResponse, BodiesTooLong.
        """
        found: dict[str, dict[str, Any]] = {}
        for name in names:
            if name not in found:
                if name not in self._places:
                    raise NoSuchResponse(f"no stored response has the item {name[:80]!r}")
                newest = self._used(self._places[name][-1])
                read = {item["id"]: item for item in newest.read(body)}
                found |= {item: read[item] for item in newest.ids}
        return found

    def _chain(self, name: str | None) -> Iterator[_Stored]:
        """Yield a response and those before it, the newest first."""
        while name is not None:
            one = self._used(name)
            yield one
            name = one.previous

    def _used(self, name: str) -> _Stored:
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
