"""Keep the newest recording of a model: $MOEINF_HOME/state/<name>/<tag>/recording.eam.

`moeinf trace` writes it. The server replays it to show what other memory gives. It has the experts
of each token, without weights and hints, in at most MOST_IDS numbers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from moeinf.offload.routing.recording_file import recording_to_bytes
from moeinf.offload.routing.trace import Recording
from moeinf.runtime.config import Settings
from moeinf.runtime.files.atomic import make_folder_durably, write_bytes_durably
from moeinf.runtime.names import ModelName

MOST_IDS = 1 << 20  # T·L·K: 2,700 tokens of Qwen3-30B-A3B, which replay in some minutes
MOST_BYTES = 16 << 20  # of the file: ids take 2 MiB, and each row has its request and its pass
_FILE = "recording.eam"


def recording_path(settings: Settings, model: ModelName) -> Path:
    """Return the file of a model's recording. It need not exist."""
    return settings.state_of(model) / _FILE


def drop_oldest(recording: Recording, most: int = MOST_IDS) -> None:
    """Delete the oldest requests of a recording until it has at most `most` ids.

    The requests ran one after the other. The newest stays in any case.
    """
    ends, sizes = recording.last_pass(), [done.ids.size for done in recording.passes]
    over, start = sum(sizes) - most, 0
    for request in recording.requests[:-1]:
        if over <= 0:
            break
        end = ends[request] + 1
        over -= sum(sizes[start:end])
        start = end
        recording.labels.pop(request, None)
    del recording.passes[:start]


def keep(recording: Recording, path: Path) -> None:
    """Write the newest part of a recording in place of an earlier one. Raises OSError."""
    kept = replace(recording, passes=list(recording.passes), labels=dict(recording.labels))
    drop_oldest(kept)
    kept.passes = [replace(done, weights=None, hints=None) for done in kept.passes]
    make_folder_durably(path.parent)
    write_bytes_durably(path, recording_to_bytes(kept), mode=0o600)
