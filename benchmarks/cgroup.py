"""A limit on all memory of a process, page cache included, by a control group of its own.

Version 2 (memory.max) or version 1 (memory.limit_in_bytes) of Linux's memory controller. The group
is made at the controller's mount, or inside our own group where the mount is not writable. It needs
the right to write there (root, or a delegated group).

Pages of files belong to the group that first read them. Model files that a program reads count
against it; pages that another program read before do not. So files must be dropped from the page
cache first (cold.forget_pages). Shared libraries that are in use elsewhere stay free of charge.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_LEAVING_SECONDS = 5.0  # a process that has ended is in its group for a moment longer
_ENTER = 'echo 0 > "$0/cgroup.procs" && exec "$@"'


class NoMemoryGroup(RuntimeError):
    """No control group can be made here; the message says what is missing."""


@dataclass(frozen=True)
class _Version:
    """The files of one version of the controller."""

    limit: str
    used: str
    peak: str
    killed_in: str  # holds a line "oom_kill n"


_V2 = _Version("memory.max", "memory.current", "memory.peak", "memory.events")
_V1 = _Version(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "memory.max_usage_in_bytes",
    "memory.oom_control",
)


class MemoryGroup:
    """A control group with a limit in bytes; its processes must have ended before close."""

    def __init__(self, limit_bytes: int, root: Path = Path("/")) -> None:
        """Make the group. Raises NoMemoryGroup."""
        problems = []
        for parent, version in _parents(root):
            folder = parent / f"moeinf-{os.getpid()}-{time.monotonic_ns()}"
            try:
                folder.mkdir()
            except OSError as error:
                problems.append(f"{parent}: {error.strerror}")
                continue
            try:
                with (folder / version.limit).open("r+") as file:  # absent: no such controller
                    file.write(str(limit_bytes))
            except OSError as error:
                problems.append(f"{parent}: {version.limit}: {error.strerror}")
                folder.rmdir()
                continue
            self.folder, self._version = folder, version
            return
        text = "; ".join(problems) or "no memory controller is mounted"
        raise NoMemoryGroup(f"memory cannot be limited here ({text}); it takes root or a group")

    def lower(self, limit_bytes: int) -> None:
        """Give back page cache until the new limit holds. Raises OSError (EBUSY) when it cannot."""
        (self.folder / self._version.limit).write_text(str(limit_bytes))

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` inside the group from its first instruction."""
        return ["/bin/sh", "-c", _ENTER, os.fspath(self.folder), *command]

    @property
    def peak_bytes(self) -> int | None:
        """The most memory in use so far, page cache included; None where the kernel lacks it."""
        try:
            return int((self.folder / self._version.peak).read_text())
        except (OSError, ValueError):
            return None

    @property
    def killed(self) -> bool:
        """True when the kernel has ended a process because the limit was too low."""
        text = (self.folder / self._version.killed_in).read_text()
        match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
        return match is not None and int(match[1]) > 0

    def close(self) -> None:
        """Remove the group. Raises OSError (EBUSY) when a process stays in it."""
        deadline = time.monotonic() + _LEAVING_SECONDS
        while True:
            try:
                self.folder.rmdir()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def __enter__(self) -> MemoryGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _parents(root: Path) -> list[tuple[Path, _Version]]:
    """Return where a group may be made: at the controller's mount, then inside our own group."""
    found = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            mount, version = root / "sys/fs/cgroup", _V2
        elif "memory" in controllers.split(","):
            mount, version = root / "sys/fs/cgroup/memory", _V1
        else:
            continue
        found += [(place, version) for place in (mount, mount / group.lstrip("/"))]
    return found
