"""Read the trace files and the `--hints` option of the command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeinf.cli.errors import Usage
from moeinf.runtime.files.regular import open_regular, read_regular

if TYPE_CHECKING:
    from moeinf.offload.routing.hint_model import HintSource
    from moeinf.offload.routing.trace import Recording

Hints = Annotated[
    str,
    typer.Option(
        metavar="none|recorded|R[,P]",
        help="Next-layer hints in a replay: a gate of recall R and precision P (or R).",
    ),
]


def read_trace(path: Path) -> Recording:
    """Read an .eam recording, a .csv[.gz] route trace or an .npz file of requests.

    Raises Usage, BadContainer, BadRouteTrace.
    """
    from moeinf.offload.format.array_file import MAGIC, BadContainer
    from moeinf.offload.routing.recording_file import recording_from_bytes
    from moeinf.offload.routing.requests_file import read_requests
    from moeinf.offload.routing.route_csv import read_route_csv

    if not path.is_file():
        raise Usage(f"{path} is not a file")
    if path.name.removesuffix(".gz").endswith(".csv"):
        return read_route_csv(path)
    if path.name.endswith(".npz"):
        return read_requests(path).recording()
    with os.fdopen(open_regular(path), "rb") as file:
        known = file.read(len(MAGIC)) == MAGIC
    if not known:  # a file of gigabytes is not read
        raise BadContainer(f"{path}: not a recording file of moeinf")
    try:
        return recording_from_bytes(read_regular(path))
    except BadContainer as error:
        raise BadContainer(f"{path}: {error}") from error


def hint_source(text: str, recording: Recording, seed: int = 0) -> HintSource | None:
    """Return the source of hints that `--hints` names; None for `none`. Raises Usage."""
    from moeinf.offload.routing.hint_model import ModelledHints, RecordedHints

    if text == "none":
        return None
    if text == "recorded":
        if not any(done.hints is not None for done in recording.passes):
            raise Usage(f"{recording.name} was recorded without hints")
        return RecordedHints()
    try:
        recall, _, precision = text.partition(",")
        return ModelledHints(
            float(recall), float(precision or recall), recording.shape.experts, seed
        )
    except ValueError as error:
        raise Usage(
            f"--hints: {text!r} is invalid (expected none, recorded, or recall[,precision] up to 1)"
        ) from error
