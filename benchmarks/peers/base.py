"""What the peers' workers have in common: options, start, and the clock of streamed answers.

Does not know any peer, nor moeinf: it runs in the peer's Python.

A peer's file defines one class with `reset`, `turn` and `about` (worker.Talker) and hands it to
`main`. Answers are fed token by token where the peer lets one (worker.forced_turn); else the peer
chooses, and what is measured is when each token arrived.
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
    """A turn's time is over."""


class Clock:
    """When tokens arrived: a streamer as `generate` of transformers wants it.

    `put` is called with the prompt first and then once per step, for all conversations.
    """

    def __init__(self, limit_s: float) -> None:
        self.start = time.perf_counter()
        self.times: list[float] = []
        self._end = self.start + limit_s

    def put(self, _: object) -> None:
        """Raises Enough."""
        self.times.append(time.perf_counter())
        if self.times[-1] > self._end:
            raise Enough

    def end(self) -> None: ...

    def turn(self) -> dict[str, Any]:
        """The turn's answer; the prompt's own call does not count."""
        return streamed(self.start, [self.times[1:]])


def streamed(start: float, arrivals: Sequence[Sequence[float]]) -> dict[str, Any]:
    """A turn's answer from the times at which each conversation's tokens arrived.

    A step is over when every conversation has its token. RuntimeError when one has none.
    """
    if not all(arrivals):
        raise RuntimeError("a conversation was given no token")
    done = [max(times) for times in zip(*arrivals, strict=False)]
    steps = [after - before for before, after in itertools.pairwise(done)]
    return {"first": done[0] - start, "steps": steps, "forced": False}


def options() -> argparse.ArgumentParser:
    """Those of every worker; a peer reads the ones that it has a use for."""
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
    """A peer's worker: loads, then does as it is told."""
    out = claim_stdout()
    runner = load(options().parse_args())
    serve(runner, {"imported_at": _IMPORTED_AT, "ready_at": time.monotonic()}, out)
