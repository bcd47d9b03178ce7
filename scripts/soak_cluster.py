"""Kill a replica every 30 s while clients read streams of a cluster, and check every answer.

Run: python scripts/soak_cluster.py [--minutes 30] [--every 30] [--replicas 2] [--clients 4]

The cluster is a `moeinf serve --cluster local --retry` with a home of its own. Every third kill is
a hang (SIGSTOP) instead. Each answer must be the one of the undisturbed cluster, once and whole.
Prints a table; exits 1 when an answer is wrong, cut off or an error, or when the server's process
has grown.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx

from moeinf.cli.commands.models.pull import ensure
from moeinf.cli.output import Output
from moeinf.runtime.config import Settings
from tests.server.cluster.clients import LONG, streamed, whole
from tests.server.cluster.local_cluster import Cluster

PROMPTS = ("a b c", "17+25=", "sort owl, fig, zebra, ant", "reverse planet", "upper fig")
_GROWN_MIB = 64.0  # of the doors' process, allowed
_REPLACED_S = 120.0
Answer = tuple[str, int]  # a text, and the number of its lines


def ask(client: httpx.Client, prompt: str, stream: bool) -> Answer | str:
    """Return an answer, or why there is not one."""
    body = {"prompt": prompt, "stream": stream}
    try:
        if not stream:
            found = client.post("/v1/completions", json=LONG | body).json()
            return (found["choices"][0]["text"], 1) if "choices" in found else str(found)
        text, lines = streamed(client, **body)
    except httpx.HTTPError as error:
        return repr(error)
    return (text, len(lines)) if whole(lines) else str(lines[-3:])


class Soak:
    """The clients, what they expect, and what they got."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster, self._draw = cluster, random.Random(seed)
        self.expected = {
            (prompt, stream): ask(cluster.client, prompt, stream)
            for prompt in PROMPTS
            for stream in (False, True)
        }
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.longest_s = 0.0
        self._over = threading.Event()
        self._begin = time.monotonic()

    def client(self, number: int) -> None:
        draw, ended = random.Random(number), time.monotonic()
        with httpx.Client(base_url=self._cluster.client.base_url, timeout=300) as client:
            while not self._over.is_set():
                case = draw.choice(PROMPTS), draw.random() < 0.7
                begin = time.monotonic()
                idle_s = begin - ended
                got, ended = ask(client, *case), time.monotonic()
                self.longest_s = max(self.longest_s, ended - begin)
                self.counts["answers"] += 1
                if got != self.expected[case]:
                    at = f"{ended - self._begin:.1f} s, {ended - begin:.3f} s after {idle_s:.3f} s"
                    self.wrong.append(f"{at}: {case}: {got!r}")

    def kills(self, until: float, every_s: float, replicas: int) -> None:
        """Kill or stop one replica after the other, each once all are there."""
        while time.monotonic() + every_s < until:
            time.sleep(every_s)
            waited = time.monotonic() + _REPLACED_S
            while len(self._cluster.replicas()) < replicas and time.monotonic() < waited:
                time.sleep(0.2)
            hangs = self.counts["kills"] % 3 == 2
            pid = self._draw.choice(sorted(self._cluster.replicas()))
            os.kill(pid, signal.SIGSTOP if hangs else signal.SIGKILL)
            at_s = time.monotonic() - self._begin
            print(f"{at_s:.1f} s: {'hang' if hangs else 'kill'}", flush=True)
            self.counts["kills"] += 1
            self.counts["of them hangs"] += hangs

    def run(self, minutes: float, every_s: float, replicas: int, clients: int) -> None:
        threads = [threading.Thread(target=self.client, args=(n,)) for n in range(clients)]
        for thread in threads:
            thread.start()
        try:
            self.kills(time.monotonic() + 60 * minutes, every_s, replicas)
            time.sleep(every_s)  # the last one is replaced
        finally:
            self._over.set()
            for thread in threads:
                thread.join()


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / (1 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between kills")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    o = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        ensure("demo", Settings(folder / "home"), Output(quiet=True))
        options = ("--retry", "--replicas", str(o.replicas), "--memory", "50%")
        cluster = Cluster(folder / "home", folder / "log", *options)
        try:
            soak = Soak(cluster, o.seed)
            assert not any(isinstance(one, str) for one in soak.expected.values()), soak.expected
            before = resident_mib(cluster.process.pid)
            soak.run(o.minutes, o.every, o.replicas, o.clients)
            grown = resident_mib(cluster.process.pid) - before
        finally:
            cluster.close()
    for name, count in soak.counts.items():
        print(f"{name:20} {count:>10}")
    print(f"{'wrong answers':20} {len(soak.wrong):>10}")
    print(f"{'longest, s':20} {soak.longest_s:>10.1f}")
    print(f"{'doors grown, MiB':20} {grown:>10.1f}")
    for line in soak.wrong[:20]:
        print(line)
    if soak.wrong or grown > _GROWN_MIB:
        sys.exit(1)


if __name__ == "__main__":
    main()
