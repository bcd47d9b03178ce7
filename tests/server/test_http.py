"""The server refuses or survives bad hosts, origins, keys, limits, queues, leaving clients."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from moeinf.runtime.generation.scheduler import Scheduler
from tests.server.conftest import serving

WILD = {"temperature": 50, "top_k": 0, "top_p": 1, "seed": 1}


def connected(address: str) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


MACHINE = socket.gethostname().lower().partition(".")[0]


def test_health_version_and_root(address: str) -> None:
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}
    assert httpx.get(f"{address}/").text == "moeinf is running"
    assert "version" in httpx.get(f"{address}/api/version").json()
    assert "moeinf:num_requests_running" in httpx.get(f"{address}/metrics", timeout=60).text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:11435"}, 403),
        ({"Host": "192.168.1.7:11435"}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "host.docker.internal:11435"}, 200),
        ({"Host": f"{MACHINE}.local:11435"}, 200),
        ({"Host": "box.local:11435"}, 403),  # another machine of the network may have it
        ({"Host": f"{MACHINE}.local.evil.example"}, 403),
        ({"Host": "evil-local"}, 403),
        ({"Origin": f"http://{MACHINE}.local:11435", "Host": f"{MACHINE}.local:11435"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost.evil.example"}, 403),
        ({"Origin": "http://localhost:3000"}, 200),
    ],
)
def test_who_may_ask(headers: dict[str, str], status: int, address: str) -> None:
    assert httpx.get(f"{address}/api/tags", headers=headers).status_code == status


def test_names_that_origins_have(demo_home: Path) -> None:
    """A proxy keeps the Host that it was asked for."""
    with serving(demo_home, origins=("https://chat.example.com:8443", "box.lan")) as address:
        for name in ("chat.example.com", "Box.lan:11435"):
            assert httpx.get(f"{address}/api/tags", headers={"Host": name}).status_code == 200
        foreign = httpx.get(f"{address}/api/tags", headers={"Host": "example.com"})
        assert (foreign.status_code, foreign.json()["code"]) == (403, "unknown_host")
    with serving(demo_home, origins=("*",)) as address:
        assert httpx.get(f"{address}/api/tags", headers={"Host": "any"}).status_code == 200
        with connected(address) as sock:
            sock.sendall(b"GET /health HTTP/1.0\r\n\r\n")  # some health checks name no Host
            assert b" 200 " in sock.recv(4096)


def test_an_api_key(demo_home: Path) -> None:
    with serving(demo_home, api_key="secret") as address:
        assert httpx.get(f"{address}/api/tags").status_code == 401
        wrong = httpx.get(f"{address}/api/tags", headers={"Authorization": "Bearer secre"})
        assert wrong.status_code == 401
        for scheme in ("Bearer", "bearer", "BEARER "):
            right = httpx.get(f"{address}/v1/models", headers={"Authorization": f"{scheme} secret"})
            assert right.status_code == 200
        for other in ("Basic secret", "secret", "Bearersecret", "Bearer", "Bearer Bearer secret"):
            refused = httpx.get(f"{address}/v1/models", headers={"Authorization": other})
            code = refused.json()["error"]["code"]
            assert (refused.status_code, code) == (401, "invalid_api_key")
        assert httpx.get(f"{address}/health").status_code == 200


def test_bodies_that_are_none(address: str) -> None:
    post = httpx.post(f"{address}/api/generate", content=b"{not json")
    assert post.status_code == 400
    assert "error" in post.json()
    assert httpx.post(f"{address}/api/generate", content=b"\xff\xfe").status_code == 400
    assert httpx.post(f"{address}/api/generate", json={"model": 3}).status_code == 400
    nested = httpx.post(f"{address}/api/generate", content=b"[" * 100_000)
    assert nested.status_code == 400
    with connected(address) as sock:
        sock.sendall(b"POST /api/generate HTTP/1.1\r\nHost: localhost\r\n")
        sock.sendall(b"Content-Length: %d\r\n\r\n" % (1 << 40))
        assert b" 413 " in sock.recv(4096)
    assert httpx.get(f"{address}/nowhere").status_code == 404
    assert httpx.get(f"{address}/health").status_code == 200


@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions", "/v1/messages"])
def test_curl_sends_forms(path: str, address: str) -> None:
    """`curl -d` names a form as its content type; Ollama does not mind, so we do not."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    asked = {"model": "demo", "max_tokens": 9, "stream": False}
    body = json.dumps({**asked, "messages": [{"role": "user", "content": "17+25="}]})
    answer = httpx.post(address + path, content=body, headers=form, timeout=60)
    assert answer.status_code == 200
    assert '"42"' in answer.text


def test_headers_without_end(address: str) -> None:
    with connected(address) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: " + b"a" * (200 << 10))
        assert b" 431 " in sock.recv(4096)
    assert httpx.get(f"{address}/health").status_code == 200


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow the engine down, so that requests meet."""
    decode = Scheduler._decode

    def decode_slowly(self: Scheduler, *arguments: Any) -> None:
        time.sleep(0.02)
        decode(self, *arguments)

    monkeypatch.setattr(Scheduler, "_decode", decode_slowly)


def until(address: str, line: str) -> None:
    """Return when /metrics has the line."""
    for _ in range(500):
        if f"moeinf:{line}" in httpx.get(f"{address}/metrics", timeout=60).text:
            return
        time.sleep(0.02)
    raise AssertionError(f"never {line}")


@pytest.mark.usefixtures("slow")
def test_a_full_queue_answers_503(demo_home: Path) -> None:
    body = {"model": "demo", "prompt": "hi", "options": {**WILD, "num_predict": 400}}

    def ask(address: str) -> None:
        with suppress(httpx.HTTPError):  # it is cut off when the server ends
            httpx.post(f"{address}/api/generate", json=body, timeout=60)

    with serving(demo_home, parallel=1, max_queue=1) as address:
        threads = []
        for line in ("num_requests_running", "num_requests_waiting"):
            threads.append(threading.Thread(target=ask, args=(address,)))
            threads[-1].start()
            until(address, f'{line}{{model_name="demo:bf16"}} 1')
        refused = httpx.post(f"{address}/api/generate", json=body)
        assert (refused.status_code, refused.json()["code"]) == (503, "busy")
    for thread in threads:
        thread.join()


@pytest.mark.usefixtures("slow")
def test_a_client_that_leaves_frees_its_place(demo_home: Path) -> None:
    with serving(demo_home, parallel=1) as address:
        body = {"model": "demo", "prompt": "hi", "options": {**WILD, "num_predict": 480}}
        with httpx.stream("POST", f"{address}/api/generate", json=body, timeout=60) as running:
            next(running.iter_lines())
        until(address, 'num_requests_running{model_name="demo:bf16"} 0')
        again = {"model": "demo", "prompt": "17+25=", "stream": False}
        answer = httpx.post(f"{address}/api/generate", json=again, timeout=60)
        assert answer.json()["response"] == "42"


@pytest.mark.usefixtures("slow")
def test_unstreamed_and_queued_requests_end_with_their_clients(demo_home: Path) -> None:
    """One is answered in one piece, one waits behind it: both go when their clients do."""
    body = {"model": "demo", "prompt": "hi", "stream": False}
    body["options"] = {**WILD, "num_predict": 480}
    running, waiting = (
        f'num_requests_{x}{{model_name="demo:bf16"}}' for x in ("running", "waiting")
    )
    with serving(demo_home, parallel=1) as address, httpx.Client(timeout=60) as loader:
        loader.post(f"{address}/api/generate", json={"model": "demo"})
        first, second = connected(address), connected(address)
        text = json.dumps(body).encode()
        for sock, line in ((first, running), (second, waiting)):
            head = b"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
            sock.sendall(head % len(text) + text)
            until(address, f"{line} 1")
        second.close()
        until(address, f"{waiting} 0")
        assert f"moeinf:{running} 1" in httpx.get(f"{address}/metrics", timeout=60).text
        first.close()
        until(address, f"{running} 0")
        tokens = httpx.get(f"{address}/metrics").text.split("generation_tokens_total{")[1]
        assert float(tokens.splitlines()[0].split()[1]) < 400


def test_models_leave_after_their_time(demo_home: Path) -> None:
    with serving(demo_home, keep_alive_s=0.5) as address:
        ask = {"model": "demo", "prompt": "17+25=", "stream": False}
        for _ in range(20):  # a slow machine may take longer than its time to ask
            httpx.post(f"{address}/api/generate", json=ask, timeout=60)
            if seen := httpx.get(f"{address}/api/ps").json()["models"]:
                break
        assert len(seen) == 1
        for _ in range(100):
            if not httpx.get(f"{address}/api/ps").json()["models"]:
                break
            time.sleep(0.05)
        assert httpx.get(f"{address}/api/ps").json()["models"] == []
        load = httpx.post(f"{address}/api/generate", json={"model": "demo", "keep_alive": -1})
        assert load.json()["done_reason"] == "load"
        unload = httpx.post(f"{address}/api/generate", json={"model": "demo", "keep_alive": 0})
        assert unload.json()["done_reason"] == "unload"
        assert httpx.get(f"{address}/api/ps").json()["models"] == []
