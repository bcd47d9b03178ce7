"""Whether files lie in the page cache, which decides how they are best read.

Does not know models. Read past the cache, a file costs no copy and no memory twice; read through
it, a file that is there already costs no disk.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from pathlib import Path


def cached_share(paths: Iterable[Path]) -> float:
    """The share of the files' pages that are in memory; 1.0 where the system does not say."""
    pages = there = 0
    for path in paths:
        found = _resident(path)
        if found is None:
            return 1.0
        pages += len(found)
        there += sum(page & 1 for page in found)
    return there / pages if pages else 1.0


def _resident(path: Path) -> bytes | None:
    """One byte per page, its lowest bit set when the page is in memory. Reads nothing."""
    mincore = getattr(ctypes.CDLL(None), "mincore", None)
    size = path.stat().st_size
    if mincore is None or not size:
        return b"" if mincore is not None else None
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as view:
        start = ctypes.c_char.from_buffer(view)  # ACCESS_COPY, because this asks for a writable one
        pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        failed = mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), pages)
        del start  # or the view could not be closed
    return None if failed else pages.raw
