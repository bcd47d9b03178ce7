"""Print the time of a decoded token by the pieces of a model.

Run: python scripts/make_checkpoint.py FOLDER --gigabytes 1.7 && moeinf pull FOLDER --name big
     python scripts/profile_decode.py big [--torch] [--context 512] [--tokens 60] [--threads 2]
--torch leaves out the native pieces of runtime/dense/cpu_fused.py. The rest is Python, additions,
the embedding and the store's bookkeeping. Timed pieces are not joined into the calls of
runtime/dense/cpu_block.py: the row "all" is the time of a token in pieces.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moeinf.models.base import Experts, Linear, Piece
from moeinf.native import compute_threads
from moeinf.runtime.config import EngineConfig, Settings, read_environment
from moeinf.runtime.engine import loader
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.library.library import Library
from moeinf.runtime.sampling.sampler import Sampler, SamplingOptions

_spent: dict[str, float] = defaultdict(float)  # seconds, by piece
_NAMES = {
    "RmsNorm": "norms",
    "GqaCore": "attention",
    "MlaCore": "attention",
    "SoftmaxRouter": "router",
    "SigmoidRouter": "router",
}


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **kwargs)
        _spent[name] += time.perf_counter() - start
        return result

    return call


class TimedWeights(loader.DenseWeights):
    """Dense weights whose pieces are timed."""

    native = True

    def linear(
        self, prefix: str, out_features: int, in_features: int, bias: bool = False
    ) -> Linear:
        return timed("linears", super().linear(prefix, out_features, in_features, bias))

    def tuned(self, piece: Piece) -> Piece:
        name = _NAMES.get(type(piece).__name__)
        found = super().tuned(piece) if self.native else piece
        return found if name is None else timed(name, found)  # type: ignore[return-value]


class TimedExperts:
    """`Experts` whose `submit` and `result` are timed."""

    def __init__(self, experts: Experts) -> None:
        self.begin_pass, self.end_pass, self.hint = (
            experts.begin_pass,
            experts.end_pass,
            experts.hint,
        )
        self._experts = experts

    @property
    def wants_hints(self) -> bool:
        return self._experts.wants_hints

    def submit(self, *args: Any) -> Any:
        pending = timed("experts", self._experts.submit)(*args)
        return TimedPending(timed("experts", pending.result))


@dataclass(frozen=True)
class TimedPending:
    """A submitted layer whose `result` is timed."""

    result: Callable[[], Any]


def sampler_micros(vocab: int) -> float:
    """Return the microseconds of one choice with the default options."""
    draw = np.random.default_rng(0)
    rows = [draw.normal(0, 3, vocab).astype(np.float32) for _ in range(20)]
    sampler = Sampler(SamplingOptions(seed=1), SamplingOptions())
    history = draw.integers(0, vocab, 200).tolist()
    taken = []
    for logits in rows:
        start = time.perf_counter()
        sampler.choose(logits, history)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--torch", action="store_true", help="without the native pieces")
    parser.add_argument("--context", type=int, default=512, help="tokens before the first measured")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--threads", type=int, help="default: as the machine has cores")
    parser.add_argument("--home", type=Path, help="of the model; default: MOEINF_HOME")
    o = parser.parse_args()
    TimedWeights.native = not o.torch
    loader.DenseWeights = TimedWeights  # type: ignore[misc]
    settings = read_environment() if o.home is None else Settings(o.home)
    manifest, folder = Library(settings).read(o.model)
    with Engine.open(manifest, folder, EngineConfig(threads=o.threads), settings) as engine:
        state = engine.new_state()
        ids = np.random.default_rng(0).integers(0, 256, o.context).tolist()
        per_token: list[dict[str, float]] = []
        with engine.routed_through(TimedExperts):
            engine.extend(state, ids)
            for number in range(o.tokens):
                _spent.clear()
                start = time.perf_counter()
                engine.extend(state, [number % 256])
                total = time.perf_counter() - start
                per_token.append({**_spent, "all": total, "rest": total - sum(_spent.values())})
    half = per_token[len(per_token) // 2 :]  # caches are warm by then
    layers = manifest.layers
    kind = "torch" if o.torch else "native"
    threads = compute_threads()
    print(f"{o.model}: {layers} layers, {o.context} tokens before, {threads} threads, {kind}")
    print("| piece | µs a layer | share |")
    print("|---|---|---|")
    whole = statistics.median(one["all"] for one in half)
    for name in ("experts", "linears", "attention", "norms", "router", "rest", "all"):
        seconds = statistics.median(one.get(name, 0.0) for one in half)
        print(f"| {name} | {seconds / layers * 1e6:.0f} | {seconds / whole:.0%} |")
    for vocab in (50_000, 100_000, 150_000):
        print(f"sampler, vocabulary {vocab}: {sampler_micros(vocab):.0f} µs a token")


if __name__ == "__main__":
    main()
