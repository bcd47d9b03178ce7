"""The common part of the peers' workers: options, start, and the clock of streamed answers.

It runs in the peer's Python, so it imports neither a peer nor moeinf.

A peer's file defines one class with `reset`, `turn` and `about` (worker.Talker) and passes it to
`main`. Where the peer allows it, answers are forced token by token (worker.forced_turn). Otherwise
the peer chooses, and the arrival time of each token is measured.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.worker import Talker, claim_stdout, serve

_IMPORTED_AT = time.monotonic()


class Enough(Exception):
    """The time of a turn is over."""


class Clock:
    """The arrival times of tokens: a streamer for `generate` of transformers.

    `put` is called with the prompt first and then once per step, for all conversations.
    """

    def __init__(self, limit_s: float) -> None:
        self.start = time.perf_counter()
        self.times: list[float] = []
        self._end = self.start + limit_s

    def put(self, _: object) -> None:
        """Record the time of a token. Raises Enough after the time limit."""
        self.times.append(time.perf_counter())
        if self.times[-1] > self._end:
            raise Enough

    def end(self) -> None: ...

    def turn(self) -> dict[str, Any]:
        """Return the turn's answer, without the call for the prompt."""
        return streamed(self.start, [self.times[1:]])


def streamed(start: float, arrivals: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return a turn's answer from the arrival times of each conversation's tokens.

    A step ends when every conversation has its token. Raises RuntimeError when one has no token.
    """
    if not all(arrivals):
        raise RuntimeError("a conversation was given no token")
    done = [max(times) for times in zip(*arrivals, strict=False)]
    steps = [after - before for before, after in itertools.pairwise(done)]
    return {"first": done[0] - start, "steps": steps, "forced": False}


def options() -> argparse.ArgumentParser:
    """Return the parser of the options of every worker; a peer reads those that it needs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="a file, a folder, or the name that a server knows")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, required=True, help="tokens of one conversation")
    parser.add_argument("--batch", type=int, default=1, help="conversations at once")
    parser.add_argument("--setting", default="default", help="one of the peer's own")
    parser.add_argument("--folder", help="where it may put what it offloads")
    parser.add_argument("--gpu-share", type=float, default=1.0, help="of its experts, on the GPU")
    parser.add_argument("--device-bytes", type=int, help="of its weights, on the GPU")
    parser.add_argument("--server", help="its address")
    return parser


def main(load: Callable[[argparse.Namespace], Talker]) -> None:
    """Run a peer's worker: load, then serve commands."""
    out = claim_stdout()
    runner = load(options().parse_args())
    serve(runner, {"imported_at": _IMPORTED_AT, "ready_at": time.monotonic()}, out)
