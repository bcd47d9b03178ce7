"""Read and write our JSON files below $MOEINF_HOME/state, an object of entries each.

Does not know what an entry says. An entry is decoded when it is asked for, so that a damaged one
hides no other, and one of another version of moeinf is written back as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from moeinf.runtime.atomic_files import write_bytes_durably
from moeinf.runtime.regular_files import read_regular

T = TypeVar("T")
Entries = dict[str, Any]  # names -> msgspec.Raw when read; anything that msgspec encodes to write


def read_entries(path: Path) -> Entries:
    """Return the entries of a file; none where it is missing or damaged."""
    with suppress(OSError, ValueError, RecursionError):
        return dict(msgspec.json.decode(read_regular(path), type=dict[str, msgspec.Raw]))
    return {}


def entries_of(entries: Mapping[str, Any], name: str) -> Entries:
    """Return the entries within an entry; none where it is missing or damaged."""
    return dict(entry_of(entries, name, dict[str, msgspec.Raw]) or {})


def entry_of(entries: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    """Return an entry of this type; None where it is missing or damaged."""
    with suppress(KeyError, ValueError, RecursionError):
        return msgspec.json.decode(entries[name], type=kind)
    return None


def write_entries(path: Path, entries: Mapping[str, Any]) -> None:
    """Replace a file that only its owner may read; a failure to write is ignored."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        text = msgspec.json.format(msgspec.json.encode(entries), indent=1)
        write_bytes_durably(path, text, mode=0o600)
