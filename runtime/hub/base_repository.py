"""Ask the repository that a GGUF file was made from for its tokenizer, and for a few rows.

Its files are untrusted like those of any pull. Whatever goes wrong there leaves the file's own
tokenizer, after a minute of requests at most: only rows that differ refuse a pull.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import constants, get_token

from moeinf.errors import reason
from moeinf.runtime.checkpoints.checkpoint import CONFIG, BadCheckpoint, Checkpoint, parse_object
from moeinf.runtime.checkpoints.row_samples import Read
from moeinf.runtime.gguf.base_model import base_names, misfit
from moeinf.runtime.hub.base_weights import compare_rows
from moeinf.runtime.hub.download import DownloadFailed, Fetcher, fetch_small
from moeinf.runtime.hub.listing import (
    Repository,
    RepositoryError,
    in_top_folder,
    is_offline,
    look_up_all,
)
from moeinf.runtime.hub.patience import Patience
from moeinf.runtime.library.sources import CONVERTED_FILES, KEPT_FILES, MAX_KEPT_BYTES
from moeinf.runtime.text.tokenizer import TOKENIZER
from moeinf.runtime.text.tokenizer_trial import Trial, convert

_SECONDS = 60.0  # for all requests
_STALL_SECONDS = 5.0
_TRIAL_SECONDS = 20.0
_MOST_NAMES = 2
_GENERATION, _ABOUT, _TEMPLATE = (
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
Note = Callable[[str], None]


class _Deadline(threading.Event):
    """An event that counts as set after some seconds, or once `other` is set."""

    def __init__(self, seconds: float, other: threading.Event | None) -> None:
        super().__init__()
        self._end, self._other = time.monotonic() + seconds, other

    def is_set(self) -> bool:
        gone = self._other is not None and self._other.is_set()
        return super().is_set() or gone or time.monotonic() > self._end


@dataclass(frozen=True)
class BaseRepository:
    """The repositories that a GGUF file may have been made from, the likeliest first."""

    names: list[str]
    note: Note
    token: str | None = None
    stop: threading.Event | None = None

    def settle(self, checkpoint: Checkpoint, read: Read) -> tuple[Checkpoint, str | None]:
        """Return the checkpoint with the base repository's tokenizer, and `ORG/NAME@COMMIT`.

        read: returns bytes of the GGUF file. Without a repository that can be reached and has the
        file's vocabulary, return the checkpoint as it is, and None. A note says which tokenizer it
        is. Raises OtherWeights.
        """
        why, stop = "", _Deadline(_SECONDS, self.stop)
        for name in self.names[:_MOST_NAMES]:
            try:
                found, fetcher = self._look_up(name, None, stop)
                compared = compare_rows(checkpoint, read, found, fetcher)
                if compared is None:
                    why = f"{name} has other weights"
                    continue
                made = _tokenizer_files(checkpoint, found, fetcher)
            except (BadCheckpoint, RepositoryError, DownloadFailed) as error:
                why = f"{name}: {reason(error)}"
                continue
            agrees = f"; {compared} kinds of its tensors agree with the file" if compared else ""
            self.note(f"tokenizer and chat template are those of {name}{agrees}")
            return replace(checkpoint, made=made), f"{name}@{found.commit}"
        if why:
            self.note(f"tokenizer and chat template are the GGUF file's ({why[:300]})")
        return checkpoint, None

    def again(self, checkpoint: Checkpoint, settled: str) -> Checkpoint:
        """Return the checkpoint with the tokenizer of a settled `ORG/NAME@COMMIT`, for a repair.

        Raises BadCheckpoint, RepositoryError, DownloadFailed.
        """
        name, _, commit = settled.partition("@")
        found, fetcher = self._look_up(name, commit, _Deadline(_SECONDS, self.stop))
        return replace(checkpoint, made=_tokenizer_files(checkpoint, found, fetcher))

    def _look_up(
        self, name: str, commit: str | None, stop: threading.Event
    ) -> tuple[Repository, Fetcher]:
        found = look_up_all(name, commit, self.token, "model", stop, _STALL_SECONDS)
        patience = Patience(attempts=2, stall_seconds=_STALL_SECONDS, first_wait_seconds=0.2)
        token = self.token or get_token()
        return in_top_folder(found), Fetcher(constants.ENDPOINT, token, patience, stop)


def base_of(
    checkpoint: Checkpoint,
    card: str | None,
    note: Note,
    token: str | None = None,
    stop: threading.Event | None = None,
) -> BaseRepository | None:
    """Return the repositories that a GGUF checkpoint names, or None if it names none or offline.

    card: see base_names.
    """
    names = base_names(checkpoint.metadata, card)
    return BaseRepository(names, note, token, stop) if names and not is_offline() else None


def _tokenizer_files(
    checkpoint: Checkpoint, found: Repository, fetcher: Fetcher
) -> Mapping[str, bytes]:
    """Return the small files of a model: its config, and the tokenizer of a repository.

    Raises BadCheckpoint if the vocabulary is not the file's, DownloadFailed.
    """
    assert checkpoint.made is not None
    files: dict[str, bytes] = {}

    def read(name: str) -> bytes | None:
        file = found.files.get(name)
        if name not in files and file is not None and file.size_bytes <= MAX_KEPT_BYTES:
            files[name] = fetch_small(fetcher, file)
        return files.get(name)

    for name in KEPT_FILES:
        data = read(name) if name != CONFIG else None
        if data is not None and name.endswith(".json"):
            parse_object(data, Path(found.name) / name)
    made = convert(read) if TOKENIZER not in files else _tried(files[TOKENIZER])
    if made is None:
        raise BadCheckpoint(f"{found.name} has no {TOKENIZER}")
    if why := misfit(parse_object(made, Path(found.name) / TOKENIZER), checkpoint.metadata):
        raise BadCheckpoint(f"{found.name} has another vocabulary: {why}")
    kept = {name: data for name, data in files.items() if name not in CONVERTED_FILES}
    return _completed(checkpoint.made, {**kept, TOKENIZER: made})


def _tried(data: bytes) -> bytes:
    """Return a tokenizer.json that loads and works in time. Raises BadCheckpoint."""
    with TemporaryDirectory(prefix="moeinf-tokenizer-") as folder, Trial(_TRIAL_SECONDS) as trial:
        path = Path(folder) / TOKENIZER
        path.write_bytes(data)
        trial.of_file(path)
    return data


def _completed(ours: Mapping[str, bytes], theirs: dict[str, bytes]) -> dict[str, bytes]:
    """Return `theirs` with the file's config, and with the template and ends that only it has."""
    about = json.loads(theirs.get(_ABOUT, b"{}"))
    own = json.loads(ours[_ABOUT]).get("chat_template")
    if own is not None and _TEMPLATE not in theirs and not about.get("chat_template"):
        theirs[_TEMPLATE] = own.encode("utf-8", "replace")
    before = json.loads(theirs.get(_GENERATION, b"{}"))
    merged = {**before, **json.loads(ours[_GENERATION])}
    merged["eos_token_id"] = sorted({*_ids(before), *_ids(merged)})
    return {**theirs, CONFIG: ours[CONFIG], _GENERATION: json.dumps(merged).encode()}


def _ids(about: Mapping[str, Any]) -> Iterator[int]:
    said = about.get("eos_token_id")
    yield from (end for end in (said if isinstance(said, list) else [said]) if type(end) is int)
