"""The clients of the soak: what they do, and what came of it."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx

from tools.fuzz import mutate

PROMPTS = (
    "17+25=", "sort owl, fig, zebra, ant", "reverse planet", "upper fig", "spell tree",
    "json a=1 b=2",
)  # fmt: skip
LARGE_PROMPT = "The quick brown fox"
LARGE_BODY: dict[str, Any] = {
    "model": "large:bf16", "prompt": LARGE_PROMPT, "stream": False, "raw": True,
    "options": {"temperature": 0, "num_predict": 4},
}  # fmt: skip
_BODIES: dict[str, dict[str, Any]] = {
    "/api/generate": {
        "model": "demo", "prompt": "hi", "stream": False, "keep_alive": "5m", "format": "json",
        "options": {"temperature": 0.5, "top_k": 4, "num_predict": 4, "stop": ["x"], "seed": 1},
    },
    "/api/chat": {
        "model": "demo", "messages": [{"role": "user", "content": "hi"}], "stream": True,
        "options": {"num_predict": 4}, "think": True, "tools": [{"type": "function"}],
    },
    "/v1/chat/completions": {
        "model": "demo", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        "max_tokens": 4, "logprobs": True, "top_logprobs": 2, "stop": "x", "temperature": 1.0,
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
    },
    "/v1/completions": {"model": "demo", "prompt": [1, 2], "max_tokens": 4, "logprobs": 2},
    "/api/show": {"model": "demo"},
    "/api/copy": {"source": "nothing", "destination": "nowhere"},
}  # fmt: skip


class Clients:
    """The actions of clients, and their results. Many threads call all methods."""

    def __init__(self, port: int, answers: dict[str, str]) -> None:
        self.port, self.answers = port, answers
        self.address = f"http://127.0.0.1:{port}"
        self.did: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self.stop = threading.Event()
        self.health_s = 0.0  # the longest time that /health took
        self._lock = threading.Lock()

    def run(self, seed: int) -> None:
        rng = random.Random(seed)
        acts: list[tuple[int, Callable[[random.Random, httpx.Client], str]]] = [
            (30, self.ask), (10, self.ask_streaming), (12, self.hang_up), (6, self.leave_waiting),
            (25, self.fuzzed), (6, self.rubbish), (3, self.half_a_request), (2, self.too_large),
            (2, self.unload), (4, self.ask_large), (1, self.copy_and_delete), (6, self.look),
            (2, self.move_memory),
        ]  # fmt: skip
        # The server closes a connection that has been idle for 5 s. A client does it sooner, as
        # otherwise it may send a request on a connection that is just being closed.
        limits = httpx.Limits(keepalive_expiry=2.0)
        with httpx.Client(base_url=self.address, timeout=120, limits=limits) as client:
            while not self.stop.is_set():
                act = rng.choices([a for _, a in acts], [w for w, _ in acts])[0]
                try:
                    came = act(rng, client)
                except (httpx.TransportError, OSError) as error:
                    came = f"!{type(error).__name__}: {error}"
                with self._lock:
                    self.did[act.__name__] += 1
                    if came.startswith("!"):
                        self.wrong[f"{act.__name__}: {came[1:200]}"] += 1
                    elif came:
                        self.did[f"  {act.__name__} {came}"] += 1

    def ask(self, rng: random.Random, client: httpx.Client) -> str:
        prompt = rng.choice(PROMPTS)
        if rng.random() < 0.5:
            body: dict[str, Any] = {
                "model": "demo", "stream": False, "options": {"temperature": 0},
                "messages": [{"role": "user", "content": prompt}],
            }  # fmt: skip
            found = client.post("/api/chat", json=body)
        else:
            messages = [{"role": "user", "content": prompt}]
            body = {"model": "demo", "temperature": 0, "messages": messages}
            found = client.post("/v1/chat/completions", json=body)
        if found.status_code in (503, 404):  # full, or being unloaded, or just being deleted
            return _refusal(found)
        if found.status_code != 200:
            return f"!{found.status_code} {found.text}"
        said = found.json()
        text = said["message"] if "message" in said else said["choices"][0]["message"]
        return "" if text["content"] == self.answers[prompt] else f"!{prompt}: {text['content']!r}"

    def move_memory(self, rng: random.Random, client: httpx.Client) -> str:
        """Change the memory of the running model; 400: it is not loaded, or too little."""
        memory = rng.choice(["10%", "30%", "60%", "100%", "1"])  # auto has a thread more
        found = client.post("/api/memory", json={"model": "demo", "memory": memory})
        if found.status_code in (200, 503):
            return memory if found.status_code == 200 else _refusal(found)
        return "not loaded" if found.status_code in (400, 404) else f"!{found.status_code}"

    def ask_streaming(self, rng: random.Random, client: httpx.Client) -> str:
        prompt = rng.choice(PROMPTS)
        body = {"model": "demo", "prompt": prompt, "options": {"temperature": 0}}
        text, ended = "", False
        with client.stream("POST", "/api/generate", json=body) as found:
            if found.status_code != 200:
                found.read()
                return _refusal(found)
            for line in found.iter_lines():
                about = json.loads(line)
                if "error" in about:
                    return "cut off with an error"
                text, ended = text + about["response"], about["done"]
        if not ended:
            return f"!{prompt}: a stream without an end"
        return "" if text == self.answers[prompt] else f"!{prompt}: {text!r}"

    def hang_up(self, rng: random.Random, client: httpx.Client) -> str:
        options = {"temperature": 50, "top_k": 0, "num_predict": 300}
        body = {"model": "demo", "prompt": "hi", "options": options}
        with client.stream("POST", "/api/generate", json=body) as found:
            if found.status_code != 200:
                found.read()
                return _refusal(found)
            lines = found.iter_lines()
            for _ in range(rng.randrange(6)):
                next(lines, None)
        return ""

    def leave_waiting(self, rng: random.Random, client: httpx.Client) -> str:
        options = {"temperature": 50, "top_k": 0, "num_predict": 300}
        body = {"model": "demo", "prompt": "hi", "stream": False, "options": options}
        with self._raw() as sock:
            sock.sendall(_request("/api/generate", json.dumps(body).encode()))
            time.sleep(rng.random() * 0.3)
        return ""

    def fuzzed(self, rng: random.Random, client: httpx.Client) -> str:
        path = rng.choice(list(_BODIES))
        seeds = [json.dumps(body).encode() for body in _BODIES.values()]
        data = mutate(json.dumps(_BODIES[path]).encode(), seeds, rng)
        found = client.post(path, content=data, headers={"Content-Type": "application/json"})
        if found.status_code >= 500 and found.status_code != 503:
            return f"!{path} {found.status_code} {found.text[:100]} for {data[:300]!r}"
        return f"{found.status_code // 100}xx"

    def rubbish(self, rng: random.Random, client: httpx.Client) -> str:
        with self._raw() as sock:
            sock.sendall(rng.randbytes(rng.choice((1, 40, 3000))) + b"\r\n\r\n")
            sock.settimeout(20)
            with suppress(ConnectionError):
                sock.recv(100)
        return ""

    def half_a_request(self, rng: random.Random, client: httpx.Client) -> str:
        whole = _request("/api/generate", b'{"model": "demo"}')
        with self._raw() as sock:
            sock.sendall(whole[: rng.randrange(len(whole))])
            time.sleep(rng.choice((0.1, 1.0, 12.0)))
        return ""

    def too_large(self, rng: random.Random, client: httpx.Client) -> str:
        body = b'{"model": "demo", "prompt": "%s"}' % (b"x " * rng.choice((10_000, 2_000_000)))
        if rng.random() < 0.3:
            body = body.ljust(33 << 20)
        try:
            found = client.post("/api/generate", content=body)
        except httpx.TransportError:
            return "cut off"
        fine = found.status_code in (400, 413, 503)
        return f"{found.status_code}" if fine else f"!{found.status_code} {found.text[:200]}"

    def ask_large(self, rng: random.Random, client: httpx.Client) -> str:
        found = client.post("/api/generate", json=LARGE_BODY)
        if found.status_code != 200:
            return _refusal(found)
        text = found.json()["response"]
        return "" if text == self.answers[LARGE_PROMPT] else f"!large: {text!r}"

    def watch_health(self) -> None:
        """Ask for /health four times a second until the clients stop."""
        with httpx.Client(base_url=self.address, timeout=60) as client:
            while not self.stop.wait(0.25):
                start = time.monotonic()
                with suppress(httpx.TransportError):  # `run` tells what ended the server
                    client.get("/health")
                self.health_s = max(self.health_s, time.monotonic() - start)

    def unload(self, rng: random.Random, client: httpx.Client) -> str:
        model = rng.choice(("demo", "large:bf16"))
        found = client.post("/api/generate", json={"model": model, "keep_alive": 0})
        return "" if found.status_code == 200 else f"!{found.status_code} {found.text}"

    def copy_and_delete(self, rng: random.Random, client: httpx.Client) -> str:
        name = f"other{rng.randrange(10**9)}"
        body = {"source": "demo:bf16", "destination": f"{name}:bf16"}
        made = client.post("/api/copy", json=body)
        gone = client.request("DELETE", "/api/delete", json={"model": f"{name}:bf16"})
        if made.status_code == 200 and gone.status_code == 200:
            return ""
        return f"!{made.status_code} {made.text} {gone.status_code} {gone.text}"

    def look(self, rng: random.Random, client: httpx.Client) -> str:
        path = rng.choice(("/api/tags", "/api/ps", "/v1/models", "/metrics", "/health", "/nothing"))
        found = client.get(path)
        return "" if found.status_code == (404 if path == "/nothing" else 200) else f"!{path}"

    def _raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)


def _request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _refusal(found: httpx.Response) -> str:
    """Return the error of a response that reports no room; any other response is wrong."""
    try:
        words = found.json()["error"]
    except (ValueError, LookupError):
        words = ""
    fine = found.status_code == 503 and words
    return "refused 503" if fine else f"!{found.status_code} {found.text[:200]}"
