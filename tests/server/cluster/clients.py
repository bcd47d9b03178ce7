"""Read streams of completions, as a client does."""

from __future__ import annotations

import json
from collections.abc import Callable
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


def text_of(lines: list[str]) -> str:
    """Return the text of a stream's lines."""
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(e["choices"][0]["text"] for e in events if "choices" in e)


def whole(lines: list[str]) -> bool:
    """Return whether a stream has its end once, and no error."""
    return lines.count("data: [DONE]") == 1 and not any('"error"' in line for line in lines)
