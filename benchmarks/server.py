"""python -m benchmarks.server start | memory | throughput: measure `moeinf serve` from a client.

It starts real processes and speaks HTTP. Sides take turns, and a ratio is taken within one round,
because the machine may be busy.

    start       from the start of the process to an answered /health, against one that only
                imports fastapi and uvicorn
    memory      resident bytes before the first request for a model, with it, and after unloading
    throughput  tokens per second of n clients at once against the same requests in sequence; every
                answer must be the same in both
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from benchmarks.calibrated import named
from benchmarks.demo import prompts
from benchmarks.long_prompt import on_slow_drive
from benchmarks.models import RaceModel
from benchmarks.shapes import SHAPES, shape
from moeinf.cli.commands.models.pull import ensure
from moeinf.cli.output import Output
from moeinf.runtime.config import Settings, read_environment
from moeinf.runtime.jobs.bench import machine

_COMMAND = [sys.executable, "-c", "from moeinf.cli.entry import main; main()", "serve"]
_IMPORTS = [sys.executable, "-c", "import fastapi, uvicorn"]
_SECONDS = 60.0
Result = dict[str, Any]


@dataclass
class Server:
    """A running server. started_s: seconds until /health was answered."""

    process: subprocess.Popen[str]
    address: str
    started_s: float

    def ask(self, path: str, body: Result | None = None) -> Result:
        """Send a POST with `body`, or a GET without one, and return the answer."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = Request(self.address + path, data, headers)  # our own http://
        with urlopen(request, timeout=600) as response:
            found: Result = json.loads(response.read())
        return found

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def serving(home: Path, arguments: Sequence[str] = (), parallel: int = 1) -> Iterator[Server]:
    """Yield a server on a free port that answers. Raises RuntimeError when it exits instead."""
    variables = {"MOEINF_HOME": os.fspath(home), "MOEINF_NUM_PARALLEL": str(parallel)}
    command = [*_COMMAND, "--port", "0", *arguments]
    begin = time.perf_counter()
    with subprocess.Popen(
        command, env={**os.environ, **variables}, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            said = process.stderr.readline()
            found = re.search(r"http://\S+", said)
            if found is None:
                raise RuntimeError(said + process.stderr.read())
            server = Server(process, found[0], 0.0)
            while True:
                try:
                    server.ask("/health")
                    break
                except URLError:  # not listening yet
                    if time.perf_counter() - begin > _SECONDS:
                        raise
                    time.sleep(0.002)
            server.started_s = time.perf_counter() - begin
            yield server
        finally:
            process.terminate()


def start(rounds: int) -> Result:
    """Measure the start; the first round reads the files and does not count."""
    ours, imports = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as home:
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            subprocess.run(_IMPORTS, check=True)
            imports.append(time.perf_counter() - begin)
            with serving(Path(home)) as server:
                ours.append(server.started_s)
    ratios = [a / b for a, b in zip(ours[1:], imports[1:], strict=True)]
    return {
        "server_s": round(statistics.median(ours[1:]), 3),
        "imports_s": round(statistics.median(imports[1:]), 3),
        **_spread(ratios),
    }


def memory(home: Path, model: str) -> Result:
    """Measure twice: the first load keeps libraries resident, and only the second shows leaks."""
    with serving(home, ["--memory", "100%"]) as server:
        found = {"before": server.resident_bytes()}
        for which in ("first", "second"):
            server.ask("/api/generate", _request(model, "1 + 1 =", 1, 8))
            found[f"{which}_loaded"] = server.resident_bytes()
            server.ask("/api/generate", {"model": model, "keep_alive": 0})
            while server.ask("/api/ps")["models"]:
                time.sleep(0.1)
            found[f"{which}_unloaded"] = server.resident_bytes()
    return {f"{name}_MB": round(value / 1e6, 1) for name, value in found.items()}


def throughput(home: Path, model: str, o: argparse.Namespace) -> Result:
    """Return the throughput by share of memory, then by number of clients."""
    return {share: _throughput(home, model, share, o) for share in o.shares}


def _throughput(home: Path, model: str, share: str, o: argparse.Namespace) -> Result:
    texts = prompts(max(o.clients))
    tasks = [_request(model, text, number, o.tokens) for number, text in enumerate(texts)]
    found: Result = {}
    options = ["--memory", share, "--threads", str(o.threads)]
    if o.shape != "demo":  # the demo's own context is shorter
        options += ["--ctx", "1024"]
    with serving(home, options, max(o.clients)) as server:
        for task in tasks:  # load the model and fill the cache with the experts of these texts
            server.ask("/api/generate", task)
        speeds = {count: (list[float](), list[float]()) for count in o.clients}
        for number in range(o.rounds):
            for count, (serial, joint) in speeds.items():
                sides = [(serial, 1), (joint, count)]
                answers = []
                for speed, threads in sides if number % 2 else reversed(sides):
                    rate, texts = _rate(server, tasks[:count], threads)
                    speed.append(rate)
                    answers.append(texts)
                assert answers[0] == answers[1], "a batched answer differs"
        for count, (serial, joint) in speeds.items():
            found[str(count)] = {
                "one_after_the_other": round(statistics.median(serial), 2),
                "at_once": round(statistics.median(joint), 2),
                **_spread([b / a for a, b in zip(serial, joint, strict=True)]),
            }
    return found


def _rate(server: Server, tasks: Sequence[Result], threads: int) -> tuple[float, list[str]]:
    """Return the tokens per second of all together, prefill included, and the answers."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        answers = list(pool.map(lambda task: server.ask("/api/generate", task), tasks))
    seconds = time.perf_counter() - begin
    return sum(a["eval_count"] for a in answers) / seconds, [a["response"] for a in answers]


def _request(model: str, text: str, seed: int, tokens: int) -> Result:
    options = {"num_predict": tokens, "seed": seed}
    return {"model": model, "prompt": text, "stream": False, "options": options}


def _spread(ratios: Sequence[float]) -> Result:
    """Return the median and the range of the rounds' ratios."""
    return {
        "ratio": round(statistics.median(ratios), 2),
        "range": [round(min(ratios), 2), round(max(ratios), 2)],
    }


@contextmanager
def model_of(o: argparse.Namespace) -> Iterator[tuple[Path, str]]:
    """Yield a home and the name of the model in it: the demo, or a shape with random weights."""
    if o.shape == "demo":
        with tempfile.TemporaryDirectory() as home:
            ensure("demo:bf16", Settings(Path(home)), Output(quiet=True))
            yield Path(home), "demo:bf16"
        return
    made = RaceModel(o.cache, named(o.shape, o.layers), shape(o.shape, o.layers))
    made.ours(o.tag)
    yield made.settings.home, f"{made.name}:{o.tag}"


def main() -> None:
    o = _options()
    if on_slow_drive("benchmarks.server", o.drive):
        return
    if o.what == "start":
        found = start(o.rounds)
    else:
        with model_of(o) as (home, model):
            found = memory(home, model) if o.what == "memory" else throughput(home, model, o)
            found["model"] = model
    found |= {"command": " ".join(sys.argv), "machine": machine()}
    print(json.dumps(found, indent=1))


def _options() -> argparse.Namespace:
    cache = read_environment({**os.environ}).home / "benchmarks"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["start", "memory", "throughput"])
    parser.add_argument("--shape", choices=["demo", *SHAPES], default="demo")
    parser.add_argument("--layers", type=int, help="fewer than the real shape has")
    parser.add_argument("--tag", default="q4", help="of a shape; the demo's is bf16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=48, help="of an answer, at most")
    parser.add_argument("--shares", type=lambda t: t.split(","), default=["100%", "35%"])
    parser.add_argument(
        "--clients", type=lambda t: [int(n) for n in t.split(",")], default=[1, 2, 4]
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--drive", help="bytes per second that the drive is limited to: 500MB")
    parser.add_argument("--cache", type=Path, default=cache, help="may be deleted")
    return parser.parse_args()


if __name__ == "__main__":
    main()
