"""Print how well the embedded demo answers unseen exercises, and how its experts tell their kind.

Run: python scripts/eval_demo.py [--per-kind 100] [--tag bf16] [--json]

Each held-out exercise is answered greedily through the engine, with the wording of `moeinf run`.
The last column is leave-one-out: the share of requests whose nearest other request is of the same
kind. Nearness is the cosine of the EAMs of prefill and decode together. Needs an installed moeinf.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from moeinf.cli.commands.pull import ensure
from moeinf.cli.output import Output
from moeinf.runtime.config import EngineConfig, read_environment
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.chat import Conversation
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.runtime.requests import Limits
from moeinf.runtime.sampling.sampler import SamplingOptions
from moeinf.runtime.sizes import parse_memory

ALL = parse_memory("100%")


def nearest_is_same(eams: NDArray[np.float64], kinds: list[str]) -> list[bool]:
    """Return, per request, whether its nearest neighbour by cosine is of its kind.

    A request is not its own neighbour.
    """
    units = eams / np.linalg.norm(eams, axis=1, keepdims=True)
    likeness = units @ units.T
    np.fill_diagonal(likeness, -1)
    return [kinds[near] == kind for near, kind in zip(likeness.argmax(1), kinds, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--per-kind", type=int, default=100)
    parser.add_argument("--tag", default="bf16")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    settings = read_environment()
    manifest, folder = ensure(f"demo:{options.tag}", settings, Output())
    wanted: dict[str, list[dict[str, str]]] = defaultdict(list)
    for line in (DEMO_CHECKPOINT / "heldout.jsonl").read_text().splitlines():
        item = json.loads(line)
        if len(wanted[item["kind"]]) < options.per_kind:
            wanted[item["kind"]].append(item)
    items = [item for part in wanted.values() for item in part]
    eams, right = [], defaultdict(list)
    with Engine.open(manifest, folder, EngineConfig(memory=ALL), settings) as engine:
        for item in track(items, "answering", console=Console(file=sys.stderr)):
            recording = engine.record("one item")
            answer = Conversation(engine).ask(
                item["prompt"], SamplingOptions(temperature=0), Limits(max_tokens=128)
            )
            text = "".join(answer)
            right[item["kind"]].append(text == item["answer"])
            (eam,) = recording.request_eams().values()
            eams.append((eam.prefill + eam.decode).flatten())
    same = nearest_is_same(np.array(eams, np.float64), [item["kind"] for item in items])
    by_kind: dict[str, list[bool]] = defaultdict(list)
    for item, ok in zip(items, same, strict=True):
        by_kind[item["kind"]].append(ok)
    scores = {
        kind: {
            "items": len(hits),
            "exact": sum(hits) / len(hits),
            "nearest_same_kind": sum(by_kind[kind]) / len(hits),
        }
        for kind, hits in right.items()
    }
    if options.json:
        Output().document({"kinds": scores, "nearest_same_kind": sum(same) / len(same)})
        return
    table = Table("kind", "items", "exact", "nearest EAM is of this kind")
    for kind, score in scores.items():
        row = (f"{score['items']}", f"{score['exact']:.1%}", f"{score['nearest_same_kind']:.1%}")
        table.add_row(kind, *row)
    exact = sum(sum(hits) for hits in right.values()) / len(items)
    table.add_row("all", str(len(items)), f"{exact:.1%}", f"{sum(same) / len(same):.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
