"""python -m benchmarks.replicas: routers of a real cluster against their simulation.

A model's routing is recorded first, with every expert in memory. Then each router has the same
requests twice: in the simulator (`moeinf simulate --replicas` replays with the same code; its times
are measured on this machine), and in `moeinf serve --cluster local` with as many replicas, whose
memory is capped. Twice as many clients as replicas send one request after the other, each in an
order of its own.

The model is random, and its embeddings have 8 topics (calibrated.py). A request stays in one topic,
so that a topic has experts of its own. (The demo's kinds of exercises share theirs.)

A hit is an expert that a layer asks for in a pass, and that needs no read: hit rate = 1 - reads ÷
experts asked for. The recording tells what is asked for. So reading ahead changes no hit rate, on
either side. (The engine reads a prompt's experts ahead, and finds nearly all in memory; the
simulator does not.) The first quarter of the requests warms up, and does not count. Hit rates do
not depend on a quiet machine, tokens per second do. With requests of one kind only (`--kinds 1`) a
router has nothing to gain, and must not lose tokens per second. Needs pip install
'moeinf[cluster]'.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shutil
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np

from benchmarks.calibrated import Calibration, bfloat16, calibrated, embeddings
from benchmarks.server import Result
from benchmarks.shapes import shape
from moeinf.cli.commands.models.pull import ensure
from moeinf.cli.output import Output
from moeinf.offload.policy.names import DEFAULT_POLICY
from moeinf.offload.replicas.router import Router
from moeinf.offload.routing.requests_file import RecordedRequest, RecordedRequests
from moeinf.offload.simulator.clock import TimeModel
from moeinf.offload.simulator.cluster import Machine, Sums, run_cluster, service_seconds
from moeinf.offload.simulator.workload import Conversation, Turn
from moeinf.runtime.config import EngineConfig, Settings, read_environment
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.chat import Conversation as Chat
from moeinf.runtime.jobs.bench import machine
from moeinf.runtime.requests import Limits, SamplingOptions
from moeinf.runtime.sizes import parse_memory
from moeinf.server.cluster.request_keys import keys_of
from scripts.make_checkpoint import byte_tokenizer

_TOPICS, _WORDS, _PROMPT = 8, 40, 2  # kinds, words of a kind, words of a prompt
_LOGITS = 0.012  # by which the topics' embedding becomes the matrix of logits
_COMMAND = [sys.executable, "-c", "from moeinf.cli.entry import main; main()", "serve"]
_PUBLISH_S = 2.0  # between publications of a real replica
_TIMED = 40  # requests by which the machine is timed
_WARM = 4  # one part of so many warms up
_SEEDS = 16  # of the simulated routers
_JITTER = 0.75, 1.25  # of the interval between publications: hit rates depend on its phase


@dataclass(frozen=True)
class Item:
    """A request: its model, its kind, its prompt, which is continued, and the most tokens."""

    model: str
    kind: str
    prompt: str
    length: int

    @property
    def options(self) -> Result:
        return {"temperature": 1, "seed": 1, "top_k": 0, "top_p": 1, "num_predict": self.length}

    def body(self) -> Result:
        about = {"model": self.model, "prompt": self.prompt, "raw": True, "stream": False}
        return about | {"options": self.options}


def topics(home: Path, cache: Path, length: int) -> list[Item]:
    """Make the model with topics; return prompts whose letters are of one topic each."""
    tokenizer, hidden = byte_tokenizer(), 256
    config = shape("olmoe", 8) | {
        "hidden_size": hidden, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": 512,
    }  # fmt: skip
    calibration = Calibration(topics=_TOPICS, shared=0.9)
    made = calibrated(cache, "topics", config, calibration)
    logits = cache / "given/topics-logits.bin"
    rows = embeddings(calibration, 0, config["vocab_size"], hidden) * np.float32(_LOGITS)
    bfloat16(rows).tofile(logits)
    made = replace(made, given={**made.given, "lm_head.weight": logits})
    made.ours("q4")
    shutil.copytree(made.settings.models / made.name, Settings(home).models / made.name)
    letters: dict[int, list[str]] = {}
    for letter in string.ascii_letters + string.digits:
        letters.setdefault(tokenizer.encode(letter).ids[-1] % _TOPICS, []).append(letter)
    found, draw = [], random.Random(0)
    for kind, mine in sorted(letters.items()):
        words = ["".join(draw.choices(mine, k=4)) for _ in range(_WORDS)]
        for _ in range(100):
            prompt = " ".join(draw.choices(words, k=_PROMPT))
            found.append(Item(f"{made.name}:q4", str(kind), prompt, length))
    return found


def recorded(home: Path, items: Sequence[Item]) -> RecordedRequests:
    """Answer every request with all experts in memory; return the routing of each."""
    settings, found = Settings(home), []
    manifest, folder = ensure(items[0].model, settings, Output(quiet=True))
    config = EngineConfig(memory=parse_memory("100%"), threads=1, speculation=False)
    with Engine.open(manifest, folder, config, settings) as engine:
        for item in items:
            recording = engine.record(item.kind, details=False)
            answer(engine, item)
            passes = recording.passes
            ids = np.concatenate([one.ids.transpose(1, 0, 2) for one in passes])
            prompt = sum(len(one.rows) for one in passes if one.phase == "prefill")
            found.append(RecordedRequest(item.kind, prompt, ids.astype(np.uint16), None))
        return RecordedRequests(items[0].model, recording.shape, found)


def answer(engine: Engine, item: Item) -> None:
    chat = Chat(engine)
    options = SamplingOptions(temperature=1, seed=1, top_k=0, top_p=1)
    for _ in chat.complete(item.prompt, options, Limits(max_tokens=item.length)):
        pass


def times(home: Path, items: Sequence[Item], o: argparse.Namespace) -> TimeModel:
    """Return the model of time of this machine: how long a layer and a missed expert take."""
    settings = Settings(home)
    manifest, folder = ensure(items[0].model, settings, Output(quiet=True))
    found = []
    for share in ("100%", o.share):
        config = EngineConfig(
            memory=parse_memory(share), policy=o.policy, threads=1, speculation=False, trace=False
        )
        with Engine.open(manifest, folder, config, settings) as engine:
            answer(engine, items[0])
            before, begin = engine.store.stats.copy(), time.perf_counter()
            for item in items[1:_TIMED]:
                answer(engine, item)
            found.append((time.perf_counter() - begin, engine.store.stats.since(before)))
    (seconds, full), (_, capped) = found
    uses = manifest.top_k * manifest.layers
    layer_s = seconds * uses / full.decode_events / manifest.layers  # prompts are short
    per_layer = manifest.top_k * manifest.expert_bytes + manifest.dense_bytes / manifest.layers
    ram = per_layer / layer_s
    miss_s = capped.decode_stall_seconds / max(1, capped.decode_events - capped.decode_hits)
    return TimeModel(ram_over_link=miss_s * ram / manifest.expert_bytes, ram_bytes_per_s=ram)


def orders(count: int, clients: int, rounds: int) -> list[list[int]]:
    """Return for each client the exercises that it sends."""
    found = []
    for client in range(clients):
        draw, mine = random.Random(client), list[int]()
        for _ in range(rounds):
            places = list(range(client, count, clients))
            draw.shuffle(places)
            mine += places
        found.append(mine)
    return found


def parts(sent: Sequence[Sequence[int]]) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
    """Divide each client's requests: those that warm up, and those that count."""
    firsts = [len(mine) // _WARM for mine in sent]
    both = list(zip(sent, firsts, strict=True))
    return [mine[:first] for mine, first in both], [mine[first:] for mine, first in both]


def asked_for(requests: RecordedRequests, places: Iterable[int]) -> int:
    """Return how many experts the layers ask for, over the passes of these requests."""
    each = [_distinct(one.prompt_ids) + one.decode_ids.size for one in requests.requests]
    return sum(each[place] for place in places)


def _distinct(ids: np.ndarray) -> int:
    """Return the sum over layers of the different experts in ids [T, L, K]."""
    return sum(len(np.unique(layer)) for layer in ids.swapaxes(0, 1))


def simulated(
    requests: RecordedRequests,
    items: Sequence[Item],
    sent: Sequence[Sequence[int]],
    router: str,
    o: argparse.Namespace,
    model: TimeModel,
    real_s: float,
    seed: int,
) -> float:
    """Return the hit rate of the simulator. real_s: the time of a request of a real replica."""
    machine = Machine(o.policy, float(o.share.rstrip("%")) / 100, model, kept=0)

    def run(sent: Sequence[Sequence[int]]) -> Sums:
        clients = [
            Conversation(
                number * 1e-9, number,
                tuple(
                    Turn(keys_of([], json.dumps(items[place].body()).encode()), place, (), 0.0)
                    for place in mine
                ),
            )
            for number, mine in enumerate(sent)
        ]  # fmt: skip
        service_s = service_seconds(requests, machine, clients)
        publish_s = _PUBLISH_S * service_s / real_s * random.Random(seed).uniform(*_JITTER)
        chosen = Router(router, seed)  # type: ignore[arg-type]
        return run_cluster(requests, clients, machine, chosen, o.replicas, publish_s)

    whole, warm = run(sent), run(parts(sent)[0])
    return 1 - (whole.reads - warm.reads) / (whole.asked - warm.asked)


@contextmanager
def cluster(home_of: Path, router: str, o: argparse.Namespace) -> Iterator[str]:
    """Yield the address of a cluster with a home of its own, with the models of `home_of`."""
    with tempfile.TemporaryDirectory() as home:
        shutil.copytree(Settings(home_of).models, Settings(Path(home)).models)
        options = [
            "--port", "0", "--cluster", "local", "--replicas", str(o.replicas), "--router", router,
            "--memory", o.share, "--policy", o.policy, "--threads", "1", "--no-prefix-cache",
            "--no-speculation",
        ]  # fmt: skip
        variables = {"MOEINF_HOME": home, "MOEINF_NUM_PARALLEL": "1"}
        with subprocess.Popen(
            [*_COMMAND, *options], env=os.environ | variables, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stderr is not None
                said = ""
                while (found := re.search(r"listening on (http://\S+)", said)) is None:
                    line = process.stderr.readline()
                    if not line:
                        raise RuntimeError(said)
                    said += line
                yield found[1]
            finally:
                process.terminate()


def ask(address: str, item: Item) -> Result:
    """Return the last line of an answer."""
    head = {"Content-Type": "application/json"}
    request = Request(f"{address}/api/generate", json.dumps(item.body()).encode(), head)
    with urlopen(request, timeout=600) as answer:
        found: Result = json.loads(answer.read())
    return found


@dataclass(frozen=True)
class Real:
    """The figures of one run. service_s: of a replica for a request. decided: by each rank."""

    hit_rate: float
    tokens_per_s: float
    service_s: float
    decided: dict[str, int]


def real(
    home: Path,
    requests: RecordedRequests,
    items: Sequence[Item],
    sent: Sequence[Sequence[int]],
    router: str,
    o: argparse.Namespace,
) -> Real:
    """Let every client send its requests to a new cluster."""

    def client(mine: Sequence[int]) -> list[tuple[float, Result]]:
        found = []
        for place in mine:
            answer = ask(address, items[place])
            found.append((time.perf_counter(), answer))
        return found

    first, rest = parts(sent)
    with cluster(home, router, o) as address, ThreadPoolExecutor(len(sent)) as pool:
        list(pool.map(client, first))
        before, begin = metrics(address), time.perf_counter()
        answers = list(pool.map(client, rest))
        after = metrics(address)
    end = min(mine[-1][0] for mine in answers)  # until then every client has sent
    within = [answer for mine in answers for at, answer in mine if at <= end]
    read = (bytes_read(after) - bytes_read(before)) / requests.shape.expert_bytes
    ranks = re.findall(r'router_decisions_total\{.*rank="(\w+)"\} (\d+)', after)
    return Real(
        1 - read / asked_for(requests, itertools.chain.from_iterable(rest)),
        sum(answer["eval_count"] for answer in within) / (end - begin),
        (end - begin) * o.replicas / max(1, len(within)),
        {rank: int(count) for rank, count in ranks},
    )


def metrics(address: str) -> str:
    """Return the metrics once every replica has published those of now."""
    time.sleep(2 * _PUBLISH_S)
    with urlopen(f"{address}/metrics", timeout=60) as answer:
        found: str = answer.read().decode()
    return found


def bytes_read(text: str) -> float:
    """Return the bytes of experts that all replicas have read."""
    return sum(map(float, re.findall(r"expert_bytes_read_total\{.*\} (\S+)", text)))


def main() -> None:
    o = _options()
    table: Result = {}
    with tempfile.TemporaryDirectory() as text:
        home = Path(text)
        made = topics(home, o.cache, o.length)
        found = [one for one in made if not o.kinds or one.kind in o.kinds]
        items = random.Random(0).sample(found, min(o.items, len(found)))
        sent = orders(len(items), 2 * o.replicas, o.rounds)
        if min(map(len, sent)) < _WARM:
            raise SystemExit(f"{len(items)} requests are too few: a client sends {_WARM} or more")
        requests, model = recorded(home, items), times(home, items, o)
        for router in o.routers:
            runs = [real(home, requests, items, sent, router, o) for _ in range(o.runs)]
            service_s = statistics.mean(run.service_s for run in runs) if runs else o.service
            rates = [
                simulated(requests, items, sent, router, o, model, service_s, seed)
                for seed in range(_SEEDS)
            ]
            table[router] = {"simulated": rates, "real": [run.hit_rate for run in runs]}
            table[router] |= {"tokens_per_s": [round(run.tokens_per_s, 2) for run in runs]}
            table[router] |= {"service_s": service_s, "decided": [run.decided for run in runs]}
            print(router, json.dumps(table[router]), file=sys.stderr, flush=True)
    show(table)
    print(json.dumps({
        "routers": table, "replicas": o.replicas, "share": o.share,
        "policy": o.policy, "kinds": o.kinds, "length": o.length,
        "requests": sum(map(len, sent)), "ram_over_link": round(model.ram_over_link, 3),
        "command": " ".join(sys.argv), "machine": machine(),
    }, indent=1))  # fmt: skip


def show(table: Result) -> None:
    """Print hit rates, and each router's gain over the first one, in points."""
    first = next(iter(table.values()))
    line = "{:10} {:>11} {:>7} {:>7} {:>7} {:>7} {:>7}"
    print(line.format("router", "simulated %", "gain", "real %", "gain", "ratio", "tok/s"))
    for router, row in table.items():
        cells, gains = [router], []
        for side in ("simulated", "real"):
            if row[side]:
                rate, least = statistics.mean(row[side]), statistics.mean(first[side])
                gains.append(100 * (rate - least))
                cells += [f"{100 * rate:.2f}", f"{gains[-1]:+.2f}"]
        if row["real"]:
            cells.append(f"{gains[1] / gains[0]:.2f}" if gains[0] else "")
            cells.append(f"{statistics.median(row['tokens_per_s']):.1f}")
        print(line.format(*cells, *[""] * (7 - len(cells))))


def _options() -> argparse.Namespace:
    cache = read_environment({**os.environ}).home / "benchmarks"

    def words(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--routers", type=words, default=["random", "prefix", "experts"])
    parser.add_argument("--share", default="30%", help="of the experts that fit in a replica")
    parser.add_argument("--policy", default=DEFAULT_POLICY)
    parser.add_argument("--items", type=int, default=400, help="different requests")
    parser.add_argument("--rounds", type=int, default=4, help="times that each one is sent")
    parser.add_argument("--kinds", type=words, help="of the requests, such as 2,6; all 8")
    parser.add_argument("--length", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--runs", type=int, default=1, help="of each router; 0: simulate only")
    parser.add_argument("--service", type=float, default=0.1, help="seconds, with --runs 0")
    parser.add_argument("--cache", type=Path, default=cache, help="may be deleted")
    return parser.parse_args()


if __name__ == "__main__":
    main()
