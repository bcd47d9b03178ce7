"""Test which turns are dropped, against the plain rule: the fewest that leave room."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeinf.runtime.generation.turns import latest_turns
from moeinf.runtime.requests import PromptTooLong

ROLES = st.sampled_from(["user", "assistant", "tool"])


@given(
    st.lists(st.tuples(ROLES, st.integers(1, 40)), max_size=12),
    st.integers(0, 2),
    st.integers(8, 160),
    st.integers(1, 40),
)
def test_the_fewest_messages_go(
    middle: list[tuple[str, int]], systems: int, context: int, last: int
) -> None:
    messages = [("system", 2)] * systems + middle + [("user", last)]
    engine: Any = SimpleNamespace(info=SimpleNamespace(context=context))

    def prompt(head: int, dropped: int) -> list[int]:
        kept = [*messages[:head], *messages[head + dropped :]]
        count = sum(size for _, size in kept)
        if count > 2 * context:  # a text that is surely too long is not tokenised
            raise PromptTooLong("too long")
        return [0] * count

    cuts = [0]
    cuts += [i for i in range(1, len(messages) - systems) if messages[systems + i][0] == "user"]
    room = context - context // 8
    sizes = {
        cut: sum(size for _, size in messages[:systems] + messages[systems + cut :]) for cut in cuts
    }
    good = [cut for cut in cuts if sizes[cut] <= room]
    if not good and sizes[cuts[-1]] >= context:
        with pytest.raises(PromptTooLong):
            latest_turns(engine, [role for role, _ in messages], prompt)
        return
    dropped, ids = latest_turns(engine, [role for role, _ in messages], prompt)
    assert dropped == (good[0] if good else cuts[-1])
    assert len(ids) == sizes[dropped]
