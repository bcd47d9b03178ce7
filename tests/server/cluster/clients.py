"""Read streams and metrics of a cluster, as a client does."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

LONG = {"model": "demo", "prompt": "a b c", "temperature": 0, "max_tokens": 400, "stream": True}


def streamed(
    http: httpx.Client, each: Callable[[int], object] = lambda _: None, **more: Any
) -> tuple[str, list[str]]:
    """Return the text and the lines of a stream. each: called after each line with their number.

    more: fields of the body that replace those of LONG.
    """
    lines = list[str]()
    with http.stream("POST", "/v1/completions", json=LONG | more) as answer:
        for line in answer.iter_lines():
            lines.append(line)
            each(len(lines))
    return text_of(lines), lines


def killed(
    http: httpx.Client, replicas: Callable[[], Mapping[int, int]], after: int, **more: Any
) -> tuple[str, list[str]]:
    """Return the text and the lines of a stream whose replica is killed after so many lines.

    replicas: returns the clock ticks that each replica's process has spent, by its number.
    """
    before = replicas()

    def each(count: int) -> None:
        if count == after:
            spent = {pid: ticks - before.get(pid, 0) for pid, ticks in replicas().items()}
            os.kill(max(spent, key=spent.__getitem__), signal.SIGKILL)

    return streamed(http, each, **more)


def metric(http: httpx.Client, pattern: str) -> float:
    """Return the sum of the samples of /metrics that match."""
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(pattern, line))


def leave(http: httpx.Client) -> None:
    """Leave a stream after its first line, until the engine of its replica has stopped for it.

    On a busy machine the engine may have ended the answer before.
    """
    aborted = r"moeinf:request_success_total\{.*\"abort\""
    before, until = metric(http, aborted), time.monotonic() + 30
    while metric(http, aborted) == before:
        assert time.monotonic() < until
        with http.stream("POST", "/v1/completions", json=LONG | {"max_tokens": 4000}) as answer:
            next(answer.iter_lines())
        time.sleep(3)  # metrics are up to 2 s old
    assert metric(http, "moeinf:num_requests_running") == 0


def text_of(lines: list[str]) -> str:
    """Return the text of a stream's lines."""
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(e["choices"][0]["text"] for e in events if "choices" in e)


def whole(lines: list[str]) -> bool:
    """Return whether a stream has its end once, and no error."""
    return lines.count("data: [DONE]") == 1 and not any('"error"' in line for line in lines)
