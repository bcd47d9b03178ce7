"""Test which turns are dropped, against the plain rule: the fewest that leave room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeinf.runtime.generation.turns import latest_turns
from moeinf.runtime.requests import PromptTooLong

KINDS = st.sampled_from(["user", "assistant", "call", "tool"])


def message(kind: str, size: int) -> dict[str, Any]:
    if kind == "call":
        return {"role": "assistant", "size": size, "tool_calls": [{}]}
    return {"role": kind, "size": size}


def caller(messages: Sequence[dict[str, Any]], place: int) -> int:
    """Return the place of the call that a result belongs to; its own without a call."""
    earlier = [i for i in range(place) if "tool_calls" in messages[i]]
    return earlier[-1] if earlier and messages[place]["role"] == "tool" else place


def plain_rule(messages: Sequence[dict[str, Any]], head: int) -> list[list[int]]:
    """Return what may stay, the most first."""
    places = range(head, len(messages))
    whole = [p for p in places if all(caller(messages, i) >= p for i in range(p, len(messages)))]
    users = [i for i in places if messages[i]["role"] == "user"]
    found = [list(range(len(messages)))]
    for place in whole:
        tail = set(range(place, len(messages)))
        if messages[place]["role"] == "assistant":
            tail |= set([i for i in users if i in whole and i < place][-1:])
            tail |= set(users[-1:])
        elif messages[place]["role"] != "user":
            continue
        kept = [*range(head), *sorted(tail)]
        if len(kept) < len(found[-1]):
            found.append(kept)
    return found


@given(
    st.lists(st.tuples(KINDS, st.integers(1, 40)), min_size=1, max_size=16),
    st.integers(0, 2),
    st.integers(8, 200),
)
def test_the_fewest_messages_go(turns: list[tuple[str, int]], systems: int, context: int) -> None:
    said = [("system", 2)] * systems + turns
    messages = [message(*one) for one in said]

    def total(kept: Sequence[int]) -> int:
        return sum(messages[place]["size"] for place in kept)

    def prompt(kept: Sequence[int]) -> list[int]:
        if total(kept) > 2 * context:  # a text that is surely too long is not tokenised
            raise PromptTooLong("too long")
        return [0] * total(kept)

    allowed = plain_rule(messages, systems)
    room = context - context // 8
    good = [kept for kept in allowed if total(kept) <= room]
    if not good and total(allowed[-1]) >= context:
        with pytest.raises(PromptTooLong):
            latest_turns(messages, context, prompt)
        return
    kept, ids = latest_turns(messages, context, prompt)
    assert kept == (good[0] if good else allowed[-1])
    assert len(ids) == total(kept)


@pytest.mark.parametrize(
    ("kinds", "context", "kept"),
    [
        ("system user call tool call tool call tool", 6, [0, 1, 4, 5, 6, 7]),
        ("system user call tool call tool call tool", 5, [0, 1, 6, 7]),
        ("system user call tool tool call tool", 6, [0, 1, 5, 6]),
        ("user assistant user call tool call tool", 6, [2, 3, 4, 5, 6]),
        ("user assistant user call tool call tool", 4, [2, 5, 6]),
        ("user call tool assistant user", 4, [0, 3, 4]),
        ("user call tool assistant user", 2, [4]),
        ("user call user tool call tool", 5, [0, 2, 4, 5]),  # a text between a call and its result
        ("call user tool call tool", 4, [1, 3, 4]),  # the only text is between them
        ("user user user call tool", 4, [1, 2, 3, 4]),
        ("system user call tool", 3, None),
    ],
)
def test_rounds_of_an_agent(kinds: str, context: int, kept: list[int] | None) -> None:
    messages = [message(kind, 1) for kind in kinds.split()]
    prompt = lambda kept: [0] * len(kept)  # noqa: E731
    if kept is None:
        with pytest.raises(PromptTooLong, match=f"the prompt has 4 tokens, the context {context}"):
            latest_turns(messages, context, prompt)
    else:
        assert latest_turns(messages, context, prompt)[0] == kept
