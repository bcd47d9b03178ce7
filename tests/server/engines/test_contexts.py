"""`num_ctx` of Ollama's API: the model is loaded again, after the requests that it answers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx

from tests.server.conftest import serving

ASK: dict[str, Any] = {"model": "demo", "prompt": "17+25=", "stream": False}


def ask(address: str, path: str = "/api/generate", **options: Any) -> httpx.Response:
    body = {**ASK, "input": "a", "options": {"temperature": 0, **options}}
    return httpx.post(address + path, json=body, timeout=60)


def context(address: str) -> int:
    (loaded,) = httpx.get(f"{address}/api/ps", timeout=60).json()["models"]
    return int(loaded["context_length"])


def test_a_request_chooses_the_context(demo_home: Path) -> None:
    with serving(demo_home) as address:
        found = []
        for wanted in ({"num_ctx": 64}, {}, {"num_ctx": 10**30}, {"num_ctx": None}):
            assert ask(address, **wanted).json()["response"] == "42"
            found.append(context(address))
        assert found == [64, 512, 512, 512]  # without a wish, or at most, the demo's own
        assert ask(address, "/api/embed", num_ctx=32).status_code == 200
        assert context(address) == 32
        too_long = ask(address, num_ctx=8)
        assert too_long.json()["code"] == "prompt_too_long"
        assert ask(address).json()["response"] == "42"


def test_what_is_no_context(demo_home: Path) -> None:
    with serving(demo_home) as address:
        for wrong, words in ((0, "at least 1, got 0"), ("many", "an integer, got many")):
            refused = ask(address, num_ctx=wrong)
            assert refused.status_code == 400
            assert refused.json()["error"] == f"num_ctx must be {words}"
        assert httpx.get(f"{address}/api/ps", timeout=60).json()["models"] == []


def test_the_answer_before_it_ends(demo_home: Path) -> None:
    """Another context waits for the answer in progress, and the next request for the context."""
    with serving(demo_home) as address:
        wild = {"temperature": 50, "top_k": 0, "top_p": 1, "seed": 7, "num_predict": 400}
        body = {"model": "demo", "prompt": "hi", "stream": True, "options": wild}
        found: list[int] = []
        with httpx.stream("POST", f"{address}/api/generate", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            other = threading.Thread(
                target=lambda: found.append(ask(address, num_ctx=64).status_code)
            )
            other.start()
            last = list(lines)[-1]
        assert '"done": true' in last or '"done":true' in last
        other.join(60)
        assert found == [200]
        assert context(address) == 64


def test_serve_ctx_goes_first(demo_home: Path) -> None:
    with serving(demo_home, context=256) as address:
        assert ask(address, num_ctx=64).json()["response"] == "42"
        assert context(address) == 256
