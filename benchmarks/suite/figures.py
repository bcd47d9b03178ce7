"""From the rounds of one program in one scenario to the figures of its row.

The keys of a measured row:

    ttft_ms          until the last conversation has its first token (cold: from the imports on);
                     the median of the rounds; _least, _most
    tpot_ms_median   of all steps, each of which gives every conversation a token; _p95
    tokens_per_s     of all conversations together, first tokens not counted; the median of the
                     rounds; _least, _most. Where fewer than ROUNDS rounds fit, each round's steps
                     are cut into equal parts, which count as rounds
    rounds, parts    the rounds measured, and how many figures the interval is of
    hit_rate         share of expert events that are hits (ours)
    bytes_per_token  read from disk during the steps, by the kernel's count
    peak_bytes       the peak memory of the process
    floor_ms         ours, not on a GPU: the shortest time of a step, the median of the rounds: the
                     bytes that it must read from RAM, or those that it read from disk, ÷ the speeds
                     measured beside this row (in a batch: all KV caches, but only the experts of
                     one conversation)
    over_floor       a step's time ÷ its round's floor; _least, _most
    ram_share        the profile of our steps' time: the bytes from RAM at the speed measured,
    drive_share      waiting for the drive with nothing to compute,
    policy_share     and deciding what to load and evict; the rest is the kernels' distance from
                     that speed, attention, and Python
    forced           true when it was fed the scenario's tokens, false when it chose its own
    others_cores     processors that everything else on the machine used meanwhile, stolen time of
                     a host included; a row with a large value is unreliable
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.peers.table import Peer
from benchmarks.suite.models import SuiteModel
from benchmarks.suite.scenarios import Scenario
from benchmarks.worker import WorkerFailed
from moeinf.runtime.placement.bandwidth import drive_now

OURS = "moeinf"
ROUNDS = 5
Row = dict[str, Any]


@dataclass(frozen=True)
class Round:
    """A measured turn, and the worker's answers to "about" before and after it.

    seconds: all that this round took, a cold start included. started_s: of its process, from the
    imports on. ram_bytes_per_s: measured before and after it, for our floor; else 0.
    """

    before: Row
    taken: Row
    after: Row
    others_cores: float
    seconds: float
    started_s: float
    ram_bytes_per_s: float

    def grown(self, name: str) -> float:
        return float(self.after[name] - self.before[name])

    @property
    def read_bytes(self) -> int:
        """The bytes read from disk, by the steps alone where the worker reports that."""
        begin = self.taken.get("first_disk_bytes", self.before["disk_bytes"])
        return int(self.taken["disk_bytes"] - begin)


def row_of(model: SuiteModel, peer: Peer | None, scenario: Scenario, rounds: list[Round]) -> Row:
    """Return the row of a program's rounds; no peer: ours. Raises WorkerFailed without a step."""
    steps = [step for one in rounds for step in one.taken["steps"]]
    if not steps:
        raise WorkerFailed("no second token in its time")
    parts = [part for one in rounds for part in _parts(one.taken["steps"], len(rounds))]
    rows, last, cold = len(steps) * scenario.batch, rounds[-1], scenario.moment == "cold"
    firsts = [1e3 * (one.taken["first"] + (one.started_s if cold else 0)) for one in rounds]
    speeds = [scenario.batch * len(part) / sum(part) for part in parts]
    found: Row = {
        **_spread("ttft_ms", firsts, 1),
        "tpot_ms_median": round(1e3 * statistics.median(steps), 2),
        "tpot_ms_p95": round(1e3 * sorted(steps)[int(0.95 * (len(steps) - 1))], 2),
        **_spread("tokens_per_s", speeds, 2),
        "rounds": len(rounds),
        "parts": len(parts),
        "steps": len(steps),
        "hit_rate": None,
        "bytes_per_token": round(sum(one.read_bytes for one in rounds) / rows),
        "peak_bytes": max(one.taken["peak_bytes"] for one in rounds),
        "forced": last.taken["forced"],
        "others_cores": round(max(0.0, statistics.fmean(r.others_cores for r in rounds)), 2),
        "bits": None,
        "version": last.after.get("version", "this clone"),
    }
    if last.after.get("elsewhere"):  # a server's memory and disk are not this process's
        found |= {"bytes_per_token": None, "peak_bytes": None, "others_cores": None}
    else:
        found["bits"] = model.bits(peer.weights if peer is not None else None)
    if peer is None:
        events = sum(one.grown("decode_events") for one in rounds)
        hits = sum(one.grown("decode_hits") for one in rounds)
        found["hit_rate"] = round(hits / events, 4) if events else None
        if scenario.gpu is None:
            found |= _floor(model, scenario, [one for one in rounds if one.taken["steps"]])
    return found


def _floor(model: SuiteModel, scenario: Scenario, rounds: list[Round]) -> Row:
    """Return the floor of our steps, and the profile of their time."""
    disk = float("inf")
    if any(one.read_bytes for one in rounds):
        disk = drive_now(model.race.folder(model.tag), model.manifest())
    floors, overs, ram_s = [], [], 0.0
    for one in rounds:
        steps = one.taken["steps"]
        kv = one.after["state_bytes"] * (scenario.batch - 1)  # token_bytes has the first one's
        needed = one.after["token_bytes"] + kv
        ram = needed / one.ram_bytes_per_s
        floors.append(max(ram, one.read_bytes / len(steps) / disk))
        overs += [statistics.median(part) / floors[-1] for part in _parts(steps, len(rounds))]
        ram_s += ram * len(steps)
    took = sum(sum(one.taken["steps"]) for one in rounds)
    return {
        "token_bytes": needed,
        "ram_bytes_per_s": round(statistics.median(one.ram_bytes_per_s for one in rounds)),
        "disk_bytes_per_s": round(disk) if disk < float("inf") else None,
        "floor_ms": round(1e3 * statistics.median(floors), 2),
        **_spread("over_floor", overs, 2),
        "ram_share": round(ram_s / took, 3),
        "drive_share": round(sum(one.grown("decode_stall_seconds") for one in rounds) / took, 3),
        "policy_share": round(sum(one.grown("decode_policy_seconds") for one in rounds) / took, 3),
    }


def _parts(steps: list[float], rounds: int) -> list[list[float]]:
    """Cut a round's steps so that all rounds together give ROUNDS parts, or as many as it has."""
    wanted = max(1, min(len(steps), -(-ROUNDS // rounds)))
    edges = [len(steps) * part // wanted for part in range(wanted + 1)]
    return [steps[a:b] for a, b in pairwise(edges) if a < b]


def _spread(name: str, values: list[float], digits: int) -> Row:
    return {
        name: round(statistics.median(values), digits),
        f"{name}_least": round(min(values), digits),
        f"{name}_most": round(max(values), digits),
    }
