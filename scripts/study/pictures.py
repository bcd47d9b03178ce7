"""Draw docs/study.png: policies, capacity of the EAMC, users, recall and shifts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

_STYLE = {
    "belady": "k--",
    "learned": "C4o-",
    "adaptive": "C3o-",
    "eamc": "C0o-",
    "lru": "C1o-",
    "lfu": "C2o-",
}


def draw(curves: dict[str, Any], files: list[Path], out: Path) -> None:
    """Draw one row of panels for each file; curves: those of Bench."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(len(files), 4, figsize=(15, 3.4 * len(files)), squeeze=False)
    for axes, path in zip(rows, files, strict=True):
        name = path.stem
        panels = (
            ("policies", "experts that fit, %", 100),
            ("capacity", "entries of the EAMC", 1),
            ("users", "users in one pass", 1),
        )
        for axis, (what, label, scale) in zip(axes, panels, strict=False):
            for policy, points in curves.get(f"{what} {name}", {}).items():
                x, y = np.array(points).T
                axis.plot(scale * x, 100 * y, _STYLE[policy], ms=3, label=policy)
            axis.set(xlabel=label, ylabel="decode hit rate, %", title=f"{name}: {what}")
            if what == "capacity":
                axis.set_xscale("log")
        _shift(axes[3], name, curves)
        for axis in axes:
            axis.grid(alpha=0.3)
            if axis.get_legend_handles_labels()[0]:
                axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(out, dpi=80)


def _shift(axis: Any, name: str, curves: dict[str, Any]) -> None:
    window = 5
    lines, borders = curves.get(f"shift {name}", ([], []))
    for policy, rates in lines:
        if len(rates) >= window:
            smooth = np.convolve(rates, np.ones(window) / window, "valid")
            axis.plot(
                np.arange(len(smooth)) + window - 1, 100 * smooth, _STYLE[policy][:2], label=policy
            )
    for border in borders:
        axis.axvline(border, color="k", ls=":")
    axis.set(xlabel="request (mean of 5)", ylabel="decode hit rate, %", title=f"{name}: shift")
