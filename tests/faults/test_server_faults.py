"""A server whose engine fails in every way, and clients that disconnect while they wait."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

from moeinf.native import DeviceError
from moeinf.offload.gpu_tier.layer_runner import OutOfMemory
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.scheduler import Scheduler
from tests.faults.conftest import Tally
from tests.server.conftest import serving
from tests.server.test_http import WILD, until

ASK = {"model": "demo", "prompt": "17+25=", "stream": False}
LONG = {"model": "demo", "prompt": "hi", "stream": False, "options": {**WILD, "num_predict": 480}}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Scheduler._decode

    def decode_slowly(self: Scheduler, *arguments: Any) -> None:
        time.sleep(0.02)
        decode(self, *arguments)

    monkeypatch.setattr(Scheduler, "_decode", decode_slowly)


def leave_after(address: str, line: str) -> None:
    """Request a whole answer, and disconnect once /metrics has the line."""
    host, port = address.removeprefix("http://").split(":")
    body = json.dumps(LONG).encode()
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        head = f"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
        sock.sendall(f"{head}\r\n\r\n".encode() + body)
        until(address, line)


@pytest.mark.usefixtures("slow")
def test_a_client_that_leaves_before_its_answer_begins(demo_home: Path, tally: Tally) -> None:
    """The stream has not started, so only the closed connection shows that the client left."""
    with serving(demo_home, parallel=1, max_queue=2) as address:
        running, waiting = (
            f'num_requests_{what}{{model_name="demo:bf16"}} ' for what in ("running", "waiting")
        )
        leave_after(address, running + "1")
        until(address, running + "0")
        tally("left while it was answered")
        with httpx.stream("POST", f"{address}/api/generate", json={**LONG, "stream": True}) as one:
            next(one.iter_lines())
            for _ in range(6):  # more than the queue holds: clients that left occupy no place
                leave_after(address, waiting)
                tally("left while it waited")
        answer = httpx.post(f"{address}/api/generate", json=ASK, timeout=60)
        assert answer.json()["response"] == "42"


@pytest.mark.usefixtures("slow")
def test_an_answer_that_unloading_cuts_off_is_an_error(demo_home: Path, tally: Tally) -> None:
    for stream in (False, True):
        with ThreadPoolExecutor(1) as pool, serving(demo_home, parallel=1) as address:
            ask = partial(httpx.post, f"{address}/api/generate", timeout=60)
            found = pool.submit(ask, json={**LONG, "stream": stream})
            until(address, 'num_requests_running{model_name="demo:bf16"} 1')
            assert ask(json={"model": "demo", "keep_alive": 0}).status_code == 200
            last = json.loads(found.result().text.splitlines()[-1])
            assert last["error"] == "the model was unloaded"
            tally("an error in words")


@pytest.mark.parametrize("where", ["new_state", "begin_request", "extend", "step", "end_request"])
@pytest.mark.parametrize("kind", [MemoryError, RuntimeError, OSError])
def test_an_engine_that_fails(
    where: str,
    kind: type[Exception],
    demo_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    tally: Tally,
) -> None:
    """Every waiting client gets the error at once; the next request is answered."""
    whole, at = getattr(Engine, where), 0

    def failing(self: Engine, *arguments: Any, **options: Any) -> Any:
        nonlocal at
        at -= 1
        if at == 0:
            raise kind("planted")
        return whole(self, *arguments, **options)

    monkeypatch.setattr(Engine, where, failing)
    with serving(demo_home, parallel=2) as address:
        for moment in (1, 2):
            at = moment
            first = httpx.post(f"{address}/api/generate", json=ASK, timeout=30)
            if first.status_code == 200:
                assert first.json()["response"] == "42"
                tally("the right answer")
            else:
                assert "planted" in first.json()["error"]
                tally("an error in words")
            at = 0
            again = httpx.post(f"{address}/api/generate", json=ASK, timeout=30)
            assert again.json().get("response") == "42", again.text


def test_a_bug_leaves_its_traceback_and_what_is_known_is_none(
    demo_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    (tmp_path / "models").symlink_to(demo_home / "models")
    log, error, calls = tmp_path / "logs/moeinf.log", Exception, 0

    def failing(self: Engine, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 2 == 0:  # the second token's pass: a stream has begun
            raise error("planted")
        return step(self, *arguments)

    step = Engine.step
    monkeypatch.setattr(Engine, "step", failing)
    messages = [{"role": "user", "content": "sort owl, fig"}]
    bodies = {
        "/api/generate": {**ASK, "prompt": "sort owl, fig"},
        "/v1/chat/completions": {"model": "demo", "messages": messages, "temperature": 0},
    }
    kinds = {TypeError: 500, MemoryError: 503, OutOfMemory: 503, DeviceError: 503}
    with serving(tmp_path) as address:
        for path, stream in product(bodies, (False, True)):
            for error, status in kinds.items():
                calls, before = 0, log.read_text().count("Traceback") if log.exists() else 0
                body = {**bodies[path], "stream": stream}
                answer = httpx.post(f"{address}{path}", json=body, timeout=60)
                assert "planted" in answer.text
                assert answer.status_code == (200 if stream else status)
                bug = error is TypeError
                assert ("this is a bug" in answer.text) == bug
                assert log.read_text().count("Traceback") - before == bug
                tally("an error in words")
    assert "in failing" in log.read_text()


def test_a_long_prompt_is_refused_before_it_is_cut_into_tokens(demo_home: Path) -> None:
    """4 million tokens would take gigabytes just to be counted."""
    with serving(demo_home) as address:
        httpx.post(f"{address}/api/generate", json=ASK, timeout=30)
        start = time.monotonic()
        answer = httpx.post(
            f"{address}/api/generate", json={**ASK, "prompt": "x " * 4_000_000}, timeout=60
        )
        assert answer.status_code == 400
        assert "characters" in answer.json()["error"]
        assert time.monotonic() - start < 20


def test_half_a_character_is_no_bug(demo_home: Path, tally: Tally) -> None:
    """JSON can contain a lone surrogate; it counts as a question mark.

    The soak test found it.
    """
    half = "17+25=\ud800"
    bodies = {
        "/api/generate": {**ASK, "prompt": half},
        "/api/chat": {"model": "demo", "messages": [{"role": "user", "content": half}]},
        "/v1/completions": {"model": "demo", "prompt": half},
        "/v1/chat/completions": {"model": "demo", "messages": [{"role": "user", "content": half}]},
    }
    with serving(demo_home) as address:
        for path, body in bodies.items():
            data = json.dumps({**body, "stream": False})
            headers = {"Content-Type": "application/json"}
            answer = httpx.post(f"{address}{path}", content=data, headers=headers, timeout=60)
            assert answer.status_code == 200, answer.text
            tally("an answer")
