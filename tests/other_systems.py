"""Make a process on Linux lack what Windows or macOS lacks, for the tests that ask for it."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from types import ModuleType

MODULES = {"win32": "fcntl resource termios tty pwd grp", "darwin": ""}
NAMES: dict[str, dict[ModuleType, str]] = {
    "win32": {
        os: "O_CLOEXEC O_DIRECT O_DIRECTORY O_NOFOLLOW O_NONBLOCK pread preadv pwrite sysconf "
        "sched_getaffinity posix_fadvise getuid fork pidfd_open RWF_NOWAIT",
        signal: "SIGALRM SIGCHLD SIGHUP SIGKILL setitimer alarm pidfd_send_signal",
        select: "poll",
        socket: "AF_UNIX send_fds recv_fds",
    },
    "darwin": {
        os: "O_DIRECT sched_getaffinity posix_fadvise pidfd_open RWF_NOWAIT",
        signal: "pidfd_send_signal",
    },
}


def take_away(system: str) -> None:
    """Remove the modules and names that a system lacks; sys.platform then names it."""
    for name in MODULES[system].split():
        sys.modules[name] = None  # type: ignore[assignment] # its import now fails
    for module, names in NAMES[system].items():
        for name in names.split():
            del vars(module)[name]
    sys.platform = system
