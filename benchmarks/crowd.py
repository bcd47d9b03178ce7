"""python -m benchmarks.crowd: tokens per second of streams while many other clients are connected.

Some clients stream the same answers, one after the other, on both sides. On one side the server
also has connections that send nothing, and open pages: each watches the experts
(`/api/experts?stream=1`) and asks every 5 s which models there are and which are loaded.
Sides take turns, and a ratio is taken within one round. The clients run on the same machine: what
their own reading costs counts against the server. Its processor time per token is measured, too,
because other work on the machine changes it less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.demo import prompts
from benchmarks.server import Result, Server, model_of, serving
from benchmarks.shapes import SHAPES
from moeinf.runtime.config import read_environment
from moeinf.runtime.jobs.bench import machine

_CONTEXT = "1024"
_LOOK_S = 5.0  # between two looks of a page, as in app.js
_LOOKS = ("/api/tags", "/api/ps")


@asynccontextmanager
async def connected(
    address: str,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Yield a connection to a server, which is closed afterwards."""
    where = urlsplit(address)
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=1 << 20)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def request(method: str, path: str, body: Result | None = None) -> bytes:
    """Return the bytes of an HTTP request that keeps its connection."""
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def lines_of(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the pieces of a chunked answer. Raises RuntimeError for any other status than 200."""
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0] or b"chunked" not in head.lower():
        raise RuntimeError(head.decode("latin-1"))
    while size := int(await reader.readline(), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readline()


async def stream(address: str, tasks: Sequence[Result]) -> int:
    """Stream one answer after the other; return the tokens that have come."""
    tokens = 0
    async with connected(address) as (reader, writer):
        for task in tasks:
            writer.write(request("POST", "/api/generate", task))
            async for piece in lines_of(reader):
                last = piece
            tokens += int(json.loads(last.splitlines()[-1])["eval_count"])
    return tokens


async def page(address: str, model: str, frames: list[int], looks: list[int]) -> None:
    """Do what an open page does, until cancelled, and count the lines and the looks."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watch(address, model, frames))
        tasks.create_task(look(address, looks))


async def watch(address: str, model: str, frames: list[int]) -> None:
    """Watch the experts until cancelled, and count the lines."""
    async with connected(address) as (reader, writer):
        writer.write(request("GET", f"/api/experts?stream=1&model={model}"))
        async for _ in lines_of(reader):
            frames[0] += 1


async def look(address: str, looks: list[int]) -> None:
    """Ask for the models until cancelled, and count how often.

    The server closes a connection that is idle as long as a page waits, so each look opens one.
    """
    while True:
        async with connected(address) as (reader, writer):
            for path in _LOOKS:
                writer.write(request("GET", path))
                await whole(reader)
        looks[0] += 1
        await asyncio.sleep(_LOOK_S)


async def whole(reader: asyncio.StreamReader) -> bytes:
    """Return the body of an answer of known length. Raises RuntimeError for another status."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = re.search(rb"\r\ncontent-length: (\d+)", head)
    if b" 200 " not in head.split(b"\r\n", 1)[0] or length is None:
        raise RuntimeError(head.decode("latin-1"))
    return await reader.readexactly(int(length[1]))


@dataclass(frozen=True)
class Side:
    """The figures of one side in one round. cpu_ms: the server's processor time per token."""

    tokens: int
    seconds: float
    cpu_ms: float
    frames: int
    looks: int

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


async def side(
    server: Server, model: str, tasks: Sequence[Result], o: argparse.Namespace, crowd: bool
) -> Side:
    """Let every stream do all tasks, in an order of its own, among the crowd or alone."""
    frames, looks, address = [0], [0], server.address
    async with AsyncExitStack() as opened:
        for _ in range(o.idle if crowd else 0):
            await opened.enter_async_context(connected(address))
        watchers = [
            asyncio.create_task(page(address, model, frames, looks))
            for _ in range(o.watchers if crowd else 0)
        ]
        spent, begin = cpu_seconds(server), time.perf_counter()
        counts = await asyncio.gather(
            *(stream(address, tasks[n:] + tasks[:n]) for n in range(o.streams))
        )
        seconds, spent = time.perf_counter() - begin, cpu_seconds(server) - spent
        for watcher in watchers:
            if watcher.done():
                watcher.result()  # an error of its own
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
    return Side(sum(counts), seconds, spent / sum(counts) * 1e3, frames[0], looks[0])


def cpu_seconds(server: Server) -> float:
    """Return the processor time that the server's process has used."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(home: Path, model: str, o: argparse.Namespace) -> Result:
    """Return tokens per second with and without the crowd, and the ratio by rounds."""
    tasks: list[Result] = [
        {"model": model, "prompt": text, "options": {"num_predict": o.tokens, "seed": number}}
        for number, text in enumerate(prompts(max(o.tasks, o.streams)))
    ]
    options = ["--memory", o.share, "--threads", str(o.threads)]
    if o.shape != "demo":  # the demo's own context is shorter
        options += ["--ctx", _CONTEXT]
    sides: dict[bool, list[Side]] = {False: [], True: []}
    with serving(home, options, o.streams) as server:
        asyncio.run(side(server, model, tasks, o, False))  # loads the model
        for number in range(o.rounds):
            for crowd in (False, True) if number % 2 else (True, False):
                sides[crowd].append(asyncio.run(side(server, model, tasks, o, crowd)))
    alone, crowded = sides[False], sides[True]
    assert {one.tokens for one in alone} == {one.tokens for one in crowded}, "an answer differs"
    watched = max(1, o.watchers) * sum(one.seconds for one in crowded)
    return {
        "tokens_per_s": _both([one.rate for one in alone], [one.rate for one in crowded]),
        "cpu_ms_per_token": _both([one.cpu_ms for one in alone], [one.cpu_ms for one in crowded]),
        "frames_per_watcher_and_s": round(sum(one.frames for one in crowded) / watched, 2),
        "looks_per_watcher_and_s": round(sum(one.looks for one in crowded) / watched, 2),
        "tokens_of_a_side": alone[0].tokens,
        "streams": o.streams,
        "idle": o.idle,
        "watchers": o.watchers,
    }


def _both(alone: Sequence[float], crowded: Sequence[float]) -> Result:
    """Return both medians, and the median and the range of the rounds' ratios."""
    ratios = [b / a for a, b in zip(alone, crowded, strict=True)]
    return {
        "alone": round(statistics.median(alone), 3),
        "in_the_crowd": round(statistics.median(crowded), 3),
        "ratio": round(statistics.median(ratios), 3),
        "range": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def main() -> None:
    o = _options()
    with model_of(o) as (home, model):
        found = measure(home, model, o)
    about = {"model": model, "command": " ".join(sys.argv), "machine": machine()}
    print(json.dumps(found | about, indent=1))


def _options() -> argparse.Namespace:
    cache = read_environment({**os.environ}).home / "benchmarks"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=["demo", *SHAPES], default="demo")
    parser.add_argument("--layers", type=int, help="fewer than the real shape has")
    parser.add_argument("--tag", default="q4", help="of a shape; the demo's is bf16")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--idle", type=int, default=200, help="connections that send nothing")
    parser.add_argument("--watchers", type=int, default=5, help="open pages")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tasks", type=int, default=16, help="answers of a stream in a round")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer, at most")
    parser.add_argument("--share", default="100%", help="of the experts' memory")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache", type=Path, default=cache, help="may be deleted")
    return parser.parse_args()


if __name__ == "__main__":
    main()
