"""Measure what a cluster costs beside the model: disk, start, memory, the time of a first byte.

Run: python scripts/cluster_cost.py [--replicas 2]

The cluster is a `moeinf serve --cluster local` with the demo in a home of its own. Memory is Pss,
in which processes share a page that they share, before any model is loaded. Needs Linux.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx

from moeinf.cli.commands.models.pull import ensure
from moeinf.cli.output import Output
from moeinf.runtime.config import Settings
from tests.server.cluster.local_cluster import Cluster
from tests.server.cluster.two_nodes import REPLICA, below

_REQUESTS = 9  # of which the middle one is shown


def disk_mb(package: str) -> float:
    """Return the MB that a package takes on disk."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    files = [path for path in Path(spec.origin).parent.rglob("*") if path.is_file()]
    return sum(path.stat().st_blocks * 512 for path in files) / 1e6


def memory_mb(server: int) -> dict[str, float]:
    """Return the Pss of the server's process and of those below it, in MB, by what they are."""
    found: defaultdict[str, float] = defaultdict(float)
    for pid in (server, *below(server)):
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            kind = "Ray"
            if pid == server:
                kind = "server (ingress)"
            elif REPLICA in command:
                kind = "replicas"
            elif b"ray::Serve" in command or b"ray::Proxy" in command:
                kind = "Serve (controller, proxy)"
            found[kind] += int(re.findall(r"^Pss: +(\d+) kB", text, re.MULTILINE)[0]) * 1024 / 1e6
    return found


def first_byte_ms(address: httpx.URL) -> float:
    """Return the time to the first byte of an answer of one token, with a new connection."""
    body = {"model": "demo", "prompt": "17+25=", "options": {"num_predict": 1}}
    begin = time.perf_counter()
    with (
        httpx.Client(base_url=address, timeout=60) as client,
        client.stream("POST", "/api/generate", json=body) as answer,
    ):
        next(answer.iter_raw())
        return (time.perf_counter() - begin) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=2)
    options = parser.parse_args()
    print(f"{'Ray on disk, MB':30} {disk_mb('ray'):>8.0f}")
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        ensure("demo", Settings(folder / "home"), Output(quiet=True))
        begin = time.monotonic()
        cluster = Cluster(folder / "home", folder / "log", "--replicas", str(options.replicas))
        try:
            print(f"{'listens after, s':30} {time.monotonic() - begin:>8.1f}")
            for kind, megabytes in memory_mb(cluster.process.pid).items():
                print(f"{kind + ', MB':30} {megabytes:>8.0f}")
            times = sorted(first_byte_ms(cluster.client.base_url) for _ in range(_REQUESTS))
            print(f"{'first byte, ms':30} {times[_REQUESTS // 2]:>8.0f}")
        finally:
            cluster.close()


if __name__ == "__main__":
    main()
