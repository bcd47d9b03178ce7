"""Show the results of `moeinf simulate`: a table and a sentence per trace, and a picture.

The input is the document that --json prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moeinf.cli.errors import Usage
from moeinf.cli.output import Output
from moeinf.cli.views import columns as cells
from moeinf.cli.views.columns import Column, Result, number, percent, print_table

_BELADY = "belady"
_OPTIMAL = "optimal (belady)"  # its name in pictures
_AXES = ("policy", "capacity", "device_capacity", "miss")
_MEASURED = frozenset(
    "hit_rate reads_per_token bytes_read_per_token insertions_per_token stall_ms_per_token "
    "prefetch_precision prefetch_recall device_hit_rate host_hit_rate cpu_share "
    "bus_bytes_per_token ms_per_token floor_ms_per_token".split()
)


def _swept(result: Result) -> list[str]:
    return [f"{k}={v}" for k, v in result.items() if k not in _AXES and k not in _MEASURED]


_CASE = [
    Column("POLICY", lambda result: _name(result)),
    Column("CAPACITY", percent("capacity"), "share of all experts that fit in RAM"),
]
_HIT = Column("HIT", percent("hit_rate", 1), "experts found in memory while decoding")
_MB = Column("MB/TOKEN", number("bytes_read_per_token", 1, 1e6), "read from the drive per token")
_STALL = Column("STALL-MS", number("stall_ms_per_token", 2), "modelled wait for reads, per token")
_COLUMNS = [
    *_CASE,
    _HIT,
    Column("READS/TOKEN", number("reads_per_token", 1), "experts read from the drive per token"),
    _MB,
    _STALL,
]
_MORE = [
    Column("INSERTIONS", number("insertions_per_token", 1), "experts that enter memory per token"),
    Column("PRECISION", percent("prefetch_precision"), "share of prefetched experts that are used"),
    Column("RECALL", percent("prefetch_recall"), "share of experts needed that were prefetched"),
]
_DEVICE_CASE = [
    *_CASE,
    Column("DEVICE", percent("device_capacity"), "share of all experts in device memory"),
    Column("MISS", lambda result: str(result["miss"]), "use of an expert that the device lacks"),
]
_DEVICE_COLUMNS = [
    *_DEVICE_CASE,
    _HIT,
    Column("MS/TOKEN", number("ms_per_token", 2), "modelled time per token"),
]
_DEVICE_MORE = [
    Column("ON-DEVICE", percent("device_hit_rate", 1), "experts found in device memory"),
    Column("BY-CPU", percent("cpu_share", 1), "experts computed by the CPU"),
    Column("BUS-MB/TOKEN", number("bus_bytes_per_token", 1, 1e6), "copied over the bus per token"),
    _MB,
    _STALL,
    Column("FLOOR-MS", number("floor_ms_per_token", 2), "least modelled time per token"),
]


def columns(with_device: bool, verbose: bool) -> list[Column]:
    """Return the columns of the tables: six, or all of them."""
    if with_device:
        return _DEVICE_COLUMNS + (_DEVICE_MORE if verbose else [])
    return _COLUMNS + (_MORE if verbose else [])


def legend(shown: Sequence[Column], policies: Sequence[str]) -> list[tuple[str, str]]:
    """Return the meaning of the columns, and of a policy that no real cache can have."""
    known = [(_BELADY, "the optimal policy, which knows the future")]
    return cells.legend(shown) + (known if _BELADY in policies else [])


def table(out: Output, document: dict[str, Any], shown: Sequence[Column]) -> None:
    """Print a table with one line per case of a trace, and a sentence that reads it."""
    out.prose(
        f"{document['name']}: {document['layers']} layers x {document['experts']} experts, "
        f"{document['top_k']} per token; {document['tokens']} decode tokens"
    )
    results, cliff = document["results"], document["lru_cliff_capacity"]
    with_device = "device_capacity" in results[0]
    print_table(out, shown, results, keys=len(_DEVICE_CASE if with_device else _CASE))
    if not document["tokens"]:
        out.explain("The recording has no decode tokens, so there is nothing to count.")
    elif with_device:
        out.explain(_device_reading(results))
    else:
        below = any(r["policy"] == "lru" and r["capacity"] < cliff for r in results)
        words = f"{cliff:.1%} capacity; with less, a token uses more experts than fit"
        out.explain(reading(results), [("lru's cliff", words)] if below else [])
    out.line()


def reading(results: Sequence[Result]) -> str:
    """Return a sentence on the policy that reads least: the reads that it saves.

    The comparison is with lru, or else with the policy that reads most. belady, which knows the
    future, is never the best one.
    """
    cases: dict[str, list[Result]] = {}
    for result in results:
        cases.setdefault(_name(result), []).append(result)
    ideal = next((name for name in cases if cases[name][0]["policy"] == _BELADY), None)
    real = [name for name in cases if cases[name][0]["policy"] != _BELADY] or list(cases)
    reads = {name: sum(result["reads_per_token"] for result in cases[name]) for name in cases}
    best, most = min(real, key=reads.__getitem__), max(real, key=reads.__getitem__)
    base = next((name for name in real if cases[name][0]["policy"] == "lru"), most)
    if reads[base] == reads[best]:
        hits = _range([result["hit_rate"] for result in cases[best]])
        text = f"{best} finds {hits} of the experts in memory"
    else:
        text = f"{best} saves {_saved(cases[best], cases[base])} of the reads of {base}"
    if ideal is None or ideal == best or not reads[base]:
        return f"{text}."
    return f"{text}; the optimum saves {_saved(cases[ideal], cases[base])}."


def _saved(results: Sequence[Result], base: Sequence[Result]) -> str:
    """Return the share of reads saved, over the capacities at which there are reads."""
    pairs = [
        (one["reads_per_token"], other["reads_per_token"])
        for one, other in zip(results, base, strict=True)
    ]
    return _range([1 - one / other for one, other in pairs if other])


def _range(shares: Sequence[float]) -> str:
    least, most = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return least if least == most else f"{least} to {most}"


def _device_reading(results: Sequence[Result]) -> str:
    best = min(results, key=lambda result: float(result["ms_per_token"]))
    times = best["ms_per_token"] / best["floor_ms_per_token"]
    return (
        f"Fastest: {_name(best)}, {best['capacity']:.0%} in RAM, {best['device_capacity']:.0%} on "
        f"the device, --miss {best['miss']}; {times:.2f} times its floor."
    )


def _name(result: Result) -> str:
    return " ".join([result["policy"], *_swept(result)])


def picture(documents: list[dict[str, Any]], path: Path) -> None:
    """Write plots of hit rate and stall over capacity: a line per policy, a row per trace.

    Raises Usage without matplotlib.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise Usage("--plot needs matplotlib: pip install 'moeinf[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(documents),
        2,
        figsize=(8, 3 * len(documents) + 0.4),
        squeeze=False,
        layout="constrained",
    )
    for (left, right), document in zip(axes, documents, strict=True):
        lines: dict[str, list[Result]] = {}
        for result in document["results"]:
            words = [_name(result)]
            if "device_capacity" in result:
                words += [f"device {result['device_capacity']:.0%}", result["miss"]]
            lines.setdefault(" ".join(words), []).append(result)
        for label, results in lines.items():
            shares = [100 * result["capacity"] for result in results]
            style: dict[str, Any] = {"marker": "o", "ms": 3, "label": label}
            if results[0]["policy"] == _BELADY:
                style |= {"label": label.replace(_BELADY, _OPTIMAL), "color": "black", "ls": "--"}
            left.plot(shares, [100 * r["hit_rate"] for r in results], **style)
            right.plot(shares, [r["stall_ms_per_token"] for r in results], **style)
        left.set(title=document["name"], xlabel="experts that fit, %", ylabel="hit rate, %")
        right.set(title="", xlabel="experts that fit, %", ylabel="stall, ms per token")
        for axis in (left, right):
            axis.grid(alpha=0.3)
    handles, labels = axes[0][0].get_legend_handles_labels()
    inches = [0.6 + 0.08 * len(label) for label in labels]
    beside = len(labels) if sum(inches) < 8 else max(1, int(8 / max(inches)))
    figure.legend(handles, labels, loc="outside upper center", ncols=beside)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
