"""Make a process on Linux lack what Windows or macOS lacks, for the tests that ask for it.

Names stay that the standard library of Linux itself calls later, for example os.statvfs.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from types import ModuleType

SYSTEMS = ("darwin", "win32")  # one process imitates them in this order: each lacks more
MODULES = {  # Triton has no wheels there
    "win32": "fcntl resource termios tty pty pwd grp triton",
    "darwin": "triton",
}
NAMES: dict[str, dict[ModuleType, str]] = {
    "win32": {
        os: "O_CLOEXEC O_DIRECT O_DIRECTORY O_NOFOLLOW O_NONBLOCK pread preadv pwrite pwritev "
        "sysconf sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate getuid geteuid "
        "getgid fork forkpty openpty pidfd_open RWF_NOWAIT mkfifo mknod killpg setsid getpgid "
        "major minor nice memfd_create",
        signal: "SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1 "
        "SIGUSR2 SIGWINCH setitimer alarm pidfd_send_signal pthread_kill pthread_sigmask sigwait",
        select: "poll epoll",
        socket: "AF_UNIX send_fds recv_fds",
    },
    "darwin": {
        os: "O_DIRECT sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate pidfd_open "
        "RWF_NOWAIT memfd_create",
        signal: "pidfd_send_signal",
        select: "epoll",
    },
}
LIBRARIES: dict[str, dict[str, str]] = {
    "win32": {"pexpect": "spawn spawnu run runu"},
    "darwin": {},
}


def take_away(system: str) -> None:
    """Remove the modules and names that a system lacks; sys.platform then names it."""
    for name in MODULES[system].split():
        for part in [one for one in sys.modules if one.partition(".")[0] == name]:
            del sys.modules[part]
        sys.modules[name] = None  # type: ignore[assignment] # its import now fails
    loaded = {name: sys.modules[name] for name in LIBRARIES[system] if name in sys.modules}
    libraries = {module: LIBRARIES[system][name] for name, module in loaded.items()}
    for module, names in [*NAMES[system].items(), *libraries.items()]:
        for name in names.split():
            vars(module).pop(name, None)  # Python 3.11 lacks some on Linux, too
    sys.platform = system
