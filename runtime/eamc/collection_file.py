"""Store the EAMC of a model on disk: $MOEINF_HOME/state/<name>/<tag>/eamc.log.

The log holds rEAMs in the order in which requests ended. Adding them to an empty EAMC one by one,
in this order, gives the EAMC. So processes need to agree only on that order. To shrink the log, it
is rewritten with the entries that the EAMC holds.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeinf.errors import UnusableInput
from moeinf.offload.format.array_file import BadContainer
from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.routing.trace import RequestEam
from moeinf.runtime.config import Settings
from moeinf.runtime.eamc.append_log import RecordLog
from moeinf.runtime.eamc.kept_recording import recording_path
from moeinf.runtime.files.atomic import write_bytes_durably
from moeinf.runtime.files.regular import open_regular
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import Manifest

VERSION = 1
MAX_FILE_BYTES = 256 << 20
MAX_ENTRIES = 1 << 14
_LOG = "eamc.log"
_SIZES = struct.Struct("<II")  # layers, experts
_DEFLATE_LEVEL = 1
_SMALL = 64  # do not rewrite a log of fewer entries


class _Header(msgspec.Struct):
    """The first record of a log."""

    kind: str
    version: int
    layers: int
    experts: int


class ForeignEamc(UnusableInput, ValueError):
    """A file is not an EAMC, or is the EAMC of a model of another shape."""

    code = "foreign_eamc"
    hint = "`moeinf eamc export MODEL FILE`, which writes one that fits"


def recorded_use(settings: Settings, name: str) -> list[NDArray[np.integer[Any]]]:
    """Return how often requests chose each expert, [layers, experts] per tag of the model."""
    found = []
    for entry in Library(settings).installed():
        if entry.name.name == name and entry.manifest is not None:
            past = EamcState(settings, entry.manifest, lambda _: None).load().entries()
            if past:
                found.append(np.sum([each.prefill + each.decode for each in past], axis=0))
    return found


class EamcState:
    """The EAMC of a model, shared by all processes that run the model.

    note: receives one line about each unreadable log and where it was moved. A capacity of None is
    automatic (offload/routing/eamc.py).
    """

    def __init__(
        self,
        settings: Settings,
        manifest: Manifest,
        note: Callable[[str], None],
        capacity: int | None = None,
    ) -> None:
        self._capacity = capacity
        self._live: Eamc | None = None
        self._shape = (manifest.layers, manifest.experts)
        layers, experts = self._shape
        header = msgspec.json.encode(_Header("eamc", VERSION, layers, experts))
        folder = settings.state_of(manifest.model)
        self.recording = recording_path(settings, manifest.model)
        self._problem = partial(_problem, self._shape)  # not a method: the log must not hold this
        self._log = RecordLog(folder, _LOG, header, self._problem, note)

    @property
    def capacity(self) -> int:
        """The maximum number of entries."""
        return self._empty().capacity

    def live(self) -> Eamc:
        """Return this process's collection for predictions; `append` adds to it. Raises OSError.

        This process does not see what other processes append after the first call.
        """
        if self._live is None:
            self._live = self.load()
        return self._live

    def append(self, entry: RequestEam) -> None:
        """Append a finished request's rEAMs durably. Raises OSError."""
        if self._live is not None:
            self._live.add(entry.prefill, entry.decode)
        held = self.capacity if self._live is None else len(self._live)
        if self._log.append(_encode(entry)) > 2 * max(held, min(_SMALL, self.capacity)):
            self._log.rewrite(lambda records: self._encoded(self._replay(records)))

    def extend(self, entries: Iterable[RequestEam]) -> int:
        """Add entries; return the number of entries that the EAMC then holds. Raises OSError."""

        def grow(records: list[bytes]) -> list[bytes]:
            eamc = self._replay(records)
            for entry in entries:
                eamc.add(entry.prefill, entry.decode)
            return self._encoded(eamc)

        return self._log.rewrite(grow)

    def load(self) -> Eamc:
        """Read the collection from disk. Raises OSError."""
        return self._replay(self._log.read())

    def clear(self) -> int:
        """Delete all entries and the recording; return how many entries there were."""
        self.recording.unlink(missing_ok=True)
        held = len(self.load())
        if held:
            self._log.rewrite(lambda _: [])
        return held

    def _replay(self, records: list[bytes]) -> Eamc:
        eamc = self._empty()
        for record in records:
            entry = _decode(record, *self._shape)
            if entry is not None:  # the CRC is valid, so only a bug writes an invalid entry
                eamc.add(entry.prefill, entry.decode)
        return eamc

    def _empty(self) -> Eamc:
        if self._capacity is None:
            return Eamc.automatic(*self._shape)
        return Eamc(self._capacity, *self._shape)

    def _encoded(self, eamc: Eamc) -> list[bytes]:
        return [_encode(entry) for entry in eamc.entries()]


def _problem(shape: tuple[int, int], header: bytes) -> str | None:
    """Return why a log with this header is not one of layers and experts of the shape, or None."""
    try:
        found = _HEADER.decode(header)
    except (ValueError, RecursionError):
        return "is not an EAMC"
    if (found.kind, found.version) != ("eamc", VERSION):
        return f"is of version {found.version}, not {VERSION}"
    if (found.layers, found.experts) != shape:
        return (
            f"is of a model of {found.layers} layers of {found.experts} experts, "
            f"not {shape[0]} of {shape[1]}"
        )
    return None


def export_eamc(eamc: Eamc, path: Path) -> None:
    """Write an EAMC to one file, atomically. Raises OSError."""
    write_bytes_durably(path, eamc.to_bytes(), mode=0o600)


def import_eamc(path: Path, manifest: Manifest) -> Eamc:
    """Read a file that `export_eamc` wrote. Raises ForeignEamc if it is not one, OSError."""
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ForeignEamc(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB: too large for an EAMC")
    shape = (manifest.layers, manifest.experts)
    try:
        most = MAX_ENTRIES * shape[0] * shape[1] * 8
        eamc = Eamc.from_bytes(data, most_bytes=most)
    except BadContainer as error:
        raise ForeignEamc(f"{path} is not an EAMC: {error}") from error
    if (eamc.layers, eamc.experts) != shape:
        raise ForeignEamc(
            f"{path} is of a model of {eamc.layers} layers of {eamc.experts} experts; "
            f"{manifest.model} has {shape[0]} of {shape[1]}"
        )
    return eamc


def _encode(entry: RequestEam) -> bytes:
    """Return u32 L and E, then prefill and decode [L, E] as u32 LE, deflated: most counts are 0."""
    counts = np.stack([entry.prefill, entry.decode]).astype("<u4")
    return _SIZES.pack(*counts.shape[1:]) + zlib.compress(counts.tobytes(), _DEFLATE_LEVEL)


def _decode(record: bytes, layers: int, experts: int) -> RequestEam | None:
    """Decode an entry; return None if it is invalid. Inflates at most the size of an entry."""
    if len(record) < _SIZES.size or _SIZES.unpack_from(record) != (layers, experts):
        return None
    expected = 8 * layers * experts
    try:
        raw = zlib.decompressobj().decompress(record[_SIZES.size :], expected + 1)
    except zlib.error:
        return None
    if len(raw) != expected:
        return None
    prefill, decode = np.frombuffer(raw, "<u4").reshape(2, layers, experts).astype(np.uint32)
    return RequestEam(prefill, decode)


# Made here, not at the first use: msgspec builds the tables of a type without a lock.
_HEADER = msgspec.json.Decoder(_Header)
