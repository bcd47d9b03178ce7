"""The child process of memory_curve.py: replay a recording with several sizes of memory.

    python -m moeinf.runtime.jobs.curve_worker      requests on standard input, see limited_process

It runs at the lowest priority, because models decode meanwhile.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from moeinf.offload.format.array_file import BadContainer
from moeinf.offload.routing.recording_file import recording_from_bytes
from moeinf.offload.simulator.cases import Case, run_case
from moeinf.offload.simulator.clock import TimeModel
from moeinf.offload.simulator.outcome import recording_document
from moeinf.runtime.limited_process import serve

_ADDRESS_SPACE_BYTES = 4 << 30  # libraries reserve much of it
_NICE = 19


def replayed(request: dict[str, Any]) -> dict[str, Any]:
    """Return the document of `moeinf simulate --json` for one recording.

    request: its path, policies and shares of all experts. A damaged one gives only `damaged`.
    """
    try:
        recording = recording_from_bytes(Path(request["path"]).read_bytes())
    except BadContainer as error:
        return {"damaged": str(error)}
    results = []
    for share in request["shares"]:
        for policy in request["policies"]:
            outcome = run_case(recording, Case(policy, share), TimeModel(request["ram_over_link"]))
            results.append({"policy": policy, "capacity": share, **outcome.document()})
    return recording_document(recording, results)


if __name__ == "__main__":
    os.nice(_NICE)
    serve(replayed, _ADDRESS_SPACE_BYTES)
