"""Test a server's first second: `moeinf serve` in a process of its own, requests at once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import httpx
import pytest

from moeinf.runtime.engine.engine import Engine
from tests.cli.conftest import COMMAND
from tests.server.conftest import serving

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
ASK = {"model": "demo", "stream": False, "options": {"temperature": 0}}
MESSAGES = [{"role": "user", "content": "17+25="}]
POSTS: dict[str, tuple[str, dict[str, Any]]] = {
    "show": ("/api/show", {"model": "demo"}),
    "generate": ("/api/generate", {**ASK, "prompt": "17+25="}),
    "format": ("/api/generate", {**ASK, "prompt": "17+25=", "format": SCHEMA}),
    "chat": ("/api/chat", {**ASK, "messages": MESSAGES}),
    "create": ("/api/create", {"model": "mine", "from": "demo", "system": "s", "stream": False}),
    "embed": ("/api/embed", {"model": "demo", "input": "17+25="}),
    "openai": ("/v1/chat/completions", {"model": "demo", "messages": MESSAGES}),
    "messages": ("/v1/messages", {"model": "demo", "messages": MESSAGES, "max_tokens": 8}),
    "responses": ("/v1/responses", {"model": "demo", "input": "17+25="}),
    "pull": ("/api/pull", {"model": "demo:q8", "stream": False}),
    "verify": ("/api/verify", {"model": "demo", "stream": False}),
    "copy": ("/api/copy", {"source": "demo", "destination": "other"}),
}
GETS = {
    "tags": "/api/tags",
    "plan": "/api/plan?model=demo",
    "models": "/v1/models/demo",
    "metrics": "/metrics",
    "page": "/",
}
NAMES = (*POSTS, *GETS)


def ask(address: str, name: str, wait_s: float = 0.0) -> tuple[str, int, str]:
    time.sleep(wait_s)
    if name in GETS:
        answer = httpx.get(address + GETS[name], timeout=120)
    else:
        path, body = POSTS[name]
        answer = httpx.post(address + path, json=body, timeout=120)
    return name, answer.status_code, answer.text


@contextmanager
def served(home: Path, command: Sequence[str] = COMMAND) -> Iterator[str]:
    """Start `moeinf serve` on a copy of a home; yield its address as soon as it listens."""
    environment = {**os.environ, "MOEINF_HOST": "127.0.0.1:0", "MOEINF_HOME": str(home)}
    with subprocess.Popen(
        [*command, "serve"], env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            words = ""
            for line in process.stderr:
                words += line
                if "listening on " in line:
                    break
            assert "listening on " in words, words
            yield words.partition("listening on ")[2].split()[0]
        finally:
            process.send_signal(signal.SIGTERM)
            process.stderr.read()


@pytest.fixture
def home(demo_home: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_home, tmp_path / "home"))


def check(answers: Iterator[tuple[str, int, str]], address: str) -> None:
    wrong = [answer for answer in answers if answer[1] != 200]
    assert wrong == []
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}
    assert json.loads(ask(address, "generate")[2])["response"] == "42"


@pytest.mark.parametrize("pair", [("show", "generate"), ("create", "format")])
def test_two_requests_at_the_same_moment(pair: tuple[str, str], home: Path) -> None:
    with served(home) as address, ThreadPoolExecutor(2) as pool:
        check(pool.map(lambda name: ask(address, name), pair), address)


@pytest.mark.full
@pytest.mark.parametrize("gap_s", [0.0, 0.05, 0.2, 0.5])
@pytest.mark.parametrize("backwards", [False, True])
def test_every_pair_of_requests(gap_s: float, backwards: bool, home: Path) -> None:
    """All endpoints in one order: each pair meets at the gap or a multiple of it."""
    order = NAMES[::-1] if backwards else NAMES
    with served(home) as address, ThreadPoolExecutor(len(order)) as pool:
        asked = [pool.submit(ask, address, name, n * gap_s) for n, name in enumerate(order)]
        check((one.result() for one in asked), address)


SHOW = """
import json, sys
from moeinf.cli.entry import main
from moeinf.server.api import ollama_api
from fastapi import APIRouter

@ollama_api.router.get("/api/imported")
def imported() -> list[str]:
    return sorted(sys.modules)

main()
"""


def test_no_request_imports_a_module(home: Path) -> None:
    """All is imported before the server listens, so that no two requests import at once."""
    command = [sys.executable, "-c", SHOW]
    with served(home, command) as address:
        before = set(httpx.get(f"{address}/api/imported").json())
        found: dict[str, set[str]] = {}
        for name in NAMES:
            assert ask(address, name)[1:] == (200, ANY)
            found[name] = set(httpx.get(f"{address}/api/imported").json()) - before
    assert "torch" in before
    first = {NAMES[0]: found[NAMES[0]]}
    later = {after: found[after] - found[name] for name, after in pairwise(NAMES)}
    ours = ("moeinf", "torch", "numpy", "tokenizers", "huggingface_hub", "gguf", "safetensors")
    new = {
        name: {module for module in modules if module.partition(".")[0] in ours}
        for name, modules in {**first, **later}.items()
    }
    assert {name: modules for name, modules in new.items() if modules} == {}


def test_a_server_that_cannot_import_its_engine_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so: no such file')")
    done = subprocess.run(
        [*COMMAND, "serve"],
        env={**os.environ, "MOEINF_HOST": "127.0.0.1:0", "MOEINF_HOME": str(tmp_path),
             "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert "libtorch_cpu.so: no such file" in done.stderr
    assert "listening" not in done.stderr


def test_health_tells_of_a_load_that_failed(
    demo_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> Engine:
        raise ImportError("cannot import name 'x'")

    with serving(demo_home) as address, monkeypatch.context() as patch:
        patch.setattr(Engine, "open", fails)
        assert ask(address, "generate")[1] == 500
        found = httpx.get(f"{address}/health")
        assert found.status_code == 503
        words = "demo:bf16 could not be loaded: cannot import name 'x'"
        assert found.json() == {"status": "error", "error": words}
        patch.undo()
        assert ask(address, "generate")[1] == 200
        assert httpx.get(f"{address}/health").status_code == 200
