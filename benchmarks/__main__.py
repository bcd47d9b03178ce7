"""python -m benchmarks SHAPE: make a real shape with random weights and race it.

This module reads options and writes JSON and Markdown. Without a shape, or as
`python -m benchmarks suite`, it runs the suite (benchmarks/suite/command.py).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import random
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cold import median_of, read_once, start_cold
from benchmarks.models import GGUF_OF_TAG, RaceModel, bits_per_weight
from benchmarks.race import Rounds, Tokens, alone, race_decode, race_prefill
from benchmarks.report import markdown
from benchmarks.shapes import SHAPES, shape
from benchmarks.suite import command as suite
from benchmarks.worker import Worker
from moeinf.runtime.config import read_environment
from moeinf.runtime.jobs.bench import machine, read_ceiling

SETTINGS = ("default", "no-repack", "no-mmap")
WHATS = ("decode", "prefill", "cold")


def main() -> None:
    o = _options()
    name = o.shape if o.layers is None else f"{o.shape}-{o.layers}"
    config = shape(o.shape, o.layers)
    model = RaceModel(o.cache, name, config)
    model.ours(o.tag)
    problem = peer_problem(o.peer_python) if o.peers else "left out"
    gguf = None if problem else model.peer(o.gguf or GGUF_OF_TAG[o.tag], o.peer_python)
    if o.make_only:
        return
    result: dict[str, Any] = {
        "shape": o.shape,
        "layers": config["num_hidden_layers"],
        "tag": o.tag,
        "threads": o.threads,
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "command": "python -m benchmarks " + shlex.join(sys.argv[1:]),
        "machine": machine(),
        "ours": {"bits_per_weight": bits_per_weight(model.folder(o.tag), model.weights())},
    }
    if gguf is None:
        print(f"no peer: {problem}", file=sys.stderr)
    rounds = Rounds(o.prompt, o.prefills, o.decodes, o.slice)
    if {"decode", "prefill"} & set(o.what):
        result |= _run(o, model, gguf, rounds)
    if "cold" in o.what:
        result["cold"] = _run_cold(o, model, gguf)
    text = json.dumps(result, indent=1)
    if o.out is not None:
        o.out.write_text(text + "\n")
        o.out.with_suffix(".md").write_text(markdown(result))
    print(text if o.json else markdown(result), end="")


def peer_problem(python: str) -> str | None:
    """Return what the interpreter lacks to run a peer; None when it lacks nothing."""
    if python == sys.executable:
        missing = [m for m in ("llama_cpp", "gguf") if importlib.util.find_spec(m) is None]
        return f"{python} has no {' and no '.join(missing)}" if missing else None
    probe = subprocess.run([python, "-c", "import llama_cpp, gguf"], capture_output=True, text=True)
    return None if probe.returncode == 0 else f"{python}: {probe.stderr.strip()[-200:]}"


def _run(
    o: argparse.Namespace, model: RaceModel, gguf: Path | None, rounds: Rounds
) -> dict[str, Any]:
    ceiling = partial(read_ceiling, o.threads)
    found: dict[str, Any] = {}
    with Worker(_ours(o, model, rounds.context)) as ours:
        tokens = Tokens(model.config["vocab_size"], rounds.seed)
        if gguf is None:
            return {"alone": alone(ours, tokens, rounds, ceiling)}
        race: dict[str, Any] = {}
        for setting in o.settings:
            with Worker(_peer(o, gguf, setting, rounds.context)) as peer:
                race[setting] = {}
                if "prefill" in o.what:
                    race[setting]["prefill"] = race_prefill(ours, peer, tokens, rounds)
                if "decode" in o.what:
                    race[setting]["decode"] = race_decode(ours, peer, tokens, rounds, ceiling)
                about = peer.ask("about")
        found["race"] = race
        found["peer"] = {
            "version": about["version"],
            "system_info": about["system_info"],
            "type": gguf.stem.rpartition("-")[2],
            "bits_per_weight": bits_per_weight(gguf, model.weights()),
        }
    return found


def _run_cold(o: argparse.Namespace, model: RaceModel, gguf: Path | None) -> dict[str, Any]:
    prompt = [random.Random(1).randrange(model.config["vocab_size"]) for _ in range(o.cold_prompt)]
    manifest, folder = model.ours(o.tag), model.folder(o.tag)
    context = max(64, 2 * o.cold_prompt)

    def ours() -> dict[str, float]:
        times, about = start_cold(folder, _ours(o, model, context), prompt)
        times["read_once"] = read_once(folder, manifest, about["loads"], o.readers)
        times["over_read_once"] = times["first_token"] / times["read_once"]
        return times

    found = {"ours": median_of(o.cold_starts, ours)}
    for setting in o.settings if gguf else ():
        assert gguf is not None
        command = _peer(o, gguf, setting, context)
        found[f"llama.cpp {setting}"] = median_of(
            o.cold_starts, lambda command=command: start_cold(gguf, command, prompt)[0]
        )
    return found


def _ours(o: argparse.Namespace, model: RaceModel, context: int) -> list[str]:
    where = [os.fspath(model.settings.home), f"{model.name}:{o.tag}"]
    return [sys.executable, "-m", "benchmarks.ours", *where, *_sizes(o, context)]


def _peer(o: argparse.Namespace, gguf: Path, setting: str, context: int) -> list[str]:
    where = [os.fspath(gguf), "--setting", setting]
    return [o.peer_python, "-m", "benchmarks.peers.llama_cpp", *where, *_sizes(o, context)]


def _sizes(o: argparse.Namespace, context: int) -> list[str]:
    return ["--threads", str(o.threads), "--context", str(context)]


def _options() -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0))
    cache = read_environment({**os.environ}).home / "benchmarks"
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.splitlines()[0]
    )
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, help="fewer than the real shape has")
    parser.add_argument("--tag", default="bf16", choices=list(GGUF_OF_TAG), help="ours")
    parser.add_argument("--gguf", help="the peer's type; else the one nearest to --tag")
    parser.add_argument("--what", type=_words(WHATS), default=WHATS, help=",".join(WHATS))
    parser.add_argument("--settings", type=_words(SETTINGS), default=SETTINGS, help="of llama.cpp")
    parser.add_argument("--threads", type=int, default=cores)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of prefill")
    parser.add_argument("--prefills", type=int, default=2, help="rounds of prefill")
    parser.add_argument("--decodes", type=int, default=6, help="rounds of decoding")
    parser.add_argument("--slice", type=int, default=16, help="tokens per round and side")
    parser.add_argument("--cold-prompt", type=int, default=32, help="tokens")
    parser.add_argument("--cold-starts", type=int, default=3)
    parser.add_argument("--readers", type=int, default=4, help="threads that read everything once")
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    parser.add_argument("--peer-python", default=sys.executable, help="has llama_cpp and gguf")
    parser.add_argument("--cache", type=Path, default=cache, help="tens of GB; may be deleted")
    parser.add_argument("--make-only", action="store_true")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="and FILE.md")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _words(known: tuple[str, ...]) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        words = tuple(text.split(","))
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is not one of {', '.join(known)}")
        return words

    return parse


if __name__ == "__main__":
    given = sys.argv[1:]
    if not given or given[0].startswith("-") or given[0] == "suite":
        suite.main(given[1:] if given[:1] == ["suite"] else given)
    else:
        main()
