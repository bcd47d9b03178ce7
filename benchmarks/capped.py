"""python -m benchmarks.capped: race both sides with too little memory for all experts.

cgroup.py enforces the limit; recorded_routing.py gives it the routing of a real model.

Each program runs in a control group whose memory, page cache included, is limited to

    our dense weights + 300 MB + a share of our experts

and gets the same tokens of a text. The two take turns every few tokens, so that both see
the same drive. Before each start its files are dropped from the page cache. The floor's speeds of
RAM and drive are measured before and after each race, and the better ones count. The floor of both
at once has the speeds that each of them has while the other is read.
(Longer than other files by its options and the three ways to start a peer.)
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import statistics
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.at_once import measure_at_once
from benchmarks.calibrated import named
from benchmarks.cgroup import MemoryGroup, NoMemoryGroup
from benchmarks.cold import forget_pages
from benchmarks.models import GGUF_OF_TAG, RaceModel
from benchmarks.recorded_routing import ROUTINGS, routed, text
from benchmarks.report import capped_markdown
from benchmarks.shapes import SHAPES, shape
from benchmarks.worker import Worker, WorkerFailed
from moeinf.runtime.config import read_environment
from moeinf.runtime.jobs.bench import machine, read_ceiling
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.placement.bandwidth import drive_now, some_shards
from moeinf.runtime.system import physical_bytes

SPARE_BYTES = 300_000_000
_IN_FLIGHT = 4  # reads, for the floor of both at once
PEERS = ("default", "no-repack", "no-mmap", "accelerate")  # the first three are llama.cpp's
Result = dict[str, Any]


@dataclass(frozen=True)
class Program:
    """The command that starts a worker, and the file or folder that it reads a model from."""

    command: list[str]
    files: Path


class Side:
    """One program in its group: a worker, and its reads since the last answer."""

    def __init__(
        self,
        program: Program,
        limit_bytes: int | None,
        late: bool = False,
        limit_s: float | None = None,
    ) -> None:
        """Start the program with cold files. `limit_s`: see Worker.

        `late`: set the limit after the load. Raises WorkerFailed, NoMemoryGroup, and OSError when
        the loaded program holds more than the limit.
        """
        forget_pages(program.files)
        self.group: MemoryGroup | None = None
        command = program.command
        with ExitStack() as undo:
            if limit_bytes is not None:
                self.group = undo.enter_context(
                    MemoryGroup(physical_bytes() if late else limit_bytes)
                )
                command = self.group.command(command)
            self.worker = undo.enter_context(Worker(command, limit_s))
            if self.group is not None and limit_bytes is not None and late:
                forget_pages(program.files)
                self.group.lower(limit_bytes)
            self._opened = undo.pop_all()
        self.seconds: list[float] = []
        self._disk_bytes = 0

    def prefill(self, ids: list[int]) -> float:
        answer = self.worker.ask("prefill", ids)
        self._disk_bytes = answer["disk_bytes"]
        return float(answer["seconds"])

    def decode(self, ids: list[int]) -> int:
        """Decode the tokens and return the bytes read from disk meanwhile."""
        answer = self.worker.ask("decode", ids)
        self.seconds += answer["seconds"]
        before, self._disk_bytes = self._disk_bytes, answer["disk_bytes"]
        return self._disk_bytes - before

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fate(program: Program, limit_bytes: int, ids: list[int]) -> str:
    """Return why a program fails under the limit; "" when it survives."""
    try:
        with Side(program, limit_bytes) as side:
            side.prefill(ids)
            side.decode(ids[:2])
        return ""
    except WorkerFailed as error:
        return "killed at the limit" if "code -9" in str(error) else str(error)


def race(ours: Side, peer: Side | None, prompt: list[int], text: list[int], every: int) -> Result:
    """Let both sides decode `text`, taking turns every `every` tokens."""
    sides = {"ours": ours} | ({"peer": peer} if peer is not None else {})
    read = dict.fromkeys(sides, 0)
    first = {name: side.prefill(prompt) for name, side in sides.items()}
    for number, start in enumerate(range(0, len(text), every)):
        turn = list(sides.items())
        for name, side in turn[:: -1 if number % 2 else 1]:
            read[name] += side.decode(text[start : start + every])
            took = sum(side.seconds[-every:])
            print(f"{name}: tokens from {start}: {took:.2f} s", file=sys.stderr, flush=True)
    found: Result = {}
    for name, side in sides.items():
        early = side.seconds[:32]
        found[name] = {
            "prefill_seconds": round(first[name], 3),
            "tokens_per_s": round(len(text) / sum(side.seconds), 3),
            "tokens_per_s_first_32": round(len(early) / sum(early), 3),
            "ms_median": round(1e3 * statistics.median(side.seconds), 2),
            "disk_bytes_per_token": read[name] // len(text),
            "peak_bytes": side.group.peak_bytes if side.group else None,
        }
    if peer is not None:
        mine, theirs = found["ours"], found["peer"]
        found["times_as_fast"] = round(mine["tokens_per_s"] / theirs["tokens_per_s"], 2)
        found["times_as_fast_first_32"] = round(
            mine["tokens_per_s_first_32"] / theirs["tokens_per_s_first_32"], 2
        )
        turns = [slice(start, start + every) for start in range(0, len(text), every)]
        ratios = [sum(peer.seconds[turn]) / sum(ours.seconds[turn]) for turn in turns]
        found["turns"] = {"count": len(turns), "least": min(ratios), "most": max(ratios)}
    return found


def speeds_now(threads: int, folder: Path, manifest: Manifest) -> dict[str, float]:
    """Return bytes per second of RAM and of the model's drive, both measured now."""
    return {"ram": read_ceiling(threads), "disk": drive_now(folder, manifest)}


def capped(o: argparse.Namespace, model: RaceModel, share: float) -> Result:
    """Measure one share of experts: which peers survive, and the race against each survivor."""
    manifest, folder = model.ours(o.tag), model.folder(o.tag)
    limit = limit_bytes(manifest, share)
    words = text(o.routing, model.config, o.prompt + o.tokens, o.prompt, o.text)
    prompt, words = words[: o.prompt], words[o.prompt :]
    memory = round(manifest.slots.max_bytes * share) - o.less
    where = [os.fspath(model.settings.home), f"{model.name}:{o.tag}", *_sizes(o)]
    where += ["--memory", str(memory), "--policy", o.policy]
    ours = Program([sys.executable, "-m", "benchmarks.ours", *where], folder)
    found: Result = {"share": share, "limit_bytes": limit, "memory_bytes": memory}
    peers: dict[str, Program | None] = {**_peers(o, model)} or {"alone": None}
    fates = {name: fate(peer, limit, prompt) for name, peer in peers.items() if peer is not None}
    found["fates"], found["races"] = fates, {}
    for name, peer in peers.items():
        late = name == "accelerate" and bool(fates.get(name))  # it loads without the limit
        if fates.get(name) and not late:
            continue
        before = speeds_now(o.threads, folder, manifest)
        with ExitStack() as undo:
            mine = undo.enter_context(Side(ours, limit))
            other = undo.enter_context(Side(peer, limit, late)) if peer is not None else None
            found["races"][name] = race(mine, other, prompt, words, o.slice)
            found["races"][name]["about"] = mine.worker.ask("about")
            if peer is not None:
                found["races"][name]["read_ahead_bytes"] = read_ahead_bytes(peer.files)
        after = speeds_now(o.threads, folder, manifest)
        one, speeds = found["races"][name], {tier: max(before[tier], after[tier]) for tier in after}
        read = {"ram": one["about"]["token_bytes"], "disk": one["ours"]["disk_bytes_per_token"]}
        one["bytes_per_s"] = {tier: round(speed) for tier, speed in speeds.items()}
        one["floor_ms"] = {tier: round(1e3 * read[tier] / speeds[tier], 2) for tier in speeds}
        both = measure_at_once(some_shards(folder, manifest), o.threads, _IN_FLIGHT)
        one["at_once"] = dataclasses.asdict(both)
        one["floor_ms"]["at_once"] = round(1e3 * both.seconds(read["ram"], read["disk"]), 2)
    return found


def _peers(o: argparse.Namespace, model: RaceModel) -> dict[str, Program]:
    """Return the requested settings by name."""
    found = {}
    for name in o.peers:
        if name == "accelerate":
            checkpoint = model.huggingface()
            offload = checkpoint / "offload"
            offload.mkdir(exist_ok=True)
            where = [os.fspath(checkpoint), "--folder", os.fspath(offload), "--setting", "disk"]
            command = [sys.executable, "-m", "benchmarks.peers.accelerate", *where, *_sizes(o)]
            found[name] = Program(command, checkpoint)
        else:
            file = o.gguf or model.peer(GGUF_OF_TAG[o.tag], o.peer_python)
            command = [o.peer_python, "-m", "benchmarks.peers.llama_cpp", os.fspath(file)]
            found[name] = Program([*command, *_sizes(o), "--setting", name], file)
    return found


def _sizes(o: argparse.Namespace) -> list[str]:
    context = max(64, o.prompt + o.tokens)
    return ["--threads", str(o.threads), "--context", str(context)]


def read_ahead_bytes(path: Path) -> int | None:
    """Return the bytes that the kernel reads around a page fault in this file; None if unknown."""
    about = path.stat()
    device = about.st_rdev if path.is_block_device() else about.st_dev
    folder = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for place in (folder, folder.resolve().parent):  # a disk, or the disk of a partition
        with suppress(OSError, ValueError):
            return 1024 * int((place / "queue/read_ahead_kb").read_text())
    return None


def limit_bytes(manifest: Manifest, share: float) -> int:
    """Return the memory that a side may use, in bytes."""
    return round(manifest.dense_bytes + SPARE_BYTES + share * manifest.slots.max_bytes)


def main() -> None:
    o = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that groups are removed
    model = routed(o.cache, named(o.shape, o.layers), shape(o.shape, o.layers), o.routing)
    model.ours(o.tag)
    _peers(o, model)
    if o.make_only:
        return
    try:
        results = [capped(o, model, share) for share in o.shares]
    except NoMemoryGroup as error:
        raise SystemExit(str(error)) from error
    about = {"command": " ".join(sys.argv), "machine": machine(), "shares": results}
    if o.out is not None:
        o.out.write_text(json.dumps(about, indent=1) + "\n")
    print(json.dumps(about, indent=1) if o.json else capped_markdown(about), end="")


def _options() -> argparse.Namespace:
    cache = read_environment({**os.environ}).home / "benchmarks"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, help="fewer than the real shape has")
    parser.add_argument("--routing", default=ROUTINGS[0], choices=ROUTINGS)
    parser.add_argument("--tag", default="q4", choices=list(GGUF_OF_TAG), help="ours")
    parser.add_argument("--shares", type=_shares, default=[0.35, 0.6], help="35,60 %% of experts")
    parser.add_argument("--policy", default="adaptive")
    parser.add_argument("--less", type=int, default=0, help="bytes less for our experts")
    parser.add_argument("--peers", type=_names, default=list(PEERS[:3]), help=",".join(PEERS))
    parser.add_argument("--gguf", type=Path, help="the peer's file, if it has moved")
    parser.add_argument("--prompt", type=int, default=28, help="tokens")
    parser.add_argument("--tokens", type=int, default=64, help="decoded")
    parser.add_argument("--slice", type=int, default=8, help="tokens per turn")
    parser.add_argument("--text", type=int, default=0, help="seed of the text")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peer-python", default=sys.executable, help="has llama_cpp and gguf")
    parser.add_argument("--cache", type=Path, default=cache, help="may be deleted")
    parser.add_argument("--make-only", action="store_true")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name != "none"]
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of none, {', '.join(PEERS)}")
    return names


def _shares(text: str) -> list[float]:
    return [float(part) / 100 for part in text.split(",")]


if __name__ == "__main__":
    main()
