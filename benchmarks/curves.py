"""python -m benchmarks.curves: compare a calibrated model's locality with the real traces'.

Runs a forced text through our own engine with every expert resident, and records the routing.
Replays the recording and the traces in the simulator, and prints both curves side by side. A share
of experts below one token's (K ÷ E) cannot be compared. There LRU has no hits by construction, and
K ÷ E differs between the shapes.
"""

from __future__ import annotations

import argparse
import os
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.calibrated import Calibration, calibrated, named, tokens
from benchmarks.models import RaceModel
from benchmarks.shapes import SHAPES, shape
from moeinf.offload.routing.recording_file import recording_to_bytes
from moeinf.offload.routing.route_csv import read_route_csv
from moeinf.offload.routing.trace import Recording
from moeinf.offload.simulator.cases import Case, run_case
from moeinf.offload.simulator.clock import TimeModel
from moeinf.runtime.config import EngineConfig, read_environment
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.sizes import parse_memory

SHARES = (0.05, 0.1, 0.2, 0.35, 0.6)
TOLERANCE = 0.05
_TRACES = Path(__file__).parents[1] / "tests/data/traces"
Curve = dict[float, float]


def record(model: RaceModel, tag: str, prompt: list[int], text: list[int]) -> Recording:
    """Return the routing of `model` on prompt and text, hints included."""
    manifest = model.ours(tag)
    config = EngineConfig(memory=parse_memory("100%"), context=len(prompt) + len(text))
    with Engine.open(manifest, model.folder(tag), config, model.settings) as engine:
        recording = engine.record(model.name)
        state = engine.new_state()
        request = engine.begin_request(state)
        engine.extend(state, prompt)
        for token in text:
            engine.extend(state, [token])
        engine.end_request(request, counts=False)
    return recording


def curve(recording: Recording, policy: str, shares: tuple[float, ...] = SHARES) -> Curve:
    """Return the hit rate of decode events by the share of experts that fit."""
    return {s: run_case(recording, Case(policy, s), TimeModel()).hit_rate for s in shares}


def comparable(recording: Recording, shares: tuple[float, ...] = SHARES) -> list[float]:
    """Return the shares that hold at least one token's experts."""
    return [s for s in shares if s >= recording.shape.top_k / recording.shape.experts]


def hint_recall(recording: Recording) -> float:
    """Return the share of a layer's experts that the previous layer's hints contain, in decode."""
    found = [
        np.isin(run.ids[layer, 0], run.hints[layer, 0]).mean()
        for run in recording.passes
        if run.phase == "decode" and run.hints is not None
        for layer in range(1, len(run.ids))
    ]
    return float(np.mean(found))


def repeats(recording: Recording) -> float:
    """Return the share of a token's experts that the previous token used too."""
    decoded = [run.ids for run in recording.passes if run.phase == "decode"]
    found = [
        np.isin(now[layer, 0], before[layer, 0]).mean()
        for before, now in pairwise(decoded)
        for layer in range(len(now))
    ]
    return float(np.mean(found))


def table(ours: list[Recording], real: list[Recording]) -> str:
    """Return the LRU curves as Markdown, with their largest distance where comparable."""
    lines = ["| experts that fit | " + " | ".join(r.name for r in [*ours, *real]) + " |"]
    lines.append("|---" * (1 + len(ours) + len(real)) + "|")
    curves = [curve(recording, "lru") for recording in [*ours, *real]]
    for share in SHARES:
        lines.append(f"| {share:.0%} | " + " | ".join(f"{c[share]:.1%}" for c in curves) + " |")
    far = max(
        abs(mine[share] - theirs[share])
        for recording, mine in zip(ours, curves, strict=False)
        for theirs in curves[len(ours) :]
        for share in comparable(recording)
    )
    lines.append("")
    lines.append(
        f"Farthest from either trace: {100 * far:.1f} points (allowed: {100 * TOLERANCE:.0f})"
    )
    for recording in ours:
        lines.append(
            f"{recording.name}: next-layer hints' recall {hint_recall(recording):.0%}, "
            f"repeats of the token before {repeats(recording):.0%}"
        )
    return "\n".join(lines) + "\n"


def plot(ours: list[Recording], real: list[Recording], path: Path) -> None:
    """Plot the curves of LRU and Belady, ours solid and the traces dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shares = (0.05, 0.1, 0.15, 0.2, 0.25, 0.35, 0.45, 0.6, 0.8)
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for axis, policy in zip(axes, ("lru", "belady"), strict=True):
        for recording in [*ours, *real]:
            style = "o-" if recording in ours else "s--"
            values = [100 * hit for hit in curve(recording, policy, shares).values()]
            axis.plot([100 * s for s in shares], values, style, ms=3, label=recording.name)
        axis.set(title=policy, xlabel="experts that fit, %", ylabel="hit rate, %")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    o = _options()
    model = calibrated(o.cache, named(o.shape, o.layers), shape(o.shape, o.layers), Calibration())
    ours = []
    for seed in range(o.texts):
        text = tokens(Calibration(), model.config["vocab_size"], o.prompt + o.tokens, seed)
        recording = record(model, o.tag, text[: o.prompt], text[o.prompt :])
        recording.name = f"{o.shape} text {seed}"
        ours.append(recording)
        if o.out is not None:
            path = o.out / f"{model.name}-{seed}.eam"
            path.write_bytes(recording_to_bytes(recording))
    real = [read_route_csv(path) for path in sorted(o.traces.glob("*.csv.gz"))]
    print(table(ours, real), end="")
    if o.plot is not None:
        plot(ours, real, o.plot)


def _options() -> argparse.Namespace:
    cache = read_environment({**os.environ}).home / "benchmarks"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, help="fewer than the real shape has")
    parser.add_argument("--tag", default="q4")
    parser.add_argument("--prompt", type=int, default=28, help="tokens, as many as the traces have")
    parser.add_argument("--tokens", type=int, default=128, help="decoded, as many as they have")
    parser.add_argument("--texts", type=int, default=3)
    parser.add_argument("--traces", type=Path, default=_TRACES, help="a folder of route CSVs")
    parser.add_argument("--cache", type=Path, default=cache, help="may be deleted")
    parser.add_argument("--out", type=Path, help="a folder for the recordings (.eam)")
    parser.add_argument("--plot", type=Path, metavar="OUT.png")
    return parser.parse_args()


if __name__ == "__main__":
    main()
