"""Free memory of the machine and its control groups, from generated trees; malloc heaps."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moeinf.runtime.machine.memory import available_bytes, peak_rss_bytes, rss_bytes

MIB = 1 << 20


def tree(root: Path, **files: str) -> Path:
    files.setdefault("proc/meminfo", f"MemTotal: 9 kB\nMemAvailable:   {4096 * 1024} kB\n")
    for name, text in files.items():
        path = root / name.replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_groups(tmp_path: Path) -> None:
    assert available_bytes(tree(tmp_path)) == 4096 * MIB


def test_v2_limit_of_an_outer_group(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/user/session\n",
        "sys/fs/cgroup/user/session/memory__max": "max\n",
        "sys/fs/cgroup/user/session/memory__current": "5\n",
        "sys/fs/cgroup/user/memory__max": f"{1000 * MIB}\n",
        "sys/fs/cgroup/user/memory__current": f"{700 * MIB}\n",
        "sys/fs/cgroup/user/memory__stat": f"anon 1\ninactive_file {100 * MIB}\n",
    }
    assert available_bytes(tree(tmp_path, **files)) == 400 * MIB


def test_v1_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/docker/x\n",
        "sys/fs/cgroup/memory/docker/x/memory__limit_in_bytes": f"{600 * MIB}\n",
        "sys/fs/cgroup/memory/docker/x/memory__usage_in_bytes": f"{200 * MIB}\n",
        "sys/fs/cgroup/memory/docker/x/memory__stat": f"total_inactive_file {50 * MIB}\n",
        "sys/fs/cgroup/memory/memory__limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory__usage_in_bytes": "1\n",
    }
    assert available_bytes(tree(tmp_path, **files)) == 450 * MIB


def test_a_group_over_its_limit_has_nothing(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a\n",
        "sys/fs/cgroup/a/memory__max": "100\n",
        "sys/fs/cgroup/a/memory__current": "200\n",
    }
    assert available_bytes(tree(tmp_path, **files)) == 0


def test_this_process() -> None:
    before = rss_bytes()
    # new pages: malloc may return pages that are resident already
    with mmap.mmap(-1, 64 * MIB) as block:
        block.write(b"x" * (64 * MIB))
        assert rss_bytes() - before > 60 * MIB
        assert peak_rss_bytes() >= before + 60 * MIB


_HEAPS = """
import ctypes, os, threading
from moeinf.runtime.machine.memory import keep_heap_small, return_free_pages, rss_bytes

keep_heap_small()
kept, held = [], threading.Barrier(8)

def work():
    mine = [bytes(60_000) for _ in range(200)]  # 12 MB, below the border of large blocks
    held.wait()
    kept.append(mine[::20])

threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
before = rss_bytes()
return_free_pages()
libc = ctypes.CDLL(None)
libc.fopen.restype, libc.fclose.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
out = libc.fopen(os.environ["OUT"].encode(), b"w")
libc.malloc_info(0, out)
libc.fclose(out)
print(before - rss_bytes())
"""


@pytest.mark.linux("asks glibc for its heaps")
def test_threads_share_two_heaps_and_give_holes_back(tmp_path: Path) -> None:
    info = tmp_path / "info.xml"
    done = subprocess.run(
        [sys.executable, "-c", _HEAPS],
        env={**os.environ, "OUT": str(info)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert info.read_text().count("<heap nr=") == 2
    assert int(done.stdout) > 30 << 20  # a twentieth of 96 MB is in use
