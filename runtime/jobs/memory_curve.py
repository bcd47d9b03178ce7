"""Compute the hit rate over memory of a model from its own recording, as `moeinf simulate` does.

A child process replays (curve_worker.py). Results are kept until the recording changes.
"""

from __future__ import annotations

import datetime
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from moeinf.errors import NotFound, Unavailable
from moeinf.runtime.config import Settings
from moeinf.runtime.eamc.kept_recording import MOST_BYTES, recording_path
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.limited_process import LimitedProcess, LimitExceeded, Refused

SHARES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75)  # of all experts
BOUND = "belady"  # no policy can hit more often
BASELINE = "lru"
RAM_OVER_LINK = 8.0  # the default of `moeinf simulate`; hit rates do not depend on it
SECONDS = 600.0  # for all replays, while decoding takes the cores
_LOOK_S = 0.2  # between two checks that the answer is still wanted
_MOST_KEPT = 16

Key = tuple[str, int, int, str]  # path, modification time, size, policy


class NotRecorded(NotFound, LookupError):
    """No recording exists that could be replayed."""

    code = "not_recorded"

    def __init__(self, model: str) -> None:
        super().__init__(f"{model} has no recording")
        self.hint = self.serve_hint = f"`moeinf trace {model} --dataset demo`, which records one"


class CannotReplay(Unavailable, RuntimeError):
    """A recording is damaged, or its replays take too much time or memory."""

    code = "cannot_replay"

    def __init__(self, model: str, why: str) -> None:
        super().__init__(f"the recording of {model} cannot be replayed: {why}")
        self.hint = self.serve_hint = f"`moeinf trace {model} --dataset demo`, which replaces it"


class MemoryCurves:
    """The curves of the models of one home. Thread-safe if one thread computes at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._library = settings, Library(settings)
        self._kept: OrderedDict[Key, dict[str, Any]] = OrderedDict()

    def curve(self, model: str, policy: str, check: Callable[[], None]) -> dict[str, Any]:
        """Return the curve of a policy, between BASELINE and BOUND.

        check: called while this waits; it may raise. Raises NoSuchModel, NotRecorded, CannotReplay.
        """
        manifest, _ = self._library.read(model)
        path = recording_path(self._settings, manifest.model)
        try:
            about = path.stat()
        except FileNotFoundError as error:
            raise NotRecorded(str(manifest.model)) from error
        if about.st_size > MOST_BYTES:
            raise CannotReplay(str(manifest.model), f"it has more than {MOST_BYTES >> 20} MiB")
        key = str(path), about.st_mtime_ns, about.st_size, policy
        found = self._kept.get(key) or self._replay(manifest, key, check)
        self._kept[key] = found
        self._kept.move_to_end(key)
        while len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return found

    def _replay(self, manifest: Manifest, key: Key, check: Callable[[], None]) -> dict[str, Any]:
        path, modified_ns, _, policy = key
        request = {
            "path": path,
            "policies": list(dict.fromkeys((policy, BASELINE, BOUND))),
            "shares": SHARES,
            "ram_over_link": RAM_OVER_LINK,
        }
        process = LimitedProcess("moeinf.runtime.jobs.curve_worker")
        try:
            process.start(request, SECONDS)
            while not process.done(_LOOK_S):
                check()
            trace = process.result()
            if "damaged" in trace:
                raise CannotReplay(str(manifest.model), trace["damaged"])
        except (Refused, LimitExceeded) as error:
            raise CannotReplay(str(manifest.model), str(error)) from error
        finally:
            process.close()
        recorded = datetime.datetime.fromtimestamp(modified_ns / 1e9, datetime.UTC)
        return {
            "model": str(manifest.model),
            "policy": policy,
            "recorded_at": recorded.isoformat(timespec="seconds").replace("+00:00", "Z"),
            "experts_bytes": manifest.slots.max_bytes,
            "trace": trace,
        }
