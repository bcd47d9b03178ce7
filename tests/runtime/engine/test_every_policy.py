"""Every contestant of the league in the engine: the tokens of an engine that holds all experts.

The optimum needs the future. Here it is known: the routing of the same answers before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from numpy.typing import NDArray

from moeinf.offload.policy import table
from moeinf.offload.policy.belady import Belady
from moeinf.offload.routing.trace import Recording
from moeinf.runtime.engine.engine import Engine
from tests.conftest import Open, endless
from tests.generating import answering

PROMPTS = ([16 + (37 * place) % 200 for place in range(40)], [30, 31, 32, 33, 34], [40, 41])
ANSWER = 12
CONTESTANTS = ["belady", *table.POLICIES]


def answers(engine: Engine) -> list[list[int]]:
    """Return the tokens of an answer to each prompt, one after the other, on a cold engine."""
    endless(engine)
    found = []
    for prompt in PROMPTS:
        answer = answering(engine, prompt, ANSWER)
        "".join(answer)
        found.append(answer.tokens)
    return found


def routed(recording: Recording) -> Iterator[tuple[int, NDArray[Any]]]:
    for done in recording.passes:
        yield from enumerate(done.ids)


def test_each_gives_the_same_tokens(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is too small changes what is read, and never the answer."""
    full = open_engine(context=64)
    recording = full.record("answers")
    expected = answers(full)
    monkeypatch.setitem(table.POLICIES, "belady", lambda setup: Belady(setup, routed(recording)))
    loads = {}
    for policy in CONTESTANTS:
        engine = open_engine(memory="30%", context=64, policy=policy)
        assert engine.info.slots < recording.shape.layers * recording.shape.experts
        assert answers(engine) == expected, policy
        assert engine.store.idle
        loads[policy] = engine.store.stats.loads
    assert min(loads.values()) == loads["belady"] > len(recording.passes)
    assert loads["lru"] > loads["lrfu"]  # the policies differ at all
