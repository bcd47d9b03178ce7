"""The common part of ollama.py and ktransformers.py: a server that streams text over HTTP.

Such a server takes text, not token ids, and runs a model of its own. Prompts are one short word per
token asked for, and the server counts its own tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import Request, urlopen

from benchmarks.peers.base import streamed

_WORDS = (
    "one day old sea big map red cat new sun low hill far road dry leaf her hand his door".split()
)
Stream = Callable[[str, int], Iterator[str]]  # text so far, most tokens -> pieces in order


class Served:
    """See worker.Talker. `stream` asks the server; conversations run at the same time."""

    def __init__(self, stream: Stream, about: Callable[[], dict[str, Any]]) -> None:
        self._stream, self._about = stream, about
        self.reset()

    def reset(self) -> None:
        self._said: list[str] = []

    def turn(
        self, prompts: list[list[int]], answers: list[list[int]], limit_s: float
    ) -> dict[str, Any]:
        self._said = self._said or ["" for _ in prompts]
        start = time.perf_counter()

        def ask(number: int) -> tuple[str, list[float]]:
            said, times = self._said[number] + words(prompts[number]), []
            for piece in self._stream(said, len(answers[number]) + 1):
                said += piece
                times.append(time.perf_counter())
                if times[-1] - start > limit_s:
                    break
            return said, times

        with ThreadPoolExecutor(len(prompts)) as pool:
            found = list(pool.map(ask, range(len(prompts))))
        self._said = [said for said, _ in found]
        return streamed(start, [times for _, times in found])

    def about(self) -> dict[str, Any]:
        return {"elsewhere": True, **self._about()}


def words(tokens: list[int]) -> str:
    """Return one short word per token."""
    return "".join(f" {_WORDS[token % len(_WORDS)]}" for token in tokens)


def lines(address: str, body: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the answer to a POST as they arrive."""
    data = json.dumps(body).encode()
    request = Request(address, data, {"Content-Type": "application/json"})
    with urlopen(request, timeout=600) as response:
        for line in response:
            yield line.decode().strip()


def get(address: str) -> dict[str, Any]:
    """Return the answer to a GET."""
    with urlopen(address, timeout=10) as response:
        found: dict[str, Any] = json.loads(response.read())
    return found
