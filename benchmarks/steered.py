"""python -m benchmarks.steered: race policies on a real trace and disk, against the simulator.

The model has random weights; a recording sets the experts of each layer
(runtime/jobs/forced_routing.py). There are several engines with the same memory, one per *way*.
They take turns every few tokens. So all have the same disk and the same load from other processes:

    lru               the baseline
    adaptive          without hints
    adaptive R        hints of a modelled gate of recall and precision R; 1 is the oracle

All reads are O_DIRECT. Each way is then simulated with the bandwidths of the same run:

    RAM     the bytes a token reads ÷ (its time - its stalls): the real time of computing
    link    expert-sized O_DIRECT reads of the model's own shards, between the turns: `stream` keeps
            several in flight all the time, `burst` starts two at a time on an idle disk, like the
            misses of a layer

It is also simulated with the read loops' RAM ceiling, which no engine reaches. The simulator
spreads dense weights evenly over the layers. The head comes after them, so its time is added to
every token.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.models import RaceModel
from benchmarks.shapes import SHAPES, shape
from moeinf.native import SlotPool
from moeinf.offload.policy.table import POLICIES
from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.routing.hint_model import HintSource, ModelledHints
from moeinf.offload.routing.route_csv import read_route_csv
from moeinf.offload.routing.trace import Recording
from moeinf.offload.simulator.clock import TimeModel
from moeinf.offload.simulator.replay import Conditions, Replay
from moeinf.runtime.checkpoints.checkpoint import read_header
from moeinf.runtime.config import EngineConfig, read_environment
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.jobs.bench import machine, prefill, prompt_of, read_ceiling
from moeinf.runtime.jobs.forced_routing import ForcedRouting, Request, fitted, requests
from moeinf.runtime.library.manifest import DENSE, Manifest
from moeinf.runtime.machine.disk_bench import WHOLE_BLOCKS, FileRange, read_once
from moeinf.runtime.sizes import parse_memory

_BURST = 2  # about the misses of a layer at LRU's hit rate
Result = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """A policy, and the recall of its hints; None: without hints."""

    policy: str
    recall: float | None = None

    @property
    def name(self) -> str:
        return self.policy if self.recall is None else f"{self.policy} {self.recall:g}"

    def hints(self, experts: int) -> HintSource | None:
        """Return a new source for a replay; the same seed gives the same hints."""
        return None if self.recall is None else ModelledHints(self.recall, self.recall, experts)


@dataclass
class Side:
    """One engine that replays a request, and the seconds of its decode passes."""

    way: Way
    engine: Engine
    forced: ForcedRouting  # the engine's passes run through it
    request: Request
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        engine = self.engine
        self._state, self._passes = engine.new_state(), iter(self.request.passes)
        self._ids = iter(prompt_of(engine, self.request.tokens))
        engine.begin_request(self._state)

    def run(self, passes: int) -> float:
        """Run the next `passes` passes and return the seconds of decoding."""
        taken = 0.0
        for done in islice(self._passes, passes):
            self.forced.play(done)
            ids = list(islice(self._ids, len(done.rows)))
            _, seconds = prefill(self.engine, self._state, ids)
            if done.phase == "decode":
                self.seconds.append(seconds)
                taken += seconds
        return taken


class Disk:
    """The link: random O_DIRECT reads of a model's shards, with a given number in flight."""

    def __init__(self, folder: Path, manifest: Manifest, pieces: int) -> None:
        shards = random.Random(0).sample(list(manifest.shards()), pieces)
        size = manifest.slots.slot_bytes
        self._pieces = [FileRange(folder / shard.path, 0, size) for shard in shards]
        self._arena = SlotPool(32, size)
        memoryview(self._arena).cast("B")[::4096] = bytes(self._arena.bytes // 4096)

    def stream(self, in_flight: int) -> float:
        """Return bytes per second with `in_flight` reads in flight, first piece to last."""
        return self._read(self._pieces, in_flight)

    def burst(self, size: int) -> float:
        """Return bytes per second of reading `size` pieces together, each time on an idle disk."""
        seconds = 0.0
        for start in range(0, len(self._pieces), size):
            pieces = self._pieces[start : start + size]
            seconds += sum(piece.size_bytes for piece in pieces) / self._read(pieces, size)
        return sum(piece.size_bytes for piece in self._pieces) / seconds

    def _read(self, pieces: list[FileRange], in_flight: int) -> float:
        found = read_once(pieces, self._arena, in_flight, True, WHOLE_BLOCKS)
        if found is None:
            raise OSError("the file system refuses O_DIRECT")
        return found


def dense_and_head(folder: Path) -> tuple[int, int]:
    """Return the bytes of the layers' dense weights, and of the dense weights after them.

    The embedding counts in neither: a token reads one row of it.
    """
    sizes = {name: tensor.size_bytes for name, tensor in read_header(folder / DENSE).items()}
    layers = sum(size for name, size in sizes.items() if ".layers." in name)
    embedding = sum(size for name, size in sizes.items() if ".embed_tokens." in name)
    return layers, sum(sizes.values()) - layers - embedding


def simulated(
    recording: Recording, way: Way, slots: int, ram: float, link: float
) -> tuple[float, float, float]:
    """Return the seconds and stall per token, and the hit rate, of a replay."""
    eamc = Eamc.automatic(recording.shape.layers, recording.shape.experts)
    conditions = Conditions(slots, TimeModel(ram / link, ram), way.hints(recording.shape.experts))
    outcome = Replay(recording, POLICIES[way.policy], conditions, eamc).run()
    return (
        outcome.seconds / outcome.rows,
        outcome.stall_ms_per_token / 1e3,
        outcome.hit_rate,
    )


def race(sides: list[Side], every: int, disk: Disk, depth: int) -> tuple[Result, Result]:
    """Let all sides decode in turns; return the measurements of the sides and of the machine."""
    for side in sides:
        side.run(1)  # the prompt
    before = [side.engine.store.stats.copy() for side in sides]
    found: dict[str, list[float]] = {"ram": [], "stream": [], "burst": []}
    left = sum(done.phase == "decode" for done in sides[0].request.passes)
    turn = 0
    while left > 0:
        found["ram"].append(read_ceiling(sides[0].engine.info.threads))
        found["stream"].append(disk.stream(depth))
        found["burst"].append(disk.burst(_BURST))
        for place in range(len(sides)):
            side = sides[(place + turn) % len(sides)]
            took = side.run(min(every, left))
            print(f"{side.way.name}: {took:.2f} s", file=sys.stderr, flush=True)
        left, turn = left - every, turn + 1
    measured: Result = {}
    for side, earlier in zip(sides, before, strict=True):
        stats, tokens = side.engine.store.stats.since(earlier), len(side.seconds)
        measured[side.way.name] = {
            "tokens": tokens,
            "ms_per_token": round(1e3 * sum(side.seconds) / tokens, 3),
            "tokens_per_s": round(tokens / sum(side.seconds), 3),
            "stall_ms_per_token": round(1e3 * stats.decode_stall_seconds / tokens, 3),
            "hit_rate": round(stats.hit_rate or 0.0, 4),
            "hits_hinted": stats.decode_hits_hinted,
            "hits_predicted": stats.decode_hits_predicted,
            "reads_per_token": round(stats.decode_loads / tokens, 2),
            "ahead_accuracy": stats.ahead_accuracy,
            "policy_us_per_token": round(1e6 * stats.decode_policy_seconds / tokens, 1),
            "direct_io": side.engine.store.direct_io,
        }
    speeds = {name: round(statistics.median(values)) for name, values in found.items()}
    speeds |= {f"{name}_all": [round(v / 1e9, 2) for v in values] for name, values in found.items()}
    return measured, speeds


def compare(measured: Result, recording: Recording, ways: list[Way], slots: int,
            speeds: Result, head_bytes: int) -> Result:  # fmt: skip
    """Return, for each pair of bandwidths, the simulated values of each way beside the measured.

    The first way is the baseline. head_bytes: read after the last layer.
    """
    yardstick = ways[0].name
    shape = recording.shape
    active = shape.dense_bytes + shape.layers * shape.top_k * shape.expert_bytes + head_bytes
    own = measured[yardstick]
    computing = (own["ms_per_token"] - own["stall_ms_per_token"]) / 1e3
    clocks = {
        "computing, stream": (active / computing, float(speeds["stream"])),
        "computing, burst": (active / computing, float(speeds["burst"])),
        "ceiling, stream": (float(speeds["ram"]), float(speeds["stream"])),
    }
    result: Result = {}
    for clock, (ram, link) in clocks.items():
        told = {}
        for way in ways:
            seconds, stall, hits = simulated(recording, way, slots, ram, link)
            told[way.name] = seconds + head_bytes / ram, stall, hits
        lru = told[yardstick][0]
        result[clock] = {
            "ram_gb_per_s": round(ram / 1e9, 2),
            "link_gb_per_s": round(link / 1e9, 2),
            "ways": {
                name: {
                    "ms_per_token": round(1e3 * seconds, 3),
                    "stall_ms_per_token": round(1e3 * stall, 3),
                    "hit_rate": round(hits, 4),
                    "ratio_simulated": round(lru / seconds, 4),
                    "ratio_measured": round(
                        own["ms_per_token"] / measured[name]["ms_per_token"], 4
                    ),
                    "stall_measured_over_simulated": round(
                        measured[name]["stall_ms_per_token"] / 1e3 / stall, 3
                    ),
                }
                for name, (seconds, stall, hits) in told.items()
            },
        }
    return result


def main() -> None:
    o = _options()
    sizes = shape(o.shape, o.layers) | {"num_experts_per_tok": o.top_k}
    name = "-".join(str(part) for part in (o.shape, o.layers, f"k{o.top_k}") if part is not None)
    model = RaceModel(o.cache, name, sizes)
    manifest = model.ours(o.tag)
    recording = fitted(read_route_csv(o.trace), manifest)
    dense, head_bytes = dense_and_head(model.folder(o.tag))
    recording.shape = replace(recording.shape, dense_bytes=dense)
    request = requests(recording)[0]
    ways = [Way("lru"), Way("adaptive"), *(Way("adaptive", recall) for recall in o.hints)]
    disk = Disk(model.folder(o.tag), manifest, 48)
    with ExitStack() as opened:
        sides = []
        for way in ways:
            config = EngineConfig(
                memory=parse_memory(o.memory), context=request.tokens, policy=way.policy,
                threads=o.threads, direct_io=True, readers=o.readers, trace=False,
            )  # fmt: skip
            folder, hints = model.folder(o.tag), way.hints(manifest.experts)
            engine = opened.enter_context(Engine.open(manifest, folder, config, model.settings))
            forcing = engine.routed_through(partial(ForcedRouting, hints=hints))
            sides.append(Side(way, engine, opened.enter_context(forcing), request))
        slots = sides[0].engine.info.slots
        measured, speeds = race(sides, o.every, disk, o.depth)
    found = {"measured": measured, "speeds": speeds, "slots": slots}
    found["simulated"] = compare(measured, recording, ways, slots, speeds, head_bytes)
    found |= {"command": " ".join(sys.argv), "machine": machine(), "layers": manifest.layers}
    print(json.dumps(found, indent=1))


def _options() -> argparse.Namespace:
    cache = read_environment({**os.environ}).home / "benchmarks"
    trace = Path(__file__).parents[1] / "tests/data/traces/qwen3-30b-a3b.route.csv.gz"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shape", choices=list(SHAPES), nargs="?", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, help="fewer than the real shape has")
    parser.add_argument("--top-k", type=int, default=6, help="as the trace was recorded")
    parser.add_argument("--trace", type=Path, default=trace)
    parser.add_argument("--tag", default="q4")
    parser.add_argument("--memory", default="18%")
    parser.add_argument("--hints", type=float, nargs="*", default=[1.0], help="recalls")
    parser.add_argument("--every", type=int, default=8, help="tokens per turn")
    parser.add_argument("--depth", type=int, default=4, help="reads in flight of the link's clock")
    parser.add_argument("--readers", type=int)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache", type=Path, default=cache, help="may be deleted")
    return parser.parse_args()


if __name__ == "__main__":
    main()
