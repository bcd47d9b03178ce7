"""Make every Python process see another machine.

Python imports this at start when its folder is on PYTHONPATH. MOEINF_FAKE_MACHINE is JSON:
    cores            what sched_getaffinity and cpu_count report
    cache_kib        size of each L3 cache; 0: the files are missing
    available_kib    MemAvailable
    physical_pages   SC_PHYS_PAGES
    free_bytes       free space of every file system
    flags            processor flags in /proc/cpuinfo that stay; null: all
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
from typing import Any

_read_text = pathlib.Path.read_text
_disk_usage = shutil.disk_usage
_sysconf = os.sysconf


def _fake(machine: dict[str, Any]) -> None:
    def read_text(self: pathlib.Path, *arguments: Any, **options: Any) -> str:
        text = str(self)
        if "/cache/index3/" in text and text.startswith("/sys/devices/system/cpu"):
            if not machine["cache_kib"]:
                raise FileNotFoundError(2, "no such cache", text)
            if text.endswith("/size"):
                return f"{machine['cache_kib']}K\n"
        found = _read_text(self, *arguments, **options)
        if text == "/proc/meminfo":
            return re.sub(r"(MemAvailable:\s+)\d+", rf"\g<1>{machine['available_kib']}", found)
        if text == "/proc/cpuinfo" and machine["flags"] is not None:
            kept = " ".join(machine["flags"])
            return re.sub(r"(?m)^(flags\s*:).*$", rf"\1 {kept}", found)
        return found

    def disk_usage(path: Any) -> Any:
        found = _disk_usage(path)
        return type(found)(found.total, found.used, machine["free_bytes"])

    def sysconf(name: Any) -> int:
        return machine["physical_pages"] if name == "SC_PHYS_PAGES" else _sysconf(name)

    pathlib.Path.read_text = read_text  # type: ignore[method-assign]
    shutil.disk_usage = disk_usage
    os.sysconf = sysconf
    os.cpu_count = lambda: machine["cores"]
    os.sched_getaffinity = lambda _pid: set(range(machine["cores"]))


if "MOEINF_FAKE_MACHINE" in os.environ:
    _fake(json.loads(os.environ["MOEINF_FAKE_MACHINE"]))
