"""Train the network of the policy `learned` and write offload/policy/learned_net.py.

Run: python -m scripts.train_eviction [--requests even|odd] [--out FILE]
Replays the recorded requests of tests/data/traces in order, from an empty EAMC and bank. Samples
the inputs of random rows after random layers. The labels are uses within 1, 2, 4, 8, 16 and 32
decode tokens; a span that a request does not complete has no label. One thread, fixed seeds: the
same machine writes the same file.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moeinf.offload.policy.base import Setup
from moeinf.offload.policy.learned import Learned
from moeinf.offload.policy.learned_net import NET
from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.routing.requests_file import read_requests
from moeinf.offload.routing.trace import Pass, Recording
from moeinf.offload.simulator.replay import Conditions, Walk

ROOT = Path(__file__).resolve().parents[1]
TRACES = ROOT / "tests/data/traces"
SPANS = (1, 2, 4, 8, 16, 32)
HIDDEN = 16
Floats = NDArray[np.float32]


class Samples(Walk):
    """Feeds a recording to the policy, without a cache, and keeps inputs of its network."""

    def __init__(self, recording: Recording, rows: int) -> None:
        eamc = Eamc.automatic(recording.shape.layers, recording.shape.experts)
        super().__init__(recording, Conditions(1), eamc)
        self._policy = Learned(Setup(self._shape, 1, eamc))
        self.policies = [self._policy]
        self._random = np.random.default_rng(0)
        self._rows = rows
        self._passes = 0
        self.inputs: list[Floats] = []
        self.places: list[tuple[int, int, int]] = []  # pass, layer that has run, layer sampled

    def _pass(self, running: Pass, hinted: NDArray[np.int16] | None) -> None:
        policy, layers = self._policy, self._shape.layers
        every = -(-layers // 4)  # kRefreshes of forecast.cpp
        full = min((int(self._random.integers(-(-layers // every))) + 1) * every, layers) - 1
        own = int(self._random.integers(layers))
        policy.begin_pass(running.rows, running.phase)
        for layer, ids in enumerate(running.ids):
            policy.routed(layer, ids)
            if self._decoding and layer == full:
                for row in self._random.choice(layers, self._rows, False).tolist():
                    self._keep(layer, row)
            elif self._decoding and layer == own:
                self._keep(layer, layer)
            elif not self._decoding and layer % 4 == own % 4:  # a prompt's own row, when it settles
                self._keep(layers - 1, layer)
        policy.end_pass(running.accepted)
        if not self._decoding:
            for row in range(layers):
                self._keep(layers - 1, row)
        self._passes += 1

    def _keep(self, layer: int, row: int) -> None:
        self.inputs.append(self._policy.core.inputs(row))
        self.places.append((self._passes, layer, row))


def labelled(recording: Recording, samples: Samples) -> tuple[Floats, Floats]:
    """Return (used within each span, 1 where that is known), both [samples · E, spans]."""
    passes, experts = recording.passes, recording.shape.experts
    owner = np.array([int(p.rows[0]) for p in passes])
    used = np.zeros((len(passes), recording.shape.layers, experts), np.bool_)
    for index, done in enumerate(passes):
        for layer, ids in enumerate(done.ids):
            used[index, layer, ids.ravel()] = True
    found = np.zeros((len(samples.places), experts, len(SPANS)), np.float32)
    known = np.zeros_like(found)
    for n, (index, layer, row) in enumerate(samples.places):
        start = index if row > layer else index + 1
        end = start
        while end < len(passes) and end < start + SPANS[-1] and owner[end] == owner[index]:
            end += 1
        for s, span in enumerate(SPANS):
            if start + span <= end:
                found[n, :, s] = used[start : start + span, row].any(0)
                known[n, :, s] = 1
    return found.reshape(-1, len(SPANS)), known.reshape(-1, len(SPANS))


def train(x: Floats, y: Floats, known: Floats) -> dict[str, list[float]]:
    """Fit the network by AdamW on the cross entropy of each span."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mean, deviation = x.mean(0), x.std(0)
    scale = (1 / np.maximum(deviation, 1e-3)).astype(np.float32)
    inputs = torch.from_numpy((x - mean) * scale)
    targets, weights = torch.from_numpy(y), torch.from_numpy(known)
    hidden = torch.nn.Linear(x.shape[1], HIDDEN)
    output = torch.nn.Linear(HIDDEN, len(SPANS))
    numbers = [*hidden.parameters(), *output.parameters()]
    optimiser = torch.optim.AdamW(numbers, lr=3e-3, weight_decay=1e-3)
    batch, epochs = 4096, 6
    steps = epochs * (len(x) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=steps + 1)
    for epoch in range(epochs):
        order, total = torch.randperm(len(x)), 0.0
        for at in range(0, len(x) - batch + 1, batch):
            chosen = order[at : at + batch]
            z = output(torch.nn.functional.leaky_relu(hidden(inputs[chosen]), 0.01))
            losses = torch.nn.functional.binary_cross_entropy_with_logits(
                z, targets[chosen], reduction="none"
            )
            loss = (losses * weights[chosen]).sum() / weights[chosen].sum()
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / (len(x) // batch):.4f}", flush=True)
    parts: dict[str, Any] = {
        "mean": mean, "scale": scale, "hidden": hidden.weight, "hidden_bias": hidden.bias,
        "output": output.weight, "output_bias": output.bias,
    }  # fmt: skip
    return {name: torch.as_tensor(part).detach().flatten().tolist() for name, part in parts.items()}


def text(net: dict[str, list[float]]) -> str:
    """Return the file of the weights, six digits each."""
    lines = ['"""The network of the policy `learned`, written by scripts/train_eviction.py."""', ""]
    lines += ["# fmt: off", "NET: dict[str, list[float]] = {"]
    for name, numbers in net.items():
        lines.append(f'    "{name}": [')
        words = [f"{number:.6g}" for number in numbers]
        for at in range(0, len(words), 7):
            lines.append("        " + ", ".join(words[at : at + 7]) + ",")
        lines.append("    ],")
    return "\n".join([*lines, "}", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", choices=("all", "even", "odd"), default="all")
    parser.add_argument("--out", type=Path, default=ROOT / "offload/policy/learned_net.py")
    options = parser.parse_args()
    first, step = {"all": (0, 1), "even": (0, 2), "odd": (1, 2)}[options.requests]
    inputs, targets, known = [], [], []
    for name, rows in (("deepseek-v2-lite", 3), ("gpt-oss-20b", 1)):
        whole = read_requests(TRACES / f"{name}.npz").recording()
        recording = whole.select(whole.requests[first::step], name)
        samples = Samples(recording, rows)
        samples.run()
        inputs.append(np.concatenate(samples.inputs))
        found, there = labelled(recording, samples)
        targets.append(found)
        known.append(there)
        print(f"{name}: {len(inputs[-1])} samples", flush=True)
    net = train(np.concatenate(inputs), np.concatenate(targets), np.concatenate(known))
    options.out.write_text(text(net))
    assert net.keys() == NET.keys()


if __name__ == "__main__":
    main()
