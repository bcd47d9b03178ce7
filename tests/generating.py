"""Answer a list of token ids, without a conversation."""

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
    """Return an answer of at most `count` tokens, as an iterator."""
    request = Request(lambda _: prompt, options, Limits(count))
    return Generation(engine, Scheduler(engine), request)
