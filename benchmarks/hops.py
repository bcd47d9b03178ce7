"""python -m benchmarks.hops: what one model over the memory of several machines pays for messages.

Processes of this machine send each other messages over TCP loopback, of the size of a token's
hidden state. A message counts as arrived `delay` after it was sent, as on a network. One token:

    sharded    every machine has a part of each layer's experts: in each layer, a message to every
               other machine, and its answer
    pipeline   every machine has some layers with all their experts: the state goes once around

The rest is arithmetic, for a model that fits into all machines together, and not into one:

    token = active bytes ÷ RAM speed [÷ machines, for the experts of `sharded`] + messages
    replicas: each machine has the whole model on its drive, and reads what it misses
    streams: tokens per second of all machines, with a stream for each. No machine is idle then,
    so `sharded` does not divide a token's time any more; messages of one stream pass while others
    are computed. It is the most that is possible
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import socket
import statistics
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

_SLACK = 29  # PR_SET_TIMERSLACK: a sleep ends within microseconds
_STAMP = struct.Struct("<d")


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. dense_gb: read for each token. expert_gb: of one expert, in q4."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    dense_gb: float
    expert_gb: float

    @property
    def gigabytes(self) -> float:
        return self.dense_gb + self.layers * self.experts * self.expert_gb


SHAPES = {  # published config.json; 4.5 bits per weight
    "qwen3-235b-a22b": Shape(94, 128, 8, 4096, 4.4, 3 * 4096 * 1536 * 4.5 / 8e9),
    "deepseek-v3": Shape(58, 256, 8, 7168, 9.6, 3 * 7168 * 2048 * 4.5 / 8e9),
}


class Line:
    """One end of a TCP connection, whose messages take `delay_s`."""

    def __init__(self, end: socket.socket, size: int, delay_s: float) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._end, self._size, self._delay_s = end, size + _STAMP.size, delay_s

    def send(self, body: bytes) -> None:
        self._end.sendall(_STAMP.pack(time.monotonic()) + body)

    def receive(self) -> bytes:
        """Return the next message when it has arrived; empty at the end of the connection."""
        data = bytearray()
        while len(data) < self._size:
            part = self._end.recv(self._size - len(data))
            if not part:
                return b""
            data += part
        wait = _STAMP.unpack_from(data)[0] + self._delay_s - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        return bytes(data[_STAMP.size :])


def listener() -> socket.socket:
    made = socket.socket()
    made.bind(("127.0.0.1", 0))
    made.listen()
    return made


def machine(up: Connection, after: int | None, size: int, delay_s: float) -> None:
    """Pass each message on to the port `after`; None: answer it."""
    ctypes.CDLL(None).prctl(_SLACK, 1, 0, 0, 0)
    with listener() as door:
        up.send(door.getsockname()[1])
        end = door.accept()[0]
        line = Line(end, size, delay_s)
        onward = line
        if after is not None:
            onward = Line(socket.create_connection(("127.0.0.1", after)), size, delay_s)
        while message := line.receive():
            onward.send(message)


@contextmanager
def machines_of(ports: Sequence[int | None], size: int, delay_s: float) -> Iterator[list[int]]:
    """Yield the ports of a machine per item, each with the port that it passes on to, or None.

    A port of 0 is that of the machine before.
    """
    found, processes = list[int](), []
    for after in ports:
        ours, theirs = multiprocessing.Pipe()
        arguments = (theirs, found[-1] if after == 0 else after, size, delay_s)
        process = multiprocessing.Process(target=machine, args=arguments, daemon=True)
        process.start()
        processes.append(process)
        found.append(ours.recv())
        ours.close()
        theirs.close()
    yield found
    for process in processes:  # each ends with its connection
        process.join()


def token_s(kind: str, shape: Shape, machines: int, delay_s: float, rounds: int) -> float:
    """Return the median time that the messages of a token take."""
    size, times = 4 * shape.hidden, []
    body = bytes(size)
    with ExitStack() as opened:
        home = opened.enter_context(listener())
        first_port = home.getsockname()[1]
        sharded = kind == "sharded"
        after = [None] * (machines - 1) if sharded else [first_port, *[0] * (machines - 2)]
        ports = opened.enter_context(machines_of(after, size, delay_s))
        ends = [
            opened.enter_context(socket.create_connection(("127.0.0.1", port)))
            for port in (ports if sharded else ports[-1:])
        ]
        out = [Line(end, size, delay_s) for end in ends]
        back = out
        if not sharded:
            back = [Line(opened.enter_context(home.accept()[0]), size, delay_s)]
        for _ in range(rounds):
            begin = time.perf_counter()
            for _ in range(shape.layers if sharded else 1):
                for line in out:
                    line.send(body)
                for line in back:
                    line.receive()
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def rates(shape: Shape, messages_s: dict[str, float], o: argparse.Namespace) -> dict[str, object]:
    """Return the tokens per second of one stream, and of a stream per machine."""
    chosen = shape.layers * shape.top_k * shape.expert_gb
    here_s = (shape.dense_gb + chosen) / o.ram  # of a token on one machine
    spread_s = shape.dense_gb / o.ram + chosen / o.ram / o.machines
    times = {  # of a token of one stream, and of one of a stream per machine
        **{f"replicas_{h:g}": (here_s + (1 - h) * chosen / o.drive,) * 2 for h in o.hits},
        "sharded": (spread_s + messages_s["sharded"], here_s + messages_s["sharded"]),
        "pipeline": (here_s + messages_s["pipeline"],) * 2,
    }
    return {"fits": shape.gigabytes <= o.machines * o.memory} | {
        kind: {"one_stream": round(1 / alone, 2), "streams": round(o.machines / busy, 2)}
        for kind, (alone, busy) in times.items()
    }


def main() -> None:
    o = _options()
    ctypes.CDLL(None).prctl(_SLACK, 1, 0, 0, 0)
    for name, shape in SHAPES.items():
        for delay_ms in o.delays:
            found = {
                kind: token_s(kind, shape, o.machines, delay_ms / 1e3, o.rounds)
                for kind in ("sharded", "pipeline")
            }
            row = {"shape": name, "machines": o.machines, "delay_ms": delay_ms}
            row |= {f"{kind}_ms": round(1e3 * s, 2) for kind, s in found.items()}
            print(json.dumps(row | rates(shape, found, o)), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machines", type=int, default=4)
    parser.add_argument(
        "--delays", type=lambda text: [float(part) for part in text.split(",")],
        default=[0.0, 0.1, 0.5, 1.0], help="ms, one way",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=20, help="tokens")
    parser.add_argument("--memory", type=float, default=72, help="GB of weights per machine")
    parser.add_argument("--ram", type=float, default=40, help="GB/s of a machine's memory")
    parser.add_argument("--drive", type=float, default=3, help="GB/s of a machine's drive")
    parser.add_argument(
        "--hits", type=lambda text: [float(part) for part in text.split(",")],
        default=[0.7, 0.84, 0.93], help="of a replica's cache",
    )  # fmt: skip
    return parser.parse_args()


if __name__ == "__main__":
    main()
