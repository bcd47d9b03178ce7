"""Draw heat maps of an EAMC: as characters for a terminal, as a picture for `--plot`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moeinf.errors import Unavailable

if TYPE_CHECKING:
    from moeinf.offload.routing.clustering import Summary

_SHADES = " ░▒▓█"
_MOST_ROWS = 48


class NoMatplotlib(Unavailable, ImportError):
    """A picture was requested, but matplotlib is not installed."""

    code = "no_matplotlib"
    hint = "`pip install matplotlib`"


def terminal_lines(heat: NDArray[np.float32], width: int) -> list[str]:
    """Return one line per layer (or per few layers); a darker cell means more frequent use.

    heat: [L, E]. The largest share of a line has the darkest cell. Lines have at most `width`
    characters.
    """
    room = max(8, width - 6)
    columns = min(room, heat.shape[1])
    rows = min(_MOST_ROWS, heat.shape[0])
    small = _pooled(_pooled(heat, rows).T, columns).T  # [rows, columns]
    layers = np.linspace(0, heat.shape[0], rows, endpoint=False).astype(int)
    peaks = np.maximum(small.max(axis=1, keepdims=True), 1e-12)
    steps = np.ceil(small / peaks * (len(_SHADES) - 1)).astype(int)
    return [
        f"L{layer:<4d} " + "".join(_SHADES[step] for step in row)
        for layer, row in zip(layers, steps, strict=True)
    ]


def draw(summary: Summary, title: str, path: Path) -> None:
    """Write a picture: expert use by layer, and the similarity of entries, ordered by group.

    Raises NoMatplotlib, OSError.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoMatplotlib("drawing needs matplotlib, which is not installed") from error
    figure = Figure(figsize=(9, 9), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    upper, lower = figure.subplots(2, 1)
    image = upper.imshow(summary.heat, aspect="auto", cmap="magma", interpolation="nearest")
    upper.set(xlabel="expert", ylabel="MoE layer", title="share of a layer's events")
    figure.colorbar(image, ax=upper)
    groups = summary.groups
    order = np.argsort(groups.of, kind="stable")
    image = lower.imshow(
        summary.similarity[np.ix_(order, order)], cmap="viridis", vmin=0, vmax=1, aspect="auto"
    )
    for border in np.cumsum(groups.sizes)[:-1]:
        lower.axhline(border - 0.5, color="white", linewidth=0.6)
        lower.axvline(border - 0.5, color="white", linewidth=0.6)
    count = len(groups.sizes)
    lower.set(title=f"cosine of {summary.entries} requests, in {count} groups")
    figure.colorbar(image, ax=lower)
    figure.savefig(path, dpi=120)


def _pooled(matrix: NDArray[np.float32], rows: int) -> NDArray[np.float32]:
    """Reduce [R, C] to [rows, C] by the maximum of neighbouring rows."""
    parts = np.array_split(matrix, rows, axis=0)
    return np.stack([part.max(axis=0) for part in parts])
