"""One program in one scenario: a process is started, warmed, measured, and described in a row.

Does not know options or reports. The keys of a row that was measured:

    ttft_ms          until the last conversation has its first token (cold: from the imports on)
    tpot_ms_median   of the steps, each of which gives every conversation a token; _p95
    tokens_per_s     of all conversations together, first tokens not counted
    hit_rate         share of expert events that found their expert (ours)
    bytes_per_token  read from disk meanwhile, as the kernel counts it
    peak_bytes       the most memory that the process has held
    floor_ms         the least that a step can take in *our* format: the bytes it must read from
                     RAM, or those that ours read from disk, ÷ the speed measured beside this row
                     (in a batch: all KV caches, but no more experts than one conversation needs)
    forced           whether it was fed the scenario's tokens, or chose its own

A limit is our dense weights + KV cache + 300 MB + the share of our experts; a program whose weights
have more bits gets a limit that is larger by as much.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.calibrated import Calibration, tokens
from benchmarks.capped import SPARE_BYTES, Program, Side
from benchmarks.cgroup import NoMemoryGroup
from benchmarks.peers.table import Peer
from benchmarks.race import Tokens
from benchmarks.suite.models import SuiteModel
from benchmarks.suite.scenarios import SECOND_PROMPT, Scenario
from benchmarks.worker import WorkerFailed
from moeinf.runtime.bench import read_ceiling
from moeinf.runtime.measure import measure

OURS = "moeinf"
Row = dict[str, Any]
_WARM_TOKENS, _WARM_STEPS = 512, 4


@dataclass(frozen=True)
class Here:
    """What there is on this machine. pythons, servers, served: by a peer's module."""

    gpu: bool
    pythons: dict[str, str]
    servers: dict[str, str]
    served: dict[str, str]
    _known: dict[str, str | None] = field(default_factory=dict)

    def python(self, peer: Peer) -> str:
        return self.pythons.get(peer.module, sys.executable)

    def problem(self, peer: Peer | None, scenario: Scenario) -> str | None:
        """Why this row cannot be; None when it can. No peer: ours. Each peer is asked once."""
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
    """What all rows of a suite share."""

    model: SuiteModel
    threads: int
    limit_s: float  # of one row
    here: Here


def run(bench: Bench, peer: Peer | None, scenario: Scenario, token_bytes: int | None) -> Row:
    """Measures a row for which there is no problem. token_bytes: what ours said that a step reads.

    A program that ends, or takes too long, gives a row that says so.
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
        killed = "code -9" in str(error)
        text = "killed at the limit" if killed else (str(error).strip().splitlines() or ["?"])[-1]
        return {"status": text[-160:], "ran": True, "row_s": round(time.monotonic() - begin, 1)}
    if late:
        found["note"] = "limited once loaded"
    needed = found.pop("token_bytes", token_bytes)
    ram = read_ceiling(bench.threads)
    found |= {"token_bytes": needed, "ram_bytes_per_s": round(ram)}
    if needed is not None:
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
    """All memory that a program may use; None: no limit."""
    if scenario.memory is None:
        return None
    manifest, model = bench.model.manifest(), bench.model
    wider = model.bits(peer.weights) / model.bits(None) if peer is not None else 1.0
    weights = manifest.dense_bytes + manifest.slots.max_bytes * scenario.memory / 100
    kv = scenario.batch * manifest.kv_bytes(scenario.context)
    return round(max(1.0, wider) * weights + kv + SPARE_BYTES)


def program(bench: Bench, peer: Peer | None, scenario: Scenario) -> Program:
    """How it is started, and the files that it reads."""
    sizes = ["--threads", str(bench.threads), "--context", str(scenario.context)]
    sizes += ["--batch", str(scenario.batch)]
    if peer is None:
        race, manifest = bench.model.race, bench.model.manifest()
        where = [os.fspath(race.settings.home), bench.model.name, *sizes]
        if scenario.memory is not None:
            share = round(manifest.slots.max_bytes * scenario.memory / 100)
            where += ["--memory", str(share)]
        if scenario.gpu is not None:
            share = round(manifest.slots.max_bytes * scenario.gpu / 100)
            where += ["--device-memory", str(share)]
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
    module = f"benchmarks.peers.{peer.module}"
    return Program([bench.here.python(peer), "-m", module, name, *sizes, *how], file)


def _measured(bench: Bench, peer: Peer | None, scenario: Scenario, late: bool) -> Row:
    limit = limit_bytes(bench, peer, scenario)
    texts = _texts(bench.model.race.config["vocab_size"], scenario)
    prompts = [text[: scenario.prompt] for text in texts]
    answers = [text[scenario.prompt :][: scenario.decode] for text in texts]
    with Side(program(bench, peer, scenario), limit, late, bench.limit_s) as side:
        worker = side.worker

        def turn(asked: list[list[int]], forced: list[list[int]]) -> dict[str, Any]:
            return worker.ask("turn", prompts=asked, answers=forced, limit_s=bench.limit_s / 2)

        if scenario.moment != "cold":
            warm = _warm(bench.model.race.config["vocab_size"], scenario)
            turn(*warm)
            worker.ask("reset")
        if scenario.moment == "second":
            turn(prompts, answers)
            prompts = [text[-SECOND_PROMPT - scenario.decode :][:SECOND_PROMPT] for text in texts]
            answers = [text[-scenario.decode :] for text in texts]
        before = worker.ask("about")
        taken = turn(prompts, answers)
        after = worker.ask("about")
        started = worker.greeting["ready_at"] - worker.greeting["imported_at"]
    return _row(peer, scenario, bench, taken, before, after, started)


def _row(
    peer: Peer | None,
    scenario: Scenario,
    bench: Bench,
    taken: Row,
    before: Row,
    after: Row,
    started_s: float,
) -> Row:
    first, steps = taken["first"], taken["steps"]
    if not steps:
        raise WorkerFailed(f"no second token within {bench.limit_s / 2:.0f} s")
    rows = len(steps) * scenario.batch
    cold = scenario.moment == "cold"
    read_before = taken.get("first_disk_bytes", before["disk_bytes"])
    found: Row = {
        "ttft_ms": round(1e3 * (first + (started_s if cold else 0)), 1),
        "tpot_ms_median": round(1e3 * statistics.median(steps), 2),
        "tpot_ms_p95": round(1e3 * sorted(steps)[int(0.95 * (len(steps) - 1))], 2),
        "tokens_per_s": round(rows / sum(steps), 2),
        "steps": len(steps),
        "hit_rate": None,
        "bytes_per_token": round((taken["disk_bytes"] - read_before) / rows),
        "peak_bytes": taken["peak_bytes"],
        "forced": taken["forced"],
        "bits": None,
        "version": after.get("version", "this clone"),
    }
    if after.get("elsewhere"):  # a server's memory and disk are not this process's
        found |= {"bytes_per_token": None, "peak_bytes": None}
    else:
        found["bits"] = bench.model.bits(peer.weights if peer is not None else None)
    if peer is None:
        events = after["decode_events"] - before["decode_events"]
        hits = after["decode_hits"] - before["decode_hits"]
        found["hit_rate"] = round(hits / events, 4) if events else None
        kv = after["state_bytes"] * (scenario.batch - 1)  # the others' caches; ours is in it
        found["token_bytes"] = after["token_bytes"] + kv
    return found


def _texts(vocab: int, scenario: Scenario) -> list[list[int]]:
    """A calibrated text for every conversation."""
    length = scenario.prompt + 2 * scenario.decode + SECOND_PROMPT
    return [tokens(Calibration(), vocab, length, seed) for seed in range(scenario.batch)]


def _warm(vocab: int, scenario: Scenario) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and answers that touch every expert where all fit, else a little of another text."""
    if scenario.memory is None:
        draw = Tokens(vocab, seed=1)
        count = min(_WARM_TOKENS, scenario.prompt + scenario.decode - _WARM_STEPS)
        texts = [draw.draw(count + _WARM_STEPS) for _ in range(scenario.batch)]
    else:
        count = min(32, scenario.prompt)
        texts = [
            tokens(Calibration(), vocab, count + _WARM_STEPS, 1000 + seed)
            for seed in range(scenario.batch)
        ]
    return [text[:count] for text in texts], [text[count:] for text in texts]
