"""Print how well the embedded demo answers unseen exercises, and how its experts tell their kind.

Run: python scripts/eval_demo.py [--per-kind 100] [--tag bf16] [--wrong] [--json]

Each held-out exercise is answered greedily through the engine, with the wording of `moeinf run`.
Held-out items and unseen wordings were kept from training; so were the 100 general questions. The
last column is leave-one-out: the share of requests whose nearest other request is of the same kind.
Nearness is the cosine of the EAMs of prefill and decode together. Needs an installed moeinf.
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

from moeinf.cli.commands.models.pull import ensure
from moeinf.cli.output import Output
from moeinf.runtime.config import EngineConfig, read_environment
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.chat import Conversation
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.runtime.requests import Limits
from moeinf.runtime.sampling.sampler import SamplingOptions
from moeinf.runtime.sizes import parse_memory

ALL = parse_memory("100%")
SPLITS = ("heldout", "wordings", "questions")


def nearest_is_same(eams: NDArray[np.float64], kinds: list[str]) -> list[bool]:
    """Return, per request, whether its nearest neighbour by cosine is of its kind.

    A request is not its own neighbour.
    """
    units = eams / np.linalg.norm(eams, axis=1, keepdims=True)
    likeness = units @ units.T
    np.fill_diagonal(likeness, -1)
    return [kinds[near] == kind for near, kind in zip(likeness.argmax(1), kinds, strict=True)]


Part = dict[str, list[bool]]  # per kind, one entry an exercise


def exercises(name: str, per_kind: int) -> list[dict[str, str]]:
    """Return the first `per_kind` exercises of each kind in a file beside the demo's weights."""
    taken: dict[str, list[dict[str, str]]] = defaultdict(list)
    for line in (DEMO_CHECKPOINT / f"{name}.jsonl").read_text().splitlines():
        item = json.loads(line)
        if len(taken[item["kind"]]) < per_kind:
            taken[item["kind"]].append(item)
    return [item for part in taken.values() for item in part]


def share(hits: list[bool]) -> float:
    return sum(hits) / len(hits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--per-kind", type=int, default=100)
    parser.add_argument("--tag", default="bf16")
    parser.add_argument("--wrong", action="store_true", help="print each wrong answer")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    settings = read_environment()
    manifest, folder = ensure(f"demo:{options.tag}", settings, Output())
    right: dict[str, Part] = {split: defaultdict(list) for split in SPLITS}
    eams = []
    with Engine.open(manifest, folder, EngineConfig(memory=ALL), settings) as engine:
        items = [(s, item) for s in SPLITS for item in exercises(s, options.per_kind)]
        for split, item in track(items, "answering", console=Console(file=sys.stderr)):
            recording = engine.record("one item")
            answer = Conversation(engine).ask(
                item["prompt"], SamplingOptions(temperature=0), Limits(max_tokens=128)
            )
            text = "".join(answer)
            right[split][item["kind"]].append(text == item["answer"])
            if options.wrong and text != item["answer"]:
                print(f"{item['kind']} ({split}): {item['prompt']!r} gave {text!r}")
            (eam,) = recording.request_eams().values()
            if split == "heldout":
                eams.append((eam.prefill + eam.decode).flatten())
    kinds = [item["kind"] for split, item in items if split == "heldout"]
    same: Part = defaultdict(list)
    for kind, ok in zip(kinds, nearest_is_same(np.array(eams, np.float64), kinds), strict=True):
        same[kind].append(ok)
    if options.json:
        Output().document({"exact": right_shares(right), "nearest_same_kind": right_shares(same)})
        return
    table = Table("kind", "items", "exact", "unseen wordings", "exact", "nearest EAM")
    for part in (right["heldout"], right["wordings"], same):
        part["all"] = [hit for hits in part.values() for hit in hits]
    for kind, hits in right["heldout"].items():
        others = right["wordings"].get(kind)
        worded = (f"{len(others)}", f"{share(others):.1%}") if others else ("", "")
        table.add_row(
            kind, f"{len(hits)}", f"{share(hits):.1%}", *worded, f"{share(same[kind]):.1%}"
        )
    Console().print(table)
    questions = right["questions"]["other"]
    print(f"{sum(questions)} of {len(questions)} general questions get the honest answer")


def right_shares(found: dict[str, Part] | Part) -> dict[str, object]:
    """Return the shares of right answers, in the form of what they were counted in."""
    return {k: right_shares(v) if isinstance(v, dict) else share(v) for k, v in found.items()}


if __name__ == "__main__":
    main()
