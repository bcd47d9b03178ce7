"""KTransformers by HTTP.

Run: python -m benchmarks.peers.ktransformers MODEL --server URL …

Uses the OpenAI format that both of its servers speak (`python -m sglang.launch_server` with
--kt-weight-path, and the older `ktransformers` server): /v1/chat/completions, server-sent events.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from benchmarks.peers.base import main
from benchmarks.peers.served import Served, lines


def load(o: argparse.Namespace) -> Served:
    def stream(text: str, most: int) -> Iterator[str]:
        body = {
            "model": o.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": most,
            "stream": True,
        }
        for line in lines(f"{o.server}/v1/chat/completions", body):
            data = line.removeprefix("data:").strip()
            if not data or data == "[DONE]":
                continue
            for choice in json.loads(data)["choices"]:
                if piece := choice["delta"].get("content"):
                    yield piece

    def about() -> dict[str, Any]:
        return {"version": f"KTransformers at {o.server}, {o.model}"}

    return Served(stream, about)


if __name__ == "__main__":
    main(load)
