"""Records what the embedded demo routes while it answers held-out exercises, hints included.

Run: python scripts/record_demo.py demo.eam [--per-kind 45]
Exercises come in a fixed random order, each a request labelled with its kind; the hints are the
next layer's router applied to the layer's own input. Needs an installed moeinf.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
from torch import Tensor

from moeinf.cli.commands.pull import ensure
from moeinf.cli.output import Output
from moeinf.models.base import Pending, Phase
from moeinf.models.layers.moe import SparseFfn
from moeinf.offload.routing.recording_file import recording_to_bytes
from moeinf.offload.routing.trace import PassBuilder, Recording, RoutingShape
from moeinf.runtime.config import EngineConfig, read_environment
from moeinf.runtime.engine.chat import Conversation
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.engine.generate import Limits
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.runtime.sampling.sampler import SamplingOptions
from moeinf.runtime.sizes import parse_memory


class RecordingExperts:
    """Wraps an engine's store: every pass goes into `recording` as of `request`."""

    def __init__(self, engine: Engine, recording: Recording) -> None:
        self._store, self._recording = engine.store, recording
        self._shape = recording.shape
        blocks = engine.model._body.blocks  # type: ignore[attr-defined]
        self._routers = [block.ffn.router for block in blocks if isinstance(block.ffn, SparseFfn)]
        self._begin, self._submit, self._end = (
            self._store.begin_pass,
            self._store.submit,
            self._store.end_pass,
        )
        self.request = 0
        self._store.begin_pass = self.begin_pass  # type: ignore[method-assign]
        self._store.submit = self.submit  # type: ignore[method-assign, assignment]
        self._store.end_pass = self.end_pass  # type: ignore[method-assign]

    def begin_pass(self, rows: Tensor, phase: Phase) -> None:
        mine = np.full(len(rows), self.request)
        self._running = PassBuilder(self._shape, mine, phase, weights=True)
        self._begin(rows, phase)

    def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Pending:
        self._running.routed(layer, ids.numpy(), weights.numpy())
        if layer + 1 < self._shape.layers:
            self._running.hint(layer + 1, self._routers[layer + 1](x)[0].numpy())
        return self._submit(layer, x, ids, weights)

    def end_pass(self, accepted_rows: Tensor | None = None) -> None:
        self._recording.add(self._running.end())
        self._end(accepted_rows)


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
    sizes = manifest.slots.slot_bytes, manifest.dense_bytes
    shape = RoutingShape(manifest.layers, manifest.experts, manifest.top_k, 0, *sizes)
    recording = Recording("demo", shape)
    config = EngineConfig(memory=parse_memory("100%"))
    with Engine(manifest, folder, config, read_environment()) as engine:
        experts = RecordingExperts(engine, recording)
        for number, item in enumerate(items):
            experts.request = number
            recording.labels[number] = item["kind"]
            for _ in Conversation(engine).ask(
                item["prompt"], SamplingOptions(temperature=0), Limits(max_tokens=128)
            ):
                pass
    options.out.write_bytes(recording_to_bytes(recording))


if __name__ == "__main__":
    main()
