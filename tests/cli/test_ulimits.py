"""Test that a command under `ulimit -v` or `ulimit -u` ends in words, and names the limit."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from moeinf.errors import InternalError, OutOfMemory, OutOfThreads, as_moeinf
from tests.cli.conftest import COMMAND, environment

# Another user, who may read what root may: the system does not limit the threads of root.
_RIGHTS = "-all,+dac_override,+dac_read_search"
OTHER = [
    *("setpriv", "--reuid", "54329", "--clear-groups"),
    *(f"--inh-caps={_RIGHTS}", f"--ambient-caps={_RIGHTS}"),
]


def limited(home: Path, limit: str, *before: str) -> str:
    """Return what `run` tells under a limit, which it cannot bear."""
    if shutil.which("prlimit") is None:
        pytest.skip("prlimit is not installed")
    done = subprocess.run(
        ["prlimit", limit, *before, *COMMAND, "run", "demo", "17+25="],
        env={**environment(home), "MOEINF_NO_SERVER": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "bug in moeinf" not in done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.linux("limits of processes")
@pytest.mark.parametrize(
    "kib",
    [30_000, 400_000, *(pytest.param(n, marks=pytest.mark.full) for n in (60_000, 250_000, 10**6))],
)
def test_too_little_address_space(kib: int, demo_home: Path) -> None:
    said = limited(demo_home, f"--as={kib << 10}")
    assert f"not enough memory (`ulimit -v` permits {kib >> 10} MiB)" in said
    assert "Try: `ulimit -v unlimited`, then the same command" in said


@pytest.mark.linux("limits of processes")
@pytest.mark.parametrize("most", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_too_few_threads(most: int, demo_home: Path) -> None:
    root = os.geteuid() == 0
    if root and shutil.which("setpriv") is None:
        pytest.skip("root has no limit of threads, and setpriv is not installed")
    said = limited(demo_home, f"--nproc={most}", *(OTHER if root else ()))
    assert f"starts no more threads or processes (`ulimit -u` permits {most} in all)" in said
    assert "Try: `ulimit -u 4096`" in said


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), OutOfMemory),
        (MemoryError("std::bad_alloc"), OutOfMemory),
        (RuntimeError("std::bad_alloc"), OutOfMemory),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9"), OutOfMemory),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), OutOfMemory),
        (ImportError("libx.so: cannot allocate memory in static TLS block"), OutOfMemory),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), OutOfMemory),
        (OSError(errno.ENOMEM, "Cannot allocate memory", "/a/file"), OutOfMemory),
        (RuntimeError("can't start new thread"), OutOfThreads),
        (RuntimeError("Resource temporarily unavailable"), OutOfThreads),  # std::thread
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), OutOfThreads),  # fork
        (RuntimeError("anything else"), InternalError),
        (ImportError("No module named 'x'"), InternalError),
        (KeyError("std::bad_alloc"), InternalError),
    ],
)
def test_what_the_system_refuses(error: Exception, kind: type[Exception]) -> None:
    told = as_moeinf(error)
    assert type(told) is kind
    assert "bad_alloc" not in str(told) or kind is InternalError
