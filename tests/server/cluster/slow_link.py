"""Join a new network namespace to this one by a link that delays and loses packets.

Run: python -m tests.server.cluster.slow_link 198.18.7 0.025 0.01

This side gets the address 198.18.7.1, the other side 198.18.7.2. Prints a line when both are up.
Reads lines "DELAY LOSS" (seconds, share) from standard input, and ends with it. The namespace is
that of this process, /proc/PID/ns/net: it goes with it. tc's netem does the same where the kernel
has it. Needs root, /dev/net/tun and `ip`.
"""

from __future__ import annotations

import ctypes
import heapq
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from contextlib import suppress

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 1, 0x1000
_CLONE_NEWNET = 0x40000000
_MTU = 1500


def opened(name: str, ours: str, theirs: str) -> int:
    """Return the descriptor of a new interface in the namespace of this process."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    import fcntl  # Windows lacks it

    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    subprocess.run(["ip", "addr", "add", ours, "peer", theirs, "dev", name], check=True)
    subprocess.run(["ip", "link", "set", name, "up", "mtu", str(_MTU)], check=True)
    return file


def forward(ends: tuple[int, int], delay: float, loss: float) -> None:
    """Carry packets between both ends until standard input ends."""
    draw = random.Random(0)
    waiting: list[tuple[float, int, int, bytes]] = []  # due, order, end, packet
    order = 0
    with selectors.DefaultSelector() as selector:
        for file in (*ends, 0):
            selector.register(file, selectors.EVENT_READ)
        while True:
            due = waiting[0][0] - time.monotonic() if waiting else None
            for key, _ in selector.select(due if due is None else max(0.0, due)):
                data = os.read(key.fd, 1 << 16)
                if key.fd == 0:
                    if not data:
                        return
                    delay, loss = map(float, data.split(b"\n")[-2].split())
                elif draw.random() >= loss:
                    order += 1
                    other = ends[1 - ends.index(key.fd)]
                    heapq.heappush(waiting, (time.monotonic() + delay, order, other, data))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, end, data = heapq.heappop(waiting)
                with suppress(BlockingIOError):  # its queue is full: the packet is lost
                    os.write(end, data)


def main(network: str, delay: str, loss: str) -> None:
    name = f"mi{os.getpid()}"
    here = opened(f"{name}a", f"{network}.1", f"{network}.2")
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    there = opened(f"{name}b", f"{network}.2", f"{network}.1")
    print("up", flush=True)
    forward((here, there), float(delay), float(loss))


if __name__ == "__main__":
    main(*sys.argv[1:])
