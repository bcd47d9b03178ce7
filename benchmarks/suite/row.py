"""One program in one scenario: start a process, warm it up, measure it, describe it in a row.

The keys of a measured row:

    ttft_ms          until the last conversation has its first token (cold: from the imports on);
                     the median of its rounds
    tpot_ms_median   of all steps, each of which gives every conversation a token; _p95
    tokens_per_s     of all conversations together, first tokens not counted
    hit_rate         share of expert events that are hits (ours)
    bytes_per_token  read from disk during the steps, by the kernel's count
    peak_bytes       the peak memory of the process
    floor_ms         the shortest time of a step in *our* format: the bytes it must read from
                     RAM, or those that ours read from disk, ÷ the speed measured beside this row
                     (in a batch: all KV caches, but only the experts of one conversation);
                     not on a GPU
    forced           true when it was fed the scenario's tokens, false when it chose its own
    others_cores     processors that everything else on the machine used meanwhile, stolen time of
                     a host included; a row with a large value is unreliable

A limit is our dense weights + KV cache + 300 MB + the share of our experts. A program with more
bits per weight gets a proportionally larger limit for its weights.
"""

from __future__ import annotations

import errno
import os
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.capped import SPARE_BYTES, Program, Side
from benchmarks.cgroup import NoMemoryGroup
from benchmarks.peers.table import Peer
from benchmarks.race import Tokens
from benchmarks.suite.models import SuiteModel
from benchmarks.suite.scenarios import SECOND_PROMPT, Scenario
from benchmarks.worker import WorkerFailed
from moeinf.runtime.jobs.bench import read_ceiling
from moeinf.runtime.placement.bandwidth import measure
from moeinf.runtime.placement.gpu_plan import CONTEXT_BYTES, dense_workspace_bytes

OURS = "moeinf"
Row = dict[str, Any]
_WARM_TOKENS, _WARM_STEPS = 512, 4
_ROUNDS = 3


@dataclass(frozen=True)
class Here:
    """The resources of this machine. pythons, servers, served: by a peer's module."""

    gpu: bool
    pythons: dict[str, str]
    servers: dict[str, str]
    served: dict[str, str]
    _known: dict[str, str | None] = field(default_factory=dict)

    def python(self, peer: Peer) -> str:
        return self.pythons.get(peer.module, sys.executable)

    def problem(self, peer: Peer | None, scenario: Scenario) -> str | None:
        """Return why this row cannot run, or None. No peer: ours. Each peer is checked once."""
        if peer is not None:
            if peer.name not in self._known:
                server, model = self.servers.get(peer.module), self.served.get(peer.module)
                self._known[peer.name] = peer.problem(self.python(peer), server, model, self.gpu)
            if (why := self._known[peer.name]) is not None:
                return why
            if peer.weights == "served" and scenario.moment == "cold":
                return "not run: a server's start is not ours to time"
        return "not run: no GPU" if scenario.place == "gpu" and not self.gpu else None


@dataclass(frozen=True)
class Bench:
    """The values that all rows of a suite share."""

    model: SuiteModel
    threads: int
    limit_s: float  # of one row
    here: Here


def run(bench: Bench, peer: Peer | None, scenario: Scenario, token_bytes: int | None) -> Row:
    """Measure a row without a known problem. token_bytes: the bytes that our step reads.

    When a program exits or takes too long, the row's status is the reason.
    """
    begin = time.monotonic()
    late = False
    try:
        try:
            found = _measured(bench, peer, scenario, late)
        except WorkerFailed as error:
            if peer is None or not (peer.late and "code -9" in str(error)):
                raise
            late = True
            found = _measured(bench, peer, scenario, late)
    except NoMemoryGroup as error:
        return {"status": f"not run: {error}"}
    except (WorkerFailed, OSError) as error:
        text = (str(error).strip().splitlines() or ["?"])[-1]
        if "code -9" in str(error):
            text = "killed at the limit"
        elif isinstance(error, OSError) and error.errno == errno.EBUSY:  # see Side
            text = "holds more than the limit once it has loaded"
        return {"status": text[-160:], "ran": True, "row_s": round(time.monotonic() - begin, 1)}
    if late:
        found["note"] = "limited once loaded"
    needed = found.pop("token_bytes", token_bytes)
    ram = read_ceiling(bench.threads)
    found |= {"token_bytes": needed, "ram_bytes_per_s": round(ram)}
    if needed is not None and scenario.gpu is None:  # a GPU's own memory was not measured
        disk = measure(
            bench.model.race.settings,
            bench.model.race.folder(bench.model.tag),
            bench.model.manifest(),
        ).disk_bytes_per_s
        read = found["bytes_per_token"] * scenario.batch if peer is None else 0
        found["floor_ms"] = round(1e3 * max(needed / ram, read / disk), 2)
    found["row_s"] = round(time.monotonic() - begin, 1)
    return {"status": "ok", "ran": True, **found}


def limit_bytes(bench: Bench, peer: Peer | None, scenario: Scenario) -> int | None:
    """Return the memory that a program may use, in bytes; None: no limit."""
    if scenario.memory is None:
        return None
    manifest, model = bench.model.manifest(), bench.model
    wider = model.bits(peer.weights) / model.bits(None) if peer is not None else 1.0
    weights = manifest.dense_bytes + manifest.slots.max_bytes * scenario.memory / 100
    kv = scenario.batch * manifest.kv_bytes(scenario.context)
    return round(max(1.0, wider) * weights + kv + SPARE_BYTES)


def device_bytes(bench: Bench, peer: Peer, share: int) -> int:
    """Return the bytes of a peer's weights on a GPU: ours there, at the peer's bits per weight."""
    manifest, model = bench.model.manifest(), bench.model
    wider = model.bits(peer.weights) / model.bits(None)
    return round(wider * (manifest.dense_bytes + manifest.slots.max_bytes * share / 100))


def program(bench: Bench, peer: Peer | None, scenario: Scenario) -> Program:
    """Return the command that starts it, and the files that it reads."""
    sizes = ["--threads", str(bench.threads), "--context", str(scenario.context)]
    sizes += ["--batch", str(scenario.batch)]
    if peer is None:
        race, manifest = bench.model.race, bench.model.manifest()
        where = [os.fspath(race.settings.home), bench.model.name, *sizes]
        if scenario.memory is not None:
            share = round(manifest.slots.max_bytes * scenario.memory / 100)
            where += ["--memory", str(share)]
        if scenario.gpu is not None:
            fixed = CONTEXT_BYTES + manifest.dense_bytes + manifest.kv_bytes(scenario.context)
            fixed += dense_workspace_bytes(manifest, scenario.context)
            share = round(manifest.slots.max_bytes * scenario.gpu / 100)
            where += ["--device-memory", str(fixed + share)]
        command = [sys.executable, "-m", "benchmarks.ours", *where]
        return Program(command, race.folder(bench.model.tag))
    how = ["--setting", peer.setting]
    if peer.weights == "served":
        file, name = Path(os.devnull), bench.here.served[peer.module]
        how += ["--server", bench.here.servers[peer.module]]
    else:
        file = bench.model.file(peer.weights)
        name = os.fspath(file)
        folder = bench.model.race.cache / "offload" / peer.module
        folder.mkdir(parents=True, exist_ok=True)
        how += ["--folder", os.fspath(folder)]
    if scenario.gpu is not None:
        how += ["--gpu-share", str(scenario.gpu / 100)]
        how += ["--device-bytes", str(device_bytes(bench, peer, scenario.gpu))]
    module = f"benchmarks.peers.{peer.module}"
    return Program([bench.here.python(peer), "-m", module, name, *sizes, *how], file)


def _measured(bench: Bench, peer: Peer | None, scenario: Scenario, late: bool) -> Row:
    """Measure up to _ROUNDS turns of different texts in empty conversations; cold: one turn."""
    limit = limit_bytes(bench, peer, scenario)
    begin = time.monotonic()
    rounds: list[_Round] = []
    with Side(program(bench, peer, scenario), limit, late, bench.limit_s) as side:
        worker = side.worker
        started_s = worker.greeting["ready_at"] - worker.greeting["imported_at"]

        def turn(asked: list[list[int]], forced: list[list[int]]) -> dict[str, Any]:
            return worker.ask("turn", prompts=asked, answers=forced, limit_s=bench.limit_s / 2)

        if scenario.moment != "cold":
            turn(*_warm(bench.model, scenario))
        most = 1 if scenario.moment == "cold" else _ROUNDS
        # Always run one: a program may have used most of its time to start.
        while not rounds or (len(rounds) < most and time.monotonic() - begin < bench.limit_s / 3):
            worker.ask("reset")
            texts = _texts(bench.model, scenario, len(rounds))
            prompts = [text[: scenario.prompt] for text in texts]
            answers = [text[scenario.prompt :][: scenario.decode] for text in texts]
            if scenario.moment == "second":
                turn(prompts, answers)
                prompts = [t[-SECOND_PROMPT - scenario.decode : -scenario.decode] for t in texts]
                answers = [text[-scenario.decode :] for text in texts]
            before, busy, start = worker.ask("about"), _busy_s(), time.monotonic()
            taken = turn(prompts, answers)
            others = _busy_s() - busy - (taken["cpu_s"] - before["cpu_s"])
            others /= time.monotonic() - start
            rounds.append(_Round(before, taken, worker.ask("about"), others))
    return _row(peer, scenario, bench, rounds, started_s)


@dataclass(frozen=True)
class _Round:
    """A measured turn, and the worker's answers to "about" before and after it."""

    before: Row
    taken: Row
    after: Row
    others_cores: float

    def grown(self, name: str) -> int:
        return int(self.after[name] - self.before[name])

    @property
    def read_bytes(self) -> int:
        """The bytes read from disk, by the steps alone where the worker reports that."""
        begin = self.taken.get("first_disk_bytes", self.before["disk_bytes"])
        return int(self.taken["disk_bytes"] - begin)


def _row(
    peer: Peer | None, scenario: Scenario, bench: Bench, rounds: list[_Round], started_s: float
) -> Row:
    steps = [step for one in rounds for step in one.taken["steps"]]
    if not steps:
        raise WorkerFailed(f"no second token within {bench.limit_s / 2:.0f} s")
    rows, last = len(steps) * scenario.batch, rounds[-1]
    first = statistics.median(one.taken["first"] for one in rounds)
    found: Row = {
        "ttft_ms": round(1e3 * (first + (started_s if scenario.moment == "cold" else 0)), 1),
        "tpot_ms_median": round(1e3 * statistics.median(steps), 2),
        "tpot_ms_p95": round(1e3 * sorted(steps)[int(0.95 * (len(steps) - 1))], 2),
        "tokens_per_s": round(rows / sum(steps), 2),
        "rounds": len(rounds),
        "steps": len(steps),
        "hit_rate": None,
        "bytes_per_token": round(sum(one.read_bytes for one in rounds) / rows),
        "peak_bytes": last.taken["peak_bytes"],
        "forced": last.taken["forced"],
        "others_cores": round(max(0.0, statistics.fmean(r.others_cores for r in rounds)), 2),
        "bits": None,
        "version": last.after.get("version", "this clone"),
    }
    if last.after.get("elsewhere"):  # a server's memory and disk are not this process's
        found |= {"bytes_per_token": None, "peak_bytes": None, "others_cores": None}
    else:
        found["bits"] = bench.model.bits(peer.weights if peer is not None else None)
    if peer is None:
        events = sum(one.grown("decode_events") for one in rounds)
        hits = sum(one.grown("decode_hits") for one in rounds)
        found["hit_rate"] = round(hits / events, 4) if events else None
        kv = last.after["state_bytes"] * (scenario.batch - 1)  # token_bytes has the first one's
        found["token_bytes"] = last.after["token_bytes"] + kv
    return found


def _busy_s() -> float:
    """Return the processor seconds that the machine has used so far, stolen included; or 0."""
    with suppress(OSError):
        user, nice, system, _, _, *rest = Path("/proc/stat").read_text().split(None, 9)[1:9]
        ticks = sum(map(int, (user, nice, system, *rest)))
        return ticks / os.sysconf("SC_CLK_TCK")
    return 0.0


def _texts(model: SuiteModel, scenario: Scenario, number: int) -> list[list[int]]:
    """Return a text for every conversation of a round."""
    length = scenario.prompt + 2 * scenario.decode + SECOND_PROMPT
    seeds = range(number * scenario.batch, (number + 1) * scenario.batch)
    return [model.text(length, scenario.prompt, seed) for seed in seeds]


def _warm(model: SuiteModel, scenario: Scenario) -> tuple[list[list[int]], list[list[int]]]:
    """Return warm-up prompts and answers: they touch every expert if all fit, else a few."""
    if scenario.memory is None:
        draw = Tokens(model.race.config["vocab_size"], seed=1)
        count = min(_WARM_TOKENS, scenario.prompt + scenario.decode - _WARM_STEPS)
        texts = [draw.draw(count + _WARM_STEPS) for _ in range(scenario.batch)]
    else:
        count = min(32, scenario.prompt)
        texts = [
            model.text(count + _WARM_STEPS, count, 1000 + seed) for seed in range(scenario.batch)
        ]
    return [text[:count] for text in texts], [text[count:] for text in texts]
