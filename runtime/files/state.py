"""Read and write our JSON files below $MOEINF_HOME/state. Each is an object of named entries.

An entry is decoded only when it is requested. So a damaged entry does not hide others, and an entry
of another moeinf version is written back unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from moeinf.runtime.files.atomic import make_folder_durably, write_bytes_durably
from moeinf.runtime.files.regular import read_regular

T = TypeVar("T")
_ENTRIES = msgspec.json.Decoder(dict[str, msgspec.Raw])
Entries = dict[str, Any]  # names -> msgspec.Raw when read; anything that msgspec encodes to write


def read_entries(path: Path) -> Entries:
    """Return the entries of a file, or {} if it is missing or damaged."""
    with suppress(OSError, ValueError, RecursionError):
        return dict(_ENTRIES.decode(read_regular(path)))
    return {}


def entries_of(entries: Mapping[str, Any], name: str) -> Entries:
    """Return the entries within an entry, or {} if it is missing or damaged."""
    found = entry_of(entries, name, _ENTRIES)
    return {} if found is None else dict(found)


def entry_of(entries: Mapping[str, Any], name: str, kind: msgspec.json.Decoder[T]) -> T | None:
    """Decode an entry by `kind`, or return None if it is missing or damaged."""
    with suppress(KeyError, ValueError, RecursionError):
        return kind.decode(entries[name])
    return None


def write_entries(path: Path, entries: Mapping[str, Any]) -> None:
    """Replace the file, with mode 0600. A failure to write is ignored."""
    with suppress(OSError):
        make_folder_durably(path.parent)
        text = msgspec.json.format(msgspec.json.encode(entries), indent=1)
        write_bytes_durably(path, text, mode=0o600)
