"""Ollama by HTTP.

Run: python -m benchmarks.peers.ollama MODEL --server http://127.0.0.1:11434 …

Uses Ollama's /api/generate (docs.ollama.com/api): raw prompts, a line of JSON per piece.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from benchmarks.peers.base import main
from benchmarks.peers.served import Served, get, lines


def load(o: argparse.Namespace) -> Served:
    def stream(text: str, most: int) -> Iterator[str]:
        options = {
            "temperature": 0,
            "num_predict": most,
            "num_ctx": o.context,
            "num_thread": o.threads,
        }
        body = {"model": o.model, "prompt": text, "raw": True, "stream": True, "options": options}
        for line in lines(f"{o.server}/api/generate", body):
            piece = json.loads(line)
            if "error" in piece:
                raise SystemExit(f"Ollama: {piece['error']}")
            if piece["response"]:
                yield piece["response"]

    def about() -> dict[str, Any]:
        return {"version": f"Ollama {get(f'{o.server}/api/version')['version']}, {o.model}"}

    return Served(stream, about)


if __name__ == "__main__":
    main(load)
