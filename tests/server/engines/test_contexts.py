"""`num_ctx` of Ollama's API: it bounds a request, and a larger one loads the model again."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from moeinf.runtime.engine.engine import Engine
from tests.server.conftest import serving

ASK: dict[str, Any] = {"model": "demo", "prompt": "17+25=", "stream": False}


def ask(address: str, path: str = "/api/generate", **options: Any) -> httpx.Response:
    body = {**ASK, "input": "a", "options": {"temperature": 0, **options}}
    return httpx.post(address + path, json=body, timeout=60)


def context(address: str) -> int:
    (loaded,) = httpx.get(f"{address}/api/ps", timeout=60).json()["models"]
    return int(loaded["context_length"])


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the contexts of all engines that are opened."""
    found: list[int] = []

    def opening(*about: Any) -> Engine:
        engine = open_it(*about)
        found.append(engine.info.context)
        return engine

    open_it = Engine.open
    monkeypatch.setattr(Engine, "open", opening)
    return found


def test_a_larger_context_is_loaded(demo_home: Path, opened: list[int]) -> None:
    with serving(demo_home) as address:
        found = []
        for wanted in ({"num_ctx": 64}, {}, {"num_ctx": 10**30}, {"num_ctx": None}):
            assert ask(address, **wanted).json()["response"] == "42"
            found.append(context(address))
        assert found == [64, 512, 512, 512]  # without a wish, or at most, the demo's own
        assert ask(address, num_ctx=64).json()["response"] == "42"
        assert context(address) == 512
        assert opened == [64, 512]


def test_what_is_no_context(demo_home: Path) -> None:
    with serving(demo_home) as address:
        for wrong, words in ((0, "at least 1, got 0"), ("many", "an integer, got many")):
            refused = ask(address, num_ctx=wrong)
            assert refused.status_code == 400
            assert refused.json()["error"] == f"num_ctx must be {words}"
        assert httpx.get(f"{address}/api/ps", timeout=60).json()["models"] == []


def test_the_answer_before_it_ends(demo_home: Path) -> None:
    """A larger context waits for the answer in progress."""
    with serving(demo_home) as address:
        wild = {"temperature": 50, "top_k": 0, "top_p": 1, "seed": 7, "num_ctx": 400}
        body = {"model": "demo", "prompt": "hi", "stream": True, "options": wild}
        found: list[int] = []
        with httpx.stream("POST", f"{address}/api/generate", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            other = threading.Thread(
                target=lambda: found.append(ask(address, num_ctx=512).status_code)
            )
            other.start()
            last = list(lines)[-1]
        assert '"done": true' in last or '"done":true' in last
        other.join(60)
        assert found == [200]
        assert context(address) == 512


def test_a_request_is_bounded(demo_home: Path, opened: list[int]) -> None:
    """Prompt and answer have `num_ctx` tokens at most, in the engine that is there."""
    wild = {"temperature": 50, "top_k": 0, "top_p": 1, "seed": 7}
    message = {"role": "user", "content": "17+25="}
    with serving(demo_home, context=256) as address:
        whole = ask(address, **wild).json()
        size = whole["prompt_eval_count"]
        for path, more in (("generate", {}), ("chat", {"messages": [message]})):
            options = {**wild, "num_ctx": size + 5}
            body = {**ASK, **more, "options": options}
            said = httpx.post(f"{address}/api/{path}", json=body, timeout=60).json()
            assert (said["prompt_eval_count"], said["eval_count"]) == (size, 5)
            assert said["done_reason"] == "length"
            body["options"] = {**wild, "num_ctx": size}
            refused = httpx.post(f"{address}/api/{path}", json=body, timeout=60)
            assert refused.status_code == 400
            assert refused.json()["code"] == "prompt_too_long"
            assert f"the prompt has {size} tokens, the context {size}" in refused.json()["error"]
        assert whole["response"].startswith(said["message"]["content"])
        assert ask(address, num_ctx=10**30).json()["response"] == "42"
        assert context(address) == 256
    assert opened == [256]


def test_an_embedding_is_bounded(demo_home: Path, opened: list[int]) -> None:
    with serving(demo_home) as address:
        body: dict[str, Any] = {"model": "demo", "input": "small words " * 20}
        body["options"] = {"num_ctx": 9}
        cut = httpx.post(f"{address}/api/embed", json=body, timeout=60)
        assert cut.json()["prompt_eval_count"] == 8
        body["truncate"] = False
        refused = httpx.post(f"{address}/api/embed", json=body, timeout=60).json()
        assert refused["code"] == "prompt_too_long"
        assert refused["error"].endswith("tokens, the context 9")
        del body["options"]
        assert httpx.post(f"{address}/api/embed", json=body, timeout=60).status_code == 200
    assert opened == [9, 512]
