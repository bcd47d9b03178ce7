"""Compute the figures of docs/study.md: the paper's questions, on recordings.

Run: python -m scripts.study demo.eam --pictures docs
     (`python scripts/record_demo.py demo.eam --per-kind 45` makes that recording;
     `moeinf trace MODEL --dataset NAME --out NAME.eam` makes others of real data sets, and
     `--others A.eam,B.eam` adds the shift from each to each)
The first half of the requests is the past (the EAMC); the second half is predicted. Parts that need
no past also run on the two real traces.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.policy.requests import RunningRequest
from moeinf.offload.policy.table import POLICIES
from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.routing.hint_model import RecordedHints
from moeinf.offload.routing.recording_file import recording_from_bytes
from moeinf.offload.routing.route_csv import read_route_csv
from moeinf.offload.routing.trace import Recording
from moeinf.offload.simulator.cases import Case, interleaved, run_case, shifted
from moeinf.offload.simulator.clock import TimeModel
from moeinf.offload.simulator.outcome import Outcome
from scripts import study_parts as parts
from scripts.study_policies import Way

TRACES = Path(__file__).parents[1] / "tests/data/traces"
CLOCK = TimeModel()
WIDTH = 2  # experts predicted, in units of K
MATCHES = 5
_PARTS = (
    "digits+spell+weekday+capital+dialogue+json+sort",
    "add+subtract+count+convert+upper+reverse",
)


def collection(recording: Recording, requests: Sequence[int], capacity: int | None) -> Eamc:
    """Return an EAMC with these requests; capacity None: the automatic capacity."""
    size = recording.shape.layers, recording.shape.experts
    eamc = Eamc.automatic(*size) if capacity is None else Eamc(capacity, *size)
    eams = recording.request_eams()
    for request in requests:
        eamc.add(eams[request].prefill, eams[request].decode)
    return eamc


def nearest(recording: Recording, requests: Sequence[int], eamc: Eamc) -> NDArray[np.float32]:
    """Return, per request, the cosine to the closest entry."""
    eams = recording.request_eams()
    near = [eamc.similarity(eams[r].prefill, eams[r].decode).max() for r in requests]
    return np.array(near)


def predictions(
    recording: Recording, requests: Sequence[int], eamc: Eamc
) -> dict[str, NDArray[np.float64]]:
    """Return, per predictor, the recall of WIDTH·K predicted experts by layer distance 1 … L-1."""
    shape = recording.shape
    most = WIDTH * shape.top_k
    found = {
        name: np.zeros((shape.layers, 2))
        for name in ("EAMC", "previous token", "prefill counts", "next-layer gate")
    }

    def count(name: str, distance: int, guess: NDArray[np.integer], chosen: set[int]) -> None:
        found[name][distance] += len(chosen.intersection(guess[:most].tolist())), len(chosen)

    for request in requests:
        running, last_use = RunningRequest(eamc), np.full((shape.layers, shape.experts), -1.0)
        prompt = np.zeros((shape.layers, shape.experts))
        for time, done in enumerate(recording.select([request]).passes):
            running.begin_pass(done.phase)
            if done.phase != "decode":
                prompt += done.eam(shape.experts, done.accepted)
            for layer, ids in enumerate(done.ids):
                running.routed(layer, ids)
                if done.phase != "decode":
                    continue
                predicted = running.predict(running.pair_similarity(), MATCHES, "decode")
                assert predicted is not None
                for later in range(layer + 1, shape.layers):
                    chosen, far = set(done.ids[later, 0].tolist()), later - layer
                    count("EAMC", far, (-predicted[later]).argsort(), chosen)
                    count("previous token", far, (-last_use[later]).argsort(), chosen)
                    count("prefill counts", far, (-prompt[later]).argsort(), chosen)
                if layer + 1 < shape.layers and done.hints is not None:
                    chosen = set(done.ids[layer + 1, 0].tolist())
                    count("next-layer gate", 1, done.hints[layer + 1, 0], chosen)
            for layer, ids in enumerate(done.ids):
                last_use[layer, ids[-1]] = time
    return {k: v[1:, 0] / np.maximum(v[1:, 1], 1) for k, v in found.items()}


def by_age(
    outcome: Outcome, name: str, ages: int = 16, early: Sequence[int] | None = None
) -> NDArray[np.float64]:
    """Return a figure's mean by the token's place in the answer; early: of these requests only."""
    sums = np.zeros((ages, 2))
    for token in outcome.tokens:
        if token.age < ages and (early is None or token.request in early):
            sums[token.age] += getattr(token, name), 1
    return sums[:, 0] / np.maximum(sums[:, 1], 1)


def by_request(outcome: Outcome, name: str) -> NDArray[np.float64]:
    """Return a figure's mean per request, in order."""
    sums: dict[int, list[float]] = {}
    for token in outcome.tokens:
        sums.setdefault(token.request, []).append(getattr(token, name))
    return np.array([np.mean(values) for values in sums.values()])


def sparsity(recording: Recording) -> tuple[float, float, float]:
    """Return three shares of a recording's decoding.

    Experts that a request uses at least once; experts that it uses twice or more; the entropy of
    use over all requests, relative to the maximum.
    """
    eams = [eam.decode for eam in recording.request_eams().values()]
    total = np.sum(eams, 0).astype(float)
    p = total / total.sum(1, keepdims=True)
    entropy = -(p * np.log(np.maximum(p, 1e-12))).sum(1).mean() / np.log(p.shape[1])
    used, reused = (np.mean([(eam >= n).mean() for eam in eams]) for n in (1, 2))
    return float(used), float(reused), float(entropy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recording", type=Path)
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--traces", type=Path, default=TRACES, help="a folder of route CSVs")
    parser.add_argument(
        "--others", type=lambda text: [Path(t) for t in text.split(",")], default=[]
    )
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SECTIONS))
    options = parser.parse_args()
    recording = recording_from_bytes(options.recording.read_bytes())
    traces = [read_route_csv(path) for path in sorted(options.traces.glob("*.csv.gz"))]
    for name in options.only:
        SECTIONS[name](recording, traces, options)


def past(recording: Recording, _: list[Recording], options: argparse.Namespace) -> None:
    """Print the value of past requests.

    Sparsity, prediction, warm and cold, capacity, conditions.
    """
    requests = recording.requests
    earlier, now = requests[: len(requests) // 2], requests[len(requests) // 2 :]
    second = recording.select(now)
    print(f"{len(requests)} requests, {recording.decode_tokens} decode tokens")
    used, reused, entropy = sparsity(recording)
    print(
        f"sparsity: a request decodes with {used:.1%} of the experts, {reused:.1%} twice or more;"
    )
    print(f"          over all requests the entropy of use is {entropy:.1%} of uniform")

    eamc = collection(recording, earlier, len(earlier))
    print(f"\nrecall of {WIDTH}K predicted experts by layer distance (precision: ÷ {WIDTH})")
    guesses = predictions(recording, now, eamc)
    for name, recalls in guesses.items():
        print(f"  {name:16}", *(f"{r:6.1%}" if r else "     -" for r in recalls))

    print(f"\nwarm against cold, adaptive at {options.share:.0%}, stall of the first 16 tokens, ms")
    curves = {}
    for name, memory in (("cold", None), ("warm", collection(recording, earlier, len(earlier)))):
        outcome = run_case(second, Case("adaptive", options.share), CLOCK, eamc=memory)
        curves[name] = by_age(outcome, "stall_seconds") * 1000
        early = by_age(outcome, "stall_seconds", early=now[:30]).mean() * 1000
        print(f"  {name}: mean {curves[name].mean():.4f}, of the first 30 requests {early:.4f}")

    print(f"\ncapacity of the EAMC at {options.share:.0%}: stall ms, hit rate, mean best cosine")
    for capacity in (1, 3, 10, 30, 100, 200, 300, None):
        memory = collection(recording, earlier, capacity)
        near, held = nearest(recording, now, memory).mean(), len(memory)
        warm, paper = (
            run_case(
                second,
                Case(policy, options.share),
                CLOCK,
                eamc=collection(recording, earlier, capacity),
            )
            for policy in ("adaptive", "eamc")
        )
        print(
            f"  {capacity or 'auto':>4} ({held:3}): adaptive {warm.stall_ms_per_token:.4f} "
            f"{warm.hit_rate:.1%}   eamc {paper.stall_ms_per_token:.4f} {paper.hit_rate:.1%}   "
            f"cosine {near:.3f}"
        )

    cells = recording.shape.layers * recording.shape.experts
    print("\ncosine of the rest to the closest of the first requests: mean, least, share at least")
    for name, entries, bound in (
        ("2LE", 2 * cells, 0.75),
        ("½·LE·ln LE", round(cells * np.log(cells) / 2), 0.98),
    ):
        if entries < len(requests):
            memory = collection(recording, requests[:entries], entries)
            near = nearest(recording, requests[entries:], memory)
            print(
                f"  {name} = {entries}: {near.mean():.3f}, {near.min():.3f}, "
                f"{(near >= bound).mean():.1%} at {bound}"
            )

    print(f"\nconditions, adaptive at {options.share:.0%}: stall ms, hit rate, of all requests")
    for name, users, late, hints in (
        ("as recorded", 1, False, None),
        ("routing told after its pass", 1, True, None),
        ("recorded hints", 1, False, RecordedHints()),
        ("2 users in turn", 2, False, None),
        ("4 users in turn", 4, False, None),
        ("8 users in turn", 8, False, None),
    ):
        mixed = interleaved(recording, users) if users > 1 else recording
        row = []
        for policy in ("lru", "adaptive"):
            found = run_case(mixed, Case(policy, options.share), CLOCK, hints, late)
            row.append(f"{policy} {found.stall_ms_per_token:.4f} {found.hit_rate:.1%}")
        print(f"  {name:28}", "   ".join(row))

    print("\nlookahead from a probability: stall ms, hit rate, share of it that was used")
    for sure in (0.1, 0.2, 0.3, 0.5, 0.7, 2.0):
        found = run_case(recording, Case("adaptive", options.share, knobs={"sure": sure}), CLOCK)
        right = found.prefetch_precision
        print(
            f"  {sure}: {found.stall_ms_per_token:.4f} {found.hit_rate:.1%}",
            "-" if right is None else f"{right:.0%} of {found.fetched_ahead}",
        )

    shift = shifted(recording, ",".join(_PARTS))
    before = len(shifted(recording, _PARTS[0]).requests)
    moved = by_request(run_case(shift, Case("adaptive", options.share), CLOCK), "stall_seconds")
    window = 16
    smooth = np.convolve(moved * 1000, np.ones(window) / window, "valid")
    settled = smooth[before + (len(moved) - before) // 2 :].mean()
    after = smooth[before:]
    back = int(np.argmax(after <= settled * 1.05))
    print(f"\nshift after request {before}: stall {smooth[:before].mean():.4f} ms before, peak")
    print(f"  {after.max():.4f}, within 5 % of its later mean {settled:.4f} after {back} requests")
    if options.pictures:
        draw(options.pictures, smooth, before, curves, guesses)


def policies(recording: Recording, traces: list[Recording], options: argparse.Namespace) -> None:
    """Print hit rates of all policies over shares."""
    for one in (recording, *traces):
        print(f"\nhit rate by share of experts, {one.name}")
        hits = parts.compared(one)
        print(f"  {'':26}", *(f"{share:6.0%}" for share in parts.SHARES))
        for name, rates in hits.items():
            print(f"  {name:26}", *(f"{rate:6.1%}" for rate in rates.values()))
        if one is recording and options.pictures:
            draw_policies(options.pictures, hits, recording)


def without(recording: Recording, traces: list[Recording], options: argparse.Namespace) -> None:
    """Print `adaptive` without each of its parts."""
    for one in (recording, *traces):
        print(f"\nwithout a part, {one.name} at {options.share:.0%}: hit rate, stall ms, reads")
        for name, outcome in parts.ablated(one, options.share).items():
            print(f"  {name:38} {_figures(outcome)}")


def knobs(recording: Recording, traces: list[Recording], options: argparse.Namespace) -> None:
    """Print the effect of every knob, one at a time."""
    for one in (recording, *traces):
        print(f"\nknobs, {one.name} at {options.share:.0%}, hints given: stall ms, hit rate")
        for policy, knob, found in parts.sensitivity(one, options.share):
            row = "  ".join(f"{v}: {o.stall_ms_per_token:.4f} {o.hit_rate:.1%}" for v, o in found)
            print(f"  {policy} {knob}: {row}")


def workloads(recording: Recording, traces: list[Recording], options: argparse.Namespace) -> None:
    """Print many requests together, changes of workload, long conversations and answers."""
    print("\nshare of experts used by so many requests together: at all, twice or more")
    for count, shares in parts.sparsity_of_many(recording, (1, 3, 10, 30, 100, 299)).items():
        print(f"  {count:4}:", *(f"{share:6.1%}" for share in shares))
    print("\nrequests until the stall is back within 5 % of its later mean: least, mean, most")
    others = [recording_from_bytes(path.read_bytes()) for path in options.others]
    found = parts.shifts(recording, options.share)
    if len(others) > 1:
        found["from data set to data set"] = parts.between(others, options.share)
    for name, counts in found.items():
        if counts:
            mean = np.mean(counts)
            print(f"  {name} ({len(counts)}): {min(counts)} - {mean:.1f} - {max(counts)}")
    print(f"\nlong conversations, at {options.share:.0%}: hit rate, stall ms, reads")
    for turns in (1, 5, 20, 100):
        longer = parts.as_conversations(recording, turns)
        for name in ("lru", "eamc", "adaptive"):
            outcome = parts.case(longer, options.share).run(Way(name, POLICIES[name]))
            print(f"  {turns:3} turns, {name:9} {_figures(outcome)}")
    for one in traces:
        print(f"\nhit rate by place in a long answer, 32 tokens at a time, {one.name}")
        for name in ("lru", "adaptive"):
            rates = parts.by_place(one, options.share, Way(name, POLICIES[name]), 32)
            print(f"  {name:9}", *(f"{rate:6.1%}" for rate in rates))


SECTIONS = {
    "past": past,
    "policies": policies,
    "without": without,
    "knobs": knobs,
    "workloads": workloads,
}


def _figures(outcome: Outcome) -> str:
    reads = (
        f"{outcome.hit_rate:6.1%} {outcome.stall_ms_per_token:8.4f} {outcome.reads_per_token:7.2f}"
    )
    right = outcome.prefetch_precision
    return reads if right is None else f"{reads}, {right:.0%} of what was read ahead was used"


def draw(
    folder: Path,
    shift: NDArray[np.float64],
    border: int,
    curves: dict[str, NDArray[np.float64]],
    guesses: dict[str, NDArray[np.float64]],
) -> None:
    """Draw study.png: recall by distance, warm against cold, recovery from a shift."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 3.6))
    for name, recalls in guesses.items():
        known = np.flatnonzero(recalls)
        left.plot(known + 1, 100 * recalls[known], "o-", ms=3, label=name)
    left.set(xlabel="layers ahead", ylabel="recall of 2K predicted, %", title="Prediction")
    for name, curve in curves.items():
        middle.plot(curve, "o-", ms=3, label=name)
    middle.set(xlabel="token of the answer", ylabel="stall, ms", title="EAMC warm or cold")
    right.plot(shift)
    right.axvline(border, color="k", ls=":", label="other tasks begin")
    right.set(xlabel="request (mean of 16)", ylabel="stall, ms per token", title="Workload shift")
    for axis in (left, middle, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / "study.png", dpi=100)


def draw_policies(folder: Path, hits: dict[str, dict[float, float]], recording: Recording) -> None:
    """Draw study-policies.png: hit rate by share and policy, and sparsity of many requests."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for name, rates in hits.items():
        style = "k--" if name == "belady" else "o-"
        values = [100 * rate for rate in rates.values()]
        left.plot([100 * s for s in rates], values, style, ms=3, label=name)
    left.set(
        xlabel="experts that fit, %", ylabel="hit rate, %", title=f"{recording.name}: policies"
    )
    together = parts.sparsity_of_many(recording, (1, 3, 10, 30, 100, 299))
    for place, name in enumerate(("used at all", "used twice or more")):
        shares = [100 * shares[place] for shares in together.values()]
        right.plot(list(together), shares, "o-", ms=3, label=name)
    right.set(xlabel="requests together", ylabel="experts, %", xscale="log", title="Sparsity")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / "study-policies.png", dpi=100)


if __name__ == "__main__":
    main()
