"""Show the results of `moeinf simulate`: a table per trace, and a picture.

The input is the document that --json prints.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from moeinf.cli.options import Usage
from moeinf.cli.output import Output

_Cell = Callable[[dict[str, Any]], str]


def _percent(name: str, digits: int = 0) -> _Cell:
    return lambda result: "-" if result[name] is None else f"{result[name]:.{digits}%}"


def _number(name: str, digits: int, unit: float = 1) -> _Cell:
    return lambda result: f"{result[name] / unit:.{digits}f}"


_CELLS: dict[str, _Cell] = {
    "DEVICE": _percent("device_capacity"),
    "MISS": lambda result: result["miss"],
    "HIT": _percent("hit_rate", 1),
    "ON-DEVICE": _percent("device_hit_rate", 1),
    "BY-CPU": _percent("cpu_share", 1),
    "BUS-MB/TOKEN": _number("bus_bytes_per_token", 1, 1e6),
    "READS/TOKEN": _number("reads_per_token", 1),
    "MB/TOKEN": _number("bytes_read_per_token", 1, 1e6),
    "INSERTIONS": _number("insertions_per_token", 1),
    "STALL-MS": _number("stall_ms_per_token", 2),
    "MS/TOKEN": _number("ms_per_token", 2),
    "FLOOR-MS": _number("floor_ms_per_token", 2),
    "PRECISION": _percent("prefetch_precision"),
    "RECALL": _percent("prefetch_recall"),
}
_COLUMNS = "HIT READS/TOKEN MB/TOKEN INSERTIONS STALL-MS PRECISION RECALL".split()
_WITH_DEVICE = (  # the other columns are only in --json, to fit the terminal
    "DEVICE MISS HIT ON-DEVICE BY-CPU BUS-MB/TOKEN MB/TOKEN STALL-MS MS/TOKEN FLOOR-MS".split()
)
_AXES = frozenset(("policy", "capacity", "device_capacity", "miss"))
_MEASURED = frozenset(
    "hit_rate reads_per_token bytes_read_per_token insertions_per_token stall_ms_per_token "
    "prefetch_precision prefetch_recall device_hit_rate host_hit_rate cpu_share "
    "bus_bytes_per_token ms_per_token floor_ms_per_token".split()
)


def _swept(result: dict[str, Any]) -> list[str]:
    return [f"{k}={v}" for k, v in result.items() if k not in _AXES and k not in _MEASURED]


def table(out: Output, document: dict[str, Any]) -> None:
    """Print one line per case of a trace."""
    out.line(
        f"{document['name']}: {document['layers']} layers x {document['experts']} experts, "
        f"{document['top_k']} per token; {document['tokens']} decode tokens"
    )
    with_device = "device_capacity" in document["results"][0]
    columns = _WITH_DEVICE if with_device else _COLUMNS
    rows = []
    for result in document["results"]:
        cliff = document["lru_cliff_capacity"]
        below = result["policy"] == "lru" and result["capacity"] < cliff and not with_device
        rows.append(
            [
                " ".join([result["policy"], *_swept(result)]),
                f"{result['capacity']:.0%}{' (below its cliff)' if below else ''}",
                *(_CELLS[column](result) for column in columns),
            ]
        )
    out.table(["POLICY", "CAPACITY", *columns], rows)
    out.line()


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

    size = (9, 3.2 * len(documents))
    figure, axes = pyplot.subplots(len(documents), 2, figsize=size, squeeze=False)
    for (left, right), document in zip(axes, documents, strict=True):
        lines: dict[str, list[dict[str, Any]]] = {}
        for result in document["results"]:
            words = [result["policy"], *_swept(result)]
            if "device_capacity" in result:
                words += [f"device {result['device_capacity']:.0%}", result["miss"]]
            lines.setdefault(" ".join(words), []).append(result)
        for label, results in lines.items():
            shares = [100 * result["capacity"] for result in results]
            left.plot(shares, [100 * r["hit_rate"] for r in results], "o-", ms=3, label=label)
            right.plot(shares, [r["stall_ms_per_token"] for r in results], "o-", ms=3)
        left.set(title=document["name"], xlabel="experts that fit, %", ylabel="hit rate, %")
        right.set(title="", xlabel="experts that fit, %", ylabel="stall, ms per token")
        left.legend(fontsize=7)
        for axis in (left, right):
            axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
