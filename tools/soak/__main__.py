"""Stress a server with many badly behaved clients for a long time, and watch its resources.

Run: python -m tools soak [--minutes 60] [--clients 6] [--seed 0] [--memory 4GiB]

Clients ask questions with known answers, and disconnect while they wait or read. They send invalid
data, half requests and huge ones. They unload, copy and delete models; a model of 0.8 GB is loaded
and unloaded beside the demo. The server runs in a process of its own, in a control group of
--memory, and reports its resources every few seconds. Afterwards no request, pin, thread or
descriptor may be left, and memory must have stayed flat. Every answer must be right or a worded
error, and /health must answer within a second all the time. Prints a table; exits 1 when anything
is wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from benchmarks.cgroup import MemoryGroup
from moeinf.runtime.checkpoints.checkpoint import open_checkpoint
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.chat import Conversation
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.library.repacking.repack import repack
from moeinf.runtime.library.sources import LocalSource
from moeinf.runtime.names import ModelName
from moeinf.runtime.requests import Limits
from moeinf.runtime.sampling.sampler import SamplingOptions
from moeinf.runtime.sizes import parse_memory, parse_size
from scripts.make_checkpoint import config, make_checkpoint
from tools.soak.clients import LARGE_BODY, LARGE_PROMPT, PROMPTS, Clients

LARGE = {"layers": 8, "experts": 16, "hidden": 1024, "intermediate": 1024, "top_k": 2}
_HEALTH_S = 1.0  # the longest time for an answer of /health
_FLAT_MIB = 24.0  # allowed growth between two quiet moments with the demo alone


def answers_of(home: Path) -> dict[str, str]:
    """Return the model's answers without disturbance."""
    manifest, folder = Library(Settings(home)).read("demo")
    found = {}
    with Engine.open(
        manifest, folder, EngineConfig(memory=parse_memory("100%")), Settings(home)
    ) as e:
        for prompt in PROMPTS:
            talk = Conversation(e)
            found[prompt] = "".join(talk.ask(prompt, SamplingOptions(temperature=0), Limits()))
    return found


def install(home: Path) -> None:
    """Install the demo and `large`."""

    def ignore(*_: object) -> None:
        """Ignore progress and notes."""

    make_checkpoint(home / "large", config(**LARGE))
    for folder, name in ((DEMO_CHECKPOINT, "demo"), (home / "large", "large")):
        source = LocalSource(open_checkpoint(folder), name)
        repack(source, Library(Settings(home)), ModelName(name, "bf16"), ignore, ignore)


@contextmanager
def serving(home: Path, memory_bytes: int | None) -> Iterator[subprocess.Popen[str]]:
    """Start the server, with a limit of all its memory; kill it at the end.

    Raises benchmarks.cgroup.NoMemoryGroup.
    """
    command = [sys.executable, "-m", "tools.soak.server", str(home)]
    group = None if memory_bytes is None else MemoryGroup(memory_bytes)
    try:
        with (home / "stderr").open("w") as stderr:
            server = subprocess.Popen(
                command if group is None else group.command(command),
                stdout=subprocess.PIPE, stderr=stderr, text=True,
            )  # fmt: skip
        try:
            yield server
        finally:
            server.kill()
            server.wait()
    finally:
        if group is not None:
            group.close()


def soak(
    minutes: float, clients: int, seed: int, memory_bytes: int | None, log: Callable[[str], None]
) -> list[str]:
    """Run the whole test; return the problems."""
    with tempfile.TemporaryDirectory(prefix="moeinf-soak-") as name:
        home = Path(name)
        install(home)
        answers = answers_of(home)
        with serving(home, memory_bytes) as server:
            wrong = _soak(server, answers, minutes, clients, seed, log)
        bugs = (home / "stderr").read_text().split("Traceback")[1:]
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
    _learn_large(crowd)
    _crowd(crowd, server, min(2.0, minutes / 4), clients, seed + clients)  # pools and caches fill
    quiet = _when_quiet(samples, crowd)
    del samples[:]
    crowd.health_s = 0.0
    lasted = _crowd(crowd, server, minutes, clients, seed)
    wrong = [f"×{count} {text}" for text, count in crowd.wrong.most_common()]
    if server.poll() is not None:
        return [*wrong, f"the server ended with {server.returncode}"]
    loud = samples[:]
    after = _when_quiet(samples, crowd)
    grown = (after["rss"] - quiet["rss"]) / (1 << 20)
    log(f"{lasted:.1f} minutes, {clients} clients, {sum(crowd.did.values()):,} acts")
    for text, count in sorted(crowd.did.items(), key=lambda pair: pair[0].strip()):
        log(f"  {text:40}{count:10,}")
    log(f"{'':12}{'quiet before':>14}{'at most':>10}{'quiet after':>13}")
    for what in ("descriptors", "threads", "children", "tasks", "requests", "busy", "models"):
        most = max(sample[what] for sample in loud)
        log(f"{what:12}{quiet[what]:14}{most:10}{after[what]:13}")
        if what != "models" and after[what] > quiet[what]:
            wrong.append(f"{what}: {quiet[what]} before, {after[what]} after")
    most = max(sample["rss"] for sample in loud)
    log(f"{'RSS, MiB':12}{quiet['rss'] >> 20:14}{most >> 20:10}{after['rss'] >> 20:13}")
    log(f"longest answer of /health: {crowd.health_s:.2f} s")
    if crowd.health_s > _HEALTH_S:
        wrong.append(f"/health took {crowd.health_s:.2f} s")
    if grown > _FLAT_MIB:
        wrong.append(f"memory grew by {grown:.0f} MiB")
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(10)
    except subprocess.TimeoutExpired:
        wrong.append("the server does not end within 10 s of SIGTERM")
    return wrong


def _crowd(
    crowd: Clients, server: subprocess.Popen[str], minutes: float, clients: int, seed: int
) -> float:
    """Run the clients; return how many minutes that took."""
    start = time.monotonic()
    crowd.stop.clear()
    threads = [threading.Thread(target=crowd.run, args=(seed + n,)) for n in range(clients)]
    threads.append(threading.Thread(target=crowd.watch_health))
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


def _learn_large(crowd: Clients) -> None:
    """Keep the first answer of `large`, whose weights are random, as the right one."""
    found = httpx.post(f"{crowd.address}/api/generate", json=LARGE_BODY, timeout=120)
    crowd.answers[LARGE_PROMPT] = found.raise_for_status().json()["response"]


def _when_quiet(samples: list[dict[str, Any]], crowd: Clients) -> dict[str, Any]:
    """Return the server's resources after one undisturbed answer of a model just loaded."""
    with httpx.Client(base_url=crowd.address, timeout=120) as client:
        for model in ("demo", "large:bf16"):  # a model keeps the processes of its grammars
            client.post("/api/generate", json={"model": model, "keep_alive": 0})
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
    parser.add_argument("--memory", default="", help="limit of the server, such as 4GiB")
    options = parser.parse_args()
    memory_bytes = parse_size(options.memory) if options.memory else None
    wrong = soak(options.minutes, options.clients, options.seed, memory_bytes, print)
    print(*(f"WRONG: {text}" for text in wrong), sep="\n", end="\n" if wrong else "")
    print("nothing is wrong" if not wrong else f"{len(wrong)} things are wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
