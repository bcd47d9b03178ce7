"""Report free memory and cores of this machine, or of this process's control group.

Linux reports exact figures. On other systems half of the physical memory is assumed to be free.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

from moeinf.runtime import system
from moeinf.runtime.system import physical_bytes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h
_ARENAS = 2
_LARGE_BLOCK_BYTES = (1 << 20) + 4096  # decode's scratch of 1 MiB stays on the heap
# oneDNN caches code for each matrix shape, some 0.6 MB each, up to 1,024 shapes. In prefill nearly
# every expert has a different number of rows. Sixteen shapes serve a decode step of any family
# (docs/decisions/0010).
_CODE_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_CODE_CACHE_SHAPES = "16"


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated without swapping, within all cgroup limits."""
    try:
        text = (root / "proc/meminfo").read_text()
        match = re.search(r"^MemAvailable:\s++(\d++) kB", text, re.MULTILINE)
        free = int(match[1]) * 1024 if match else 0
    except OSError:
        free = physical_bytes() // 2
    spare = _cgroup_spare_bytes(root)
    return free if spare is None else min(free, spare)


def total_bytes(root: Path = Path("/")) -> int:
    """Return the memory that this process and others share, in bytes: within all cgroup limits."""
    return min([physical_bytes(), *(limit for limit, _ in _cgroups(root))])


def _cgroup_spare_bytes(root: Path) -> int | None:
    """Return the smallest (limit - use) of our cgroups, v2 or v1. Page cache counts as free."""
    return min((max(0, limit - use) for limit, use in _cgroups(root)), default=None)


def _cgroups(root: Path) -> list[tuple[int, int]]:
    """Return (limit, use) of our cgroups that have a limit, in bytes."""
    found = []
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers == "":
                found += _limits(root, "sys/fs/cgroup", group, "memory.max", "memory.current")
            elif "memory" in controllers.split(","):
                files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
                found += _limits(root, "sys/fs/cgroup/memory", group, *files)
    return found


def _limits(
    root: Path, mount: str, group: str, limit_file: str, use_file: str
) -> list[tuple[int, int]]:
    """Return (limit, use) of the cgroup and its ancestors that have a limit."""
    found = []
    parts = [part for part in group.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        folder = root.joinpath(mount, *parts[:depth])
        with suppress(OSError, ValueError):
            limit = int((folder / limit_file).read_text())  # "max", no limit, is not a number
            use = int((folder / use_file).read_text())
            with suppress(OSError):
                stat = (folder / "memory.stat").read_text()
                cached = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
                use -= int(cached[1]) if cached else 0
            if limit < 1 << 60:
                found.append((limit, use))
    return found


def keep_code_caches_small() -> None:
    """Bound the code that torch's libraries keep per matrix shape; call before the first product.

    Variables that the user has set stay.
    """
    for variable in _CODE_CACHES:
        os.environ.setdefault(variable, _CODE_CACHE_SHAPES)


@cache
def _c_library() -> ctypes.CDLL:
    """Open the C library once: each object of it is a cycle."""
    return ctypes.CDLL(None)


def keep_heap_small() -> None:
    """Make glibc return freed blocks above 1 MiB at once, and limit new threads to two heaps.

    By default glibc raises that threshold to the largest freed block, up to 32 MiB. The heap then
    keeps the holes: 7 to 23 MiB after a long prefill. It also has up to eight heaps per core, each
    of which keeps its peak size (docs/decisions/0010). Other C libraries have no such options.
    """
    mallopt = getattr(_c_library(), "mallopt", None)
    if mallopt is not None:
        for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            mallopt(parameter, _LARGE_BLOCK_BYTES)
        mallopt(_M_ARENA_MAX, _ARENAS)


def return_free_pages() -> None:
    """Return the free pages of all heaps to the system, including those between used blocks."""
    trim = getattr(_c_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def core_count() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cache_bytes() -> int:
    """Return the total size of the processor's level-3 caches; 0 if unknown."""
    sizes: dict[str, int] = {}  # by the cores that share a cache
    for folder in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index3"):
        with suppress(OSError, ValueError):
            size = (folder / "size").read_text().strip()
            shared = (folder / "shared_cpu_list").read_text().strip()
            sizes[shared] = int(size.removesuffix("K")) << 10
    return sum(sizes.values())


def peak_rss_bytes() -> int:
    """Return this process's peak resident bytes since its start, or since forget_peak_rss."""
    with suppress(OSError):
        match = re.search(
            r"^VmHWM:\s++(\d++) kB", Path("/proc/self/status").read_text(), re.MULTILINE
        )
        if match:
            return int(match[1]) * 1024
    return system.peak_rss_bytes()


def forget_peak_rss() -> None:
    """Reset peak_rss_bytes to the current size, where the system supports it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def rss_bytes() -> int:
    """Return this process's resident bytes."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    return peak_rss_bytes()
