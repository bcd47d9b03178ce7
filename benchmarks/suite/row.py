"""One program in one scenario: start a process, warm it up, measure it, describe it in a row.

A row is measured in rounds of different texts, ROUNDS of them or as many as its time allows. A cold
start begins a new process for each. figures.py has the keys of a row.

A limit is our dense weights + KV cache + 300 MB + the share of our experts. A program with more
bits per weight gets a proportionally larger limit for its weights.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.capped import SPARE_BYTES, Program, Side
from benchmarks.cgroup import NoMemoryGroup
from benchmarks.peers.table import Peer
from benchmarks.race import Tokens
from benchmarks.suite.figures import ROUNDS, Round, Row, row_of
from benchmarks.suite.models import SuiteModel
from benchmarks.suite.scenarios import SECOND_PROMPT, Scenario
from benchmarks.worker import WorkerFailed, WorkerLate
from moeinf.runtime.jobs.bench import read_ceiling
from moeinf.runtime.placement.gpu_plan import CONTEXT_BYTES, dense_workspace_bytes

_WARM_TOKENS, _WARM_STEPS = 512, 4
_MARGIN = 1.5  # times the longest round so far must be left for another one
_DECODING = 0.6  # of the time left, the most that one turn decodes


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


def run(bench: Bench, peer: Peer | None, scenario: Scenario) -> Row:
    """Measure a row without a known problem.

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
            late, left = True, bench.limit_s - (time.monotonic() - begin)
            found = _measured(replace(bench, limit_s=max(1.0, left)), peer, scenario, late)
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
    """Measure up to ROUNDS rounds within bench.limit_s; the first one always runs."""
    end = time.monotonic() + bench.limit_s
    rounds: list[Round] = []
    with closing(_rounds(bench, peer, scenario, late, end)) as measured:
        try:
            for one in measured:
                rounds.append(one)
                longest = max(one.seconds for one in rounds)
                if len(rounds) == ROUNDS or time.monotonic() + _MARGIN * longest > end:
                    break
        except WorkerLate:
            if not rounds:
                raise
    return row_of(bench.model, peer, scenario, rounds)


def _rounds(
    bench: Bench, peer: Peer | None, scenario: Scenario, late: bool, end: float
) -> Iterator[Round]:
    """Measure rounds without end, each of a different text in an empty conversation.

    A cold round is the first one of its process.
    """
    limit, started = limit_bytes(bench, peer, scenario), program(bench, peer, scenario)
    cold = scenario.moment == "cold"
    for first in count():
        begin = time.monotonic()
        with Side(started, limit, late, end - begin) as side:
            if not cold:
                side.worker.ask("turn", **_warm(bench.model, scenario), limit_s=_left(end) / 4)
                begin = time.monotonic()
            for number in count(first):
                one = _round(bench, scenario, side, number, end, peer is None)
                yield replace(one, seconds=time.monotonic() - begin)
                begin = time.monotonic()
                if cold:
                    break


def _round(
    bench: Bench, scenario: Scenario, side: Side, number: int, end: float, ours: bool
) -> Round:
    worker = side.worker

    def turn(asked: list[list[int]], forced: list[list[int]], share: float) -> dict[str, Any]:
        return worker.ask("turn", prompts=asked, answers=forced, limit_s=share * _left(end))

    worker.ask("reset")
    texts = _texts(bench.model, scenario, number)
    prompts = [text[: scenario.prompt] for text in texts]
    answers = [text[scenario.prompt :][: scenario.decode] for text in texts]
    if scenario.moment == "second":
        turn(prompts, answers, _DECODING / 2)
        prompts = [t[-SECOND_PROMPT - scenario.decode : -scenario.decode] for t in texts]
        answers = [text[-scenario.decode :] for text in texts]
    on_cpu = ours and scenario.gpu is None  # a GPU's own memory is not measured
    # After a cold start every moment counts: experts are being read.
    ram = read_ceiling(bench.threads) if on_cpu and scenario.moment != "cold" else 0.0
    before, busy, start = worker.ask("about"), _busy_s(), time.monotonic()
    taken = turn(prompts, answers, _DECODING)
    others = _busy_s() - busy - (taken["cpu_s"] - before["cpu_s"])
    others /= time.monotonic() - start
    after = worker.ask("about")
    if on_cpu:
        ram = max(ram, read_ceiling(bench.threads))
    started_s = worker.greeting["ready_at"] - worker.greeting["imported_at"]
    return Round(before, taken, after, others, 0.0, started_s, ram)


def _left(end: float) -> float:
    return max(0.0, end - time.monotonic())


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


def _warm(model: SuiteModel, scenario: Scenario) -> dict[str, list[list[int]]]:
    """Return warm-up prompts and answers: they touch every expert if all fit, else a few."""
    if scenario.memory is None:
        draw = Tokens(model.race.config["vocab_size"], seed=1)
        length = min(_WARM_TOKENS, scenario.prompt + scenario.decode - _WARM_STEPS)
        texts = [draw.draw(length + _WARM_STEPS) for _ in range(scenario.batch)]
    else:
        length = min(32, scenario.prompt)
        texts = [
            model.text(length + _WARM_STEPS, length, 1000 + seed) for seed in range(scenario.batch)
        ]
    prompts, answers = [text[:length] for text in texts], [text[length:] for text in texts]
    return {"prompts": prompts, "answers": answers}
