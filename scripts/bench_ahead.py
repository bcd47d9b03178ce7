"""Measure if reads ahead cost tokens/s on a busy drive: the store with and without, by policy.

Run: python scripts/bench_ahead.py [--folder .] [--policies adaptive,eamc] [--busy 4] [--tokens 48]

Routing and hints: the first layers of a recording, hints of a modelled gate. Reads are real, past
the page cache where the drive allows it; computing is a wait. Another process reads the same files
all the time with --busy reads in flight; 0: the drive is idle. Three stores of a policy take turns
of 4 tokens, the first two without reads ahead. Prints tokens/s without, with, their ratio, and the
noise: the ratio of the first two, which are alike.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from dataclasses import replace
from functools import cache
from itertools import cycle, permutations
from pathlib import Path

import torch

from moeinf.native import SlotPool, crc32c
from moeinf.offload.format.layout import ExpertLayout
from moeinf.offload.format.shards import FileRecord
from moeinf.offload.policy.base import Setup
from moeinf.offload.policy.table import POLICIES, PREFETCH, USE_HINTS
from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.routing.hint_model import ModelledHints
from moeinf.offload.routing.route_csv import read_route_csv
from moeinf.offload.routing.trace import Recording
from moeinf.offload.store.expert_store import ExpertStore
from moeinf.offload.store.host_tier import HostTier
from moeinf.offload.store.transfer import Transfer
from moeinf.runtime.machine.disk_bench import WHOLE_BLOCKS, FileRange, read_once, written_files

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.fakes import NoMath

TRACE = Path(__file__).parents[1] / "tests/data/traces/qwen3-30b-a3b.route.csv.gz"
LAYERS, FILES, EXPERT_BYTES = 12, 64, 2 << 20
SHARE, QUALITY, READERS, IN_FLIGHT = 0.15, 0.75, 4, 2
TURN, WORTH_SHARE = 4, 0.05


@cache
def recording() -> Recording:
    """Return the decode passes of the first layers."""
    whole = read_route_csv(TRACE)
    passes = [
        replace(done, ids=done.ids[:LAYERS], hints=None)
        for done in whole.passes
        if done.phase == "decode"
    ]
    return Recording("first layers", replace(whole.shape, layers=LAYERS), passes)


class Side:
    """One store, and the seconds of its tokens."""

    def __init__(self, name: str, ahead: bool, pieces: list[FileRange], layer_ms: float) -> None:
        shape, self._layer_s = recording().shape, layer_ms / 1e3
        cells = shape.layers * shape.experts
        records = [
            FileRecord(p.path.name, p.size_bytes, "", crc32c(p.path.read_bytes())) for p in pieces
        ]
        slots = round(SHARE * cells)
        pool = SlotPool(slots, EXPERT_BYTES)
        memoryview(pool).cast("B")[::4096] = bytes(pool.bytes // 4096)
        transfer = Transfer(
            pieces[0].path.parent,
            [records[cell % FILES] for cell in range(cells)],
            pool,
            readers=READERS,
            direct_io=True,
            busy=IN_FLIGHT,
        )
        policy = POLICIES[name](Setup(shape, slots, Eamc(64, shape.layers, shape.experts)))
        layouts = [ExpertLayout(1, 1, "F32")] * cells
        host = HostTier(layouts, shape.experts, pool, transfer, policy, NoMath())  # type: ignore[arg-type]
        host._pieces = EXPERT_BYTES / (512 << 10)
        hints = ahead and name in USE_HINTS
        self._hints = ModelledHints(QUALITY, QUALITY, shape.experts) if hints else None
        self.store = ExpertStore(
            (host,), most_prefetches=2 * shape.top_k * ahead, hints=hints, worth_share=WORTH_SHARE
        )
        self.seconds: list[float] = []

    def run(self, first: int, count: int) -> None:
        """Decode `count` tokens of the recording."""
        x, weights = torch.zeros(1, 1), torch.ones(1, recording().shape.top_k)
        for done in recording().passes[first : first + count]:
            hinted = None if self._hints is None else self._hints.of_pass(done)
            begin = time.perf_counter()
            self.store.begin_pass(torch.from_numpy(done.rows), "decode")
            for layer, ids in enumerate(done.ids):
                if hinted is not None and layer + 1 < LAYERS and self.store.wants_hints:
                    self.store.hint(layer + 1, torch.from_numpy(hinted[layer + 1]), weights)
                pending = self.store.submit(layer, x, torch.from_numpy(ids), weights)
                time.sleep(self._layer_s)
                pending.result()
            self.store.end_pass()
            self.seconds.append(time.perf_counter() - begin)


def load(pieces: list[FileRange], in_flight: int) -> None:
    """Read the files all the time."""
    arena = SlotPool(in_flight, EXPERT_BYTES)
    while True:
        read_once(pieces, arena, in_flight, True, WHOLE_BLOCKS)


def compare(name: str, pieces: list[FileRange], tokens: int, layer_ms: float) -> None:
    sides = [Side(name, ahead, pieces, layer_ms) for ahead in (False, False, True)]
    for first, order in zip(range(0, tokens, TURN), cycle(permutations(sides)), strict=False):
        for side in order:
            side.run(first, TURN)
    *alike, ahead = (tokens / sum(side.seconds) for side in sides)
    without, stats = sum(alike) / len(alike), sides[-1].store.stats
    print(
        f"{name}: {without:.2f} without, {ahead:.2f} with, ratio {ahead / without:.3f}, "
        f"noise {alike[1] / alike[0]:.3f}, "
        f"{stats.ahead_bytes_read / 2**20 / tokens:.1f} MiB a token ahead, "
        f"{sides[-1].store.host._transfer._queue.counters().yields} yields",
        flush=True,
    )
    for side in sides:
        side.store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--policies", default=",".join(sorted(PREFETCH)))
    parser.add_argument("--busy", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--layer-ms", type=float, default=1.5)
    o = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=o.folder) as place,
        written_files(Path(place), EXPERT_BYTES, FILES, lambda *_: None) as pieces,
    ):
        other = multiprocessing.Process(target=load, args=(pieces, max(1, o.busy)), daemon=True)
        if o.busy:
            other.start()
        for name in o.policies.split(","):
            compare(name, pieces, o.tokens, o.layer_ms)
        if o.busy:
            other.terminate()
            other.join()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
