"""Stress a server with many badly behaved clients for a long time, and watch its resources.

Run: python -m tools soak [--minutes 60] [--clients 6] [--seed 0]

Clients ask questions with known answers, and disconnect while they wait or read. They send invalid
data, half requests and huge ones. They unload, copy and delete models. The server runs in a process
of its own and reports its resources every few seconds. Afterwards no request, pin, thread or
descriptor may be left, and memory must have stayed flat. Every answer must be right or a worded
error. Prints a table; exits 1 when anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.sizes import parse_memory
from tools.fuzz import mutate

PROMPTS = (
    "17+25=", "sort owl, fig, zebra, ant", "reverse planet", "upper fig", "spell tree",
    "json a=1 b=2",
)  # fmt: skip
_FLAT_MIB = 24.0  # allowed growth of the last third's median over that of the second
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
        self._lock = threading.Lock()

    def run(self, seed: int) -> None:
        rng = random.Random(seed)
        acts: list[tuple[int, Callable[[random.Random, httpx.Client], str]]] = [
            (30, self.ask), (10, self.ask_streaming), (12, self.hang_up), (6, self.leave_waiting),
            (25, self.fuzzed), (6, self.rubbish), (3, self.half_a_request), (2, self.too_large),
            (1, self.unload), (1, self.copy_and_delete), (6, self.look), (2, self.move_memory),
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

    def unload(self, rng: random.Random, client: httpx.Client) -> str:
        found = client.post("/api/generate", json={"model": "demo", "keep_alive": 0})
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


def answers_of(home: Path) -> dict[str, str]:
    """Return the model's answers without disturbance."""
    from moeinf.runtime.engine.engine import Engine
    from moeinf.runtime.generation.chat import Conversation
    from moeinf.runtime.library.library import Library
    from moeinf.runtime.requests import Limits
    from moeinf.runtime.sampling.sampler import SamplingOptions

    manifest, folder = Library(Settings(home)).read("demo")
    found = {}
    with Engine.open(
        manifest, folder, EngineConfig(memory=parse_memory("100%")), Settings(home)
    ) as e:
        for prompt in PROMPTS:
            talk = Conversation(e)
            found[prompt] = "".join(talk.ask(prompt, SamplingOptions(temperature=0), Limits()))
    return found


def pull_demo(home: Path) -> None:
    from moeinf.runtime.checkpoints.checkpoint import open_checkpoint
    from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
    from moeinf.runtime.library.repacking.repack import repack
    from moeinf.runtime.library.sources import LocalSource
    from moeinf.runtime.names import ModelName

    def ignore(*_: object) -> None:
        """Ignore progress and notes."""

    source = LocalSource(open_checkpoint(DEMO_CHECKPOINT), "demo")
    repack(source, Library(Settings(home)), ModelName("demo", "bf16"), ignore, ignore)


def soak(minutes: float, clients: int, seed: int, log: Callable[[str], None]) -> list[str]:
    """Run the whole test; return the problems."""
    with tempfile.TemporaryDirectory(prefix="moeinf-soak-") as name:
        home = Path(name)
        pull_demo(home)
        answers = answers_of(home)
        said = home / "stderr"
        with said.open("w") as stderr:
            command = [sys.executable, "-m", "tools.soak_server", str(home)]
            server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        try:
            wrong = _soak(server, answers, minutes, clients, seed, log)
        finally:
            server.kill()
            server.wait()
        bugs = said.read_text().split("Traceback")[1:]
        return [*wrong, *(f"a traceback:{text[:2000]}" for text in bugs[:5])]


def _soak(
    server: subprocess.Popen[str],
    answers: dict[str, str],
    minutes: float,
    clients: int,
    seed: int,
    log: Callable[[str], None],
) -> list[str]:
    assert server.stdout is not None
    port = json.loads(server.stdout.readline())["port"]
    samples: list[dict[str, Any]] = []

    def read() -> None:
        for line in server.stdout:  # type: ignore[union-attr]
            samples.append(json.loads(line))

    threading.Thread(target=read, daemon=True).start()
    crowd = Clients(port, answers)
    _until_up(crowd.address)
    _crowd(crowd, server, min(2.0, minutes / 4), clients, seed + clients)  # pools and caches fill
    quiet = _when_quiet(samples, crowd)
    del samples[:]
    lasted = _crowd(crowd, server, minutes, clients, seed)
    wrong = [f"×{count} {text}" for text, count in crowd.wrong.most_common()]
    if server.poll() is not None:
        return [*wrong, f"the server ended with {server.returncode}"]
    loud = samples[:]
    after = _when_quiet(samples, crowd)
    third = max(1, len(loud) // 3)
    middle, last = (median(s["rss"] for s in part) for part in (loud[third:-third], loud[-third:]))
    grown = (last - middle) / (1 << 20)
    log(f"{lasted:.1f} minutes, {clients} clients, {sum(crowd.did.values()):,} acts")
    for text, count in sorted(crowd.did.items(), key=lambda pair: pair[0].strip()):
        log(f"  {text:40}{count:10,}")
    log(f"{'':12}{'quiet before':>14}{'at most':>10}{'quiet after':>13}")
    for what in ("descriptors", "threads", "children", "tasks", "requests", "busy", "models"):
        most = max(sample[what] for sample in loud)
        log(f"{what:12}{quiet[what]:14}{most:10}{after[what]:13}")
        if what != "models" and after[what] > quiet[what]:
            wrong.append(f"{what}: {quiet[what]} before, {after[what]} after")
    parts = [median(s["rss"] for s in loud[n * len(loud) // 6 :][: max(1, len(loud) // 6)])
             for n in range(6)]  # fmt: skip
    log("RSS by sixths, MiB: " + ", ".join(f"{value / (1 << 20):.0f}" for value in parts))
    if grown > _FLAT_MIB:
        wrong.append(f"memory grew by {grown:.0f} MiB from the second third to the last")
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(30)
    except subprocess.TimeoutExpired:
        wrong.append("the server does not end within 30 s of SIGTERM")
    return wrong


def _crowd(
    crowd: Clients, server: subprocess.Popen[str], minutes: float, clients: int, seed: int
) -> float:
    """Run the clients; return how many minutes that took."""
    start = time.monotonic()
    crowd.stop.clear()
    threads = [threading.Thread(target=crowd.run, args=(seed + n,)) for n in range(clients)]
    for thread in threads:
        thread.start()
    while time.monotonic() - start < 60 * minutes and server.poll() is None:
        time.sleep(min(10.0, 6 * minutes))
    crowd.stop.set()
    for thread in threads:
        thread.join(150)
    return (time.monotonic() - start) / 60


def _until_up(address: str) -> None:
    for _ in range(600):
        with suppress(httpx.TransportError):
            if httpx.get(f"{address}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError("the server does not come up")


def _when_quiet(samples: list[dict[str, Any]], crowd: Clients) -> dict[str, Any]:
    """Return the server's resources after one undisturbed answer of a model just loaded."""
    with httpx.Client(base_url=crowd.address, timeout=120) as client:
        crowd.unload(random.Random(0), client)  # a model keeps the processes of its grammars
        came = "refused"
        for _ in range(60):  # leftovers of clients may be answered first
            came = crowd.ask(random.Random(0), client)
            if not came.startswith("refused"):
                break
            time.sleep(1)
        assert not came, came
    time.sleep(15)  # half requests have their deadline, idle connections are closed
    seen = len(samples)
    while len(samples) < seen + 2:
        time.sleep(0.2)
    return samples[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    wrong = soak(options.minutes, options.clients, options.seed, print)
    print(*(f"WRONG: {text}" for text in wrong), sep="\n", end="\n" if wrong else "")
    print("nothing is wrong" if not wrong else f"{len(wrong)} things are wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
