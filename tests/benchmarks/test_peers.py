"""The adapters of programs with an HTTP server, missing programs, and the end of workers."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.base import streamed
from benchmarks.peers.table import PEERS, Peer
from benchmarks.worker import Worker, WorkerFailed

_PROMPTS = [[1, 2, 3], [4, 5, 6]]
_ANSWERS = [[7, 8], [9, 10]]


def command(peer: str, model: str, *more: str) -> list[str]:
    sizes = ["--threads", "1", "--context", "64", "--batch", "2"]
    return [sys.executable, "-m", f"benchmarks.peers.{peer}", model, *sizes, *more]


def talk(started: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Run two turns; return them and the worker's description of itself."""
    with Worker(started, limit_s=250) as worker:
        first = worker.ask("turn", prompts=_PROMPTS, answers=_ANSWERS, limit_s=30)
        second = worker.ask("turn", prompts=_PROMPTS, answers=_ANSWERS, limit_s=30)
        worker.ask("reset")
        return first, second, worker.ask("about")


class _Server(BaseHTTPRequestHandler):
    """Serves the formats of Ollama and KTransformers; a token every few milliseconds."""

    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"version": "0.9"}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        self.send_response(200)
        self.end_headers()
        ollama = self.path == "/api/generate"
        most = body["options"]["num_predict"] if ollama else body["max_tokens"]
        for number in range(most):
            time.sleep(0.005)
            piece = f" w{number}"
            self.wfile.write((self._ollama(piece) if ollama else self._event(piece)).encode())
            self.wfile.flush()
        last = '{"response": "", "done": true}\n' if ollama else "data: [DONE]\n\n"
        self.wfile.write(last.encode())

    def _ollama(self, piece: str) -> str:
        return json.dumps({"model": "m", "response": piece, "done": False}) + "\n"

    def _event(self, piece: str) -> str:
        delta = {"choices": [{"index": 0, "delta": {"content": piece}}]}
        return f"data: {json.dumps(delta)}\n\n"

    def log_message(self, *_: object) -> None: ...


@contextmanager
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    asked: list[dict[str, Any]] = []
    handler = type("Handler", (_Server,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}", asked
        finally:
            running.shutdown()
            thread.join()


def test_ollama() -> None:
    with server() as (address, asked):
        first, second, about = talk(command("ollama", "olmoe:q4", "--server", address))
    assert [len(turn["steps"]) for turn in (first, second)] == [2, 2]
    assert first["first"] + sum(first["steps"]) > 0.01  # of three tokens, 5 ms apart
    assert about["version"] == "Ollama 0.9, olmoe:q4"
    assert about["elsewhere"]
    options = {"temperature": 0, "num_predict": 3, "num_ctx": 64, "num_thread": 1}
    assert asked[0]["options"] == options
    assert {len(body["prompt"].split()) for body in asked[:2]} == {3}
    assert {len(body["prompt"].split()) for body in asked[2:]} == {9}  # answer and new prompt too


def test_ktransformers() -> None:
    with server() as (address, asked):
        first, second, about = talk(command("ktransformers", "moe", "--server", address))
    assert [len(turn["steps"]) for turn in (first, second)] == [2, 2]
    assert about["version"] == f"KTransformers at {address}, moe"
    assert asked[0]["max_tokens"] == 3
    assert asked[0]["stream"]
    assert len(asked[2]["messages"][0]["content"].split()) == 9


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(peer: Peer, server: str | None = None, model: str | None = None) -> str | None:
        return peer.problem(sys.executable, server, model, gpu=False)

    assert problem(PEERS["vLLM"]) == "not installed: pip install vllm"
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").touch()
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), before]))
    assert problem(PEERS["vLLM"]) == "not run: no GPU"
    assert PEERS["vLLM"].problem(sys.executable, None, None, gpu=True) is None
    nobody = "http://127.0.0.1:9"
    assert str(problem(PEERS["Ollama"], nobody)).startswith(f"not installed: no server at {nobody}")
    with server() as (address, _):
        assert "--served ollama=MODEL" in str(problem(PEERS["Ollama"], address))
        assert problem(PEERS["Ollama"], address, "m") is None


def test_steps_end_with_the_slowest() -> None:
    found = streamed(10.0, [[11.0, 12.0, 13.0], [10.5, 12.5, 12.75, 14.0]])
    assert found == {"first": 1.0, "steps": [1.5, 0.5], "forced": False}
    with pytest.raises(RuntimeError, match="no token"):
        streamed(0, [[1.0], []])


def test_a_worker_that_hangs_or_talks() -> None:
    """A time limit ends it; a full standard error does not block it."""
    begin = time.monotonic()
    with pytest.raises(WorkerFailed, match="no answer within 1 s"):
        Worker([sys.executable, "-c", "import time; time.sleep(60)"], limit_s=1)
    assert time.monotonic() - begin < 30
    talks = "import sys; sys.stderr.write('x' * 300_000); print('{}', flush=True)"
    with Worker([sys.executable, "-c", talks], limit_s=30) as worker:
        assert worker.greeting == {}
        with pytest.raises(WorkerFailed, match="exit code 0"):
            worker.ask("about")
