"""One answer to token ids, without a conversation."""

from __future__ import annotations

from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.events import Request
from moeinf.runtime.generation.generate import Generation
from moeinf.runtime.generation.scheduler import Scheduler
from moeinf.runtime.requests import Limits, SamplingOptions

GREEDY = SamplingOptions(temperature=0)


def answering(
    engine: Engine, prompt: list[int], count: int, options: SamplingOptions = GREEDY
) -> Generation:
    """An answer of `count` tokens at most; iterate it."""
    request = Request(lambda _: prompt, options, Limits(count))
    return Generation(engine, Scheduler(engine), request)
