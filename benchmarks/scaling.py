"""python -m benchmarks.scaling: measure the cost of a token as one size grows, others fixed.

Sizes, each a curve (--what selects curves; --out keeps the others from an earlier run):

    context   tokens in the KV cache (benchmarks/context.py)
    layers    of MoE
    experts   per layer; the number of experts per token stays the same
    eamc      requests in the collection: matching alone, and all decisions of `adaptive`
    budget    share of the experts that fit

Models are a middle-sized shape with random weights, q4, made for a curve and deleted after it; the
budget's has calibrated routing. Times are medians. The floor is measured with each of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import context
from benchmarks.calibrated import Calibration, calibrated, tokens
from benchmarks.models import RaceModel
from benchmarks.race import Tokens
from benchmarks.shapes import Config, shape
from moeinf.offload.routing.trace import RoutingShape
from moeinf.runtime.config import EngineConfig, read_environment
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.jobs.bench import decode, machine, prefill, read_ceiling, token_bytes
from moeinf.runtime.placement.bandwidth import measure
from moeinf.runtime.sizes import parse_memory
from scripts.bench_policy import SHAPES, collection, deciding, matching, routing

MIDDLE: Config = {
    "hidden_size": 1024,
    "intermediate_size": 512,
    "vocab_size": 8192,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
}
LAYERS, EXPERTS = (2, 4, 8, 16), (16, 32, 64, 128, 256)
LENGTHS = (256, 1024, 4096, 8192, 16384)
ENTRIES = (1, 30, 120, 500, 1000)
SHARES = (10, 18, 25, 35, 60, 100)
_AT = 4  # layers of a model whose experts or context vary
Point = dict[str, float]
Curve = dict[int, Point]


def middle(layers: int, experts: int = 64) -> Config:
    return {**shape("olmoe", layers, experts), **MIDDLE}


def of_context(cache: Path, o: argparse.Namespace) -> Curve:
    model = RaceModel(cache, "middle", middle(_AT))
    manifest = model.ours("q4")
    config = EngineConfig(
        memory=parse_memory("100%"), context=max(LENGTHS) + 8, threads=o.threads, trace=False
    )
    with Engine.open(manifest, model.folder("q4"), config, model.settings) as engine:
        found = context.measure(engine, list(LENGTHS), o.rounds, 8)
        ram = found["read_bytes_per_s"]
        return {
            n: {"ms": ms, "floor_ms": 1e3 * token_bytes(engine, n).total / ram}
            for n, ms in found["ms"].items()
        }


def of_layers(cache: Path, o: argparse.Namespace) -> Curve:
    return {n: _resident(RaceModel(cache, f"layers-{n}", middle(n)), o) for n in LAYERS}


def of_experts(cache: Path, o: argparse.Namespace) -> Curve:
    return {n: _resident(RaceModel(cache, f"experts-{n}", middle(_AT, n)), o) for n in EXPERTS}


def of_budget(cache: Path, o: argparse.Namespace) -> Curve:
    """Measure with O_DIRECT, because the page cache would hold the whole file."""
    model = calibrated(cache, "budget", middle(8), Calibration())
    manifest, found = model.ours("q4"), Curve()
    text = tokens(Calibration(), MIDDLE["vocab_size"], 32 + (o.rounds + 2) * o.slice)
    for share in SHARES:
        config = EngineConfig(
            memory=parse_memory(f"{share}%"), context=len(text) + 8, threads=o.threads,
            direct_io=True, trace=False,
        )  # fmt: skip
        with Engine.open(manifest, model.folder("q4"), config, model.settings) as engine:
            disk = measure(model.settings, engine.info.folder, manifest).disk_bytes_per_s
            point, stats = _decoded(engine, text, o), engine.store.stats
        read = stats.decode_bytes_read / stats.decode_events * manifest.top_k * manifest.layers
        point |= {"hit_rate": stats.hit_rate or 0.0, "bytes_per_token": read}
        point["floor_ms"] = max(point["floor_ms"], 1e3 * read / disk)
        found[share] = point
    return found


def of_eamc(_: Path, o: argparse.Namespace) -> Curve:
    """Measure at OLMoE's routing shape, without a model: microseconds per token."""
    sizes: RoutingShape = SHAPES["OLMoE"]
    drawn = routing(sizes, 40 * o.rounds, 0)
    found = Curve()
    for entries in ENTRIES:
        eamc = collection(sizes, entries)
        found[entries] = {
            "matching_us": 1e6 * float(np.median(matching(sizes, eamc, drawn))),
            "deciding_us": 1e6 * float(np.median(deciding("adaptive", sizes, eamc, drawn, True))),
        }
    return found


CURVES: dict[str, Callable[[Path, argparse.Namespace], Curve]] = {
    "context": of_context,
    "layers": of_layers,
    "experts": of_experts,
    "eamc": of_eamc,
    "budget": of_budget,
}
_LABELS = {
    "context": "tokens of context",
    "layers": "MoE layers",
    "experts": "experts per layer (8 used)",
    "eamc": "requests in the EAMC",
    "budget": "experts that fit, %",
}


def _resident(model: RaceModel, o: argparse.Namespace) -> Point:
    """Measure with all experts in memory and uniform tokens."""
    manifest = model.ours("q4")
    text = Tokens(MIDDLE["vocab_size"], 0).draw(256 + (o.rounds + 2) * o.slice)
    config = EngineConfig(
        memory=parse_memory("100%"), context=len(text) + 8, threads=o.threads, trace=False
    )
    with Engine.open(manifest, model.folder("q4"), config, model.settings) as engine:
        return _decoded(engine, text, o)


def _decoded(engine: Engine, text: list[int], o: argparse.Namespace) -> Point:
    """Decode the last slices of `text` after the rest as a prompt; the first slice is a warm-up."""
    count = (o.rounds + 1) * o.slice
    state = engine.new_state()
    engine.begin_request(state)
    logits, _ = prefill(engine, state, text[:-count])
    taken, speeds = list[float](), list[float]()
    for number in range(o.rounds + 1):
        first = len(text) - count + number * o.slice
        logits, seconds = decode(engine, state, logits, o.slice, text[first : first + o.slice])
        if number:
            taken += seconds
        speeds.append(read_ceiling(o.threads))
    floor = token_bytes(engine, state.length).total / max(speeds)
    return {"ms": 1e3 * statistics.median(taken), "floor_ms": 1e3 * floor}


def draw(curves: dict[str, Curve], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(3.6 * len(curves), 3.4), squeeze=False)
    for axis, (name, curve) in zip(axes[0], curves.items(), strict=True):
        sizes = sorted(curve, key=int)
        for key, label in (
            ("ms", "a token"), ("floor_ms", "floor"),
            ("matching_us", "matching"), ("deciding_us", "deciding"),
        ):  # fmt: skip
            if key in curve[sizes[0]]:
                values = [curve[size][key] for size in sizes]
                style = "k--" if key == "floor_ms" else "o-"
                axis.plot([int(size) for size in sizes], values, style, ms=3, label=label)
        axis.set(xlabel=_LABELS[name], ylabel="µs a token" if name == "eamc" else "ms a token")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def table(curves: dict[str, Curve]) -> str:
    """Return Markdown with a line per curve and size."""
    lines = ["| grows | size | ms a token | floor ms | else |", "|---|---|---|---|---|"]
    for name, curve in curves.items():
        for size in sorted(curve, key=int):
            point = curve[size]
            more = ""
            if "matching_us" in point:
                more = (
                    f"{point['matching_us']:.0f} µs matching, {point['deciding_us']:.0f} deciding"
                )
            if "hit_rate" in point:
                more = f"{point['hit_rate']:.1%} hits, {point['bytes_per_token'] / 1e6:.1f} MB read"
            cells = [f"{point[k]:.2f}" if k in point else "-" for k in ("ms", "floor_ms")]
            lines.append(f"| {' | '.join([_LABELS[name], str(size), *cells, more])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    o = _options()
    found: dict[str, Any] = json.loads(o.out.read_text()) if o.out.exists() else {"curves": {}}
    found |= {"command": "python -m benchmarks.scaling", "machine": machine()}
    o.cache.mkdir(parents=True, exist_ok=True)
    for name in o.what:
        with tempfile.TemporaryDirectory(prefix="scaling-", dir=o.cache) as folder:
            curve = CURVES[name](Path(folder), o)
        found["curves"][name] = {str(size): point for size, point in curve.items()}
        o.out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{name}: done", file=sys.stderr)
    curves = {name: found["curves"][name] for name in CURVES if name in found["curves"]}
    print(table(curves), end="")
    if o.plot is not None:
        draw(curves, o.plot)


def _options() -> argparse.Namespace:
    cache = read_environment({**os.environ}).home / "benchmarks"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--what", type=lambda text: text.split(","), default=list(CURVES))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--slice", type=int, default=16, help="tokens per round")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache", type=Path, default=cache, help="2 GB for a while")
    parser.add_argument("--out", type=Path, default=Path("scaling.json"))
    parser.add_argument("--plot", type=Path, metavar="OUT.png")
    return parser.parse_args()


if __name__ == "__main__":
    main()
