"""Record the routing of the embedded demo on held-out exercises, hints included.

Run: python scripts/record_demo.py demo.eam [--per-kind 45]

Exercises come in a fixed random order, each a request labelled with its kind. The hints are the
next layer's router applied to the layer's own input. Needs an installed moeinf.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from pathlib import Path

from moeinf.cli.commands.models.pull import ensure
from moeinf.cli.output import Output
from moeinf.offload.routing.recording_file import recording_to_bytes
from moeinf.runtime.config import EngineConfig, read_environment
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.chat import Conversation
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.runtime.requests import Limits
from moeinf.runtime.sampling.sampler import SamplingOptions
from moeinf.runtime.sizes import parse_memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--per-kind", type=int, default=45)
    options = parser.parse_args()
    manifest, folder = ensure("demo:bf16", read_environment(), Output())
    seen, items = Counter[str](), []
    for line in (DEMO_CHECKPOINT / "heldout.jsonl").read_text().splitlines():
        item = json.loads(line)
        seen[item["kind"]] += 1
        if seen[item["kind"]] <= options.per_kind:
            items.append(item)
    random.Random(0).shuffle(items)
    config = EngineConfig(memory=parse_memory("100%"))
    with Engine.open(manifest, folder, config, read_environment()) as engine:
        recording = engine.record("demo")
        for item in items:
            answer = Conversation(engine).ask(
                item["prompt"], SamplingOptions(temperature=0), Limits(max_tokens=128)
            )
            for _ in answer:
                pass
            recording.labels[answer.request] = item["kind"]
    options.out.write_bytes(recording_to_bytes(recording))


if __name__ == "__main__":
    main()
