"""Drop the oldest turns of a conversation that does not fit its context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from moeinf.runtime.generation.prompts import check_length
from moeinf.runtime.requests import PromptTooLong

if TYPE_CHECKING:
    from moeinf.runtime.engine.engine import Engine

_ANSWER_SHARE = 8  # an eighth of the context is kept for the answer when turns are dropped
_ALWAYS = ("system", "developer")  # roles of messages that are kept at the beginning


def latest_turns(
    engine: Engine, roles: Sequence[str], prompt: Callable[[int, int], list[int]]
) -> tuple[int, list[int]]:
    """Return how many messages must be dropped, and the prompt of the others.

    roles: of all messages. The system messages at the beginning are kept, and the others are
    dropped from the oldest on, up to a user's message. prompt(head, dropped) returns token ids
    without the messages from `head` to `head + dropped`. Raises PromptTooLong if the last turn
    alone does not fit, and what prompt raises.
    """
    head = next((i for i, role in enumerate(roles) if role not in _ALWAYS), len(roles))
    later = [i - head for i in range(head + 1, len(roles)) if roles[i] == "user"]
    context = engine.info.context
    most = context - context // _ANSWER_SHARE

    def fitting(dropped: int) -> list[int] | None:
        try:
            ids = prompt(head, dropped)
        except PromptTooLong:
            return None
        return ids if len(ids) <= most else None

    if (found := fitting(0)) is not None:
        return 0, found
    low, high, best = 0, len(later) - 1, None  # of `later`: the fewest messages that must go
    while low < high:
        middle = (low + high) // 2
        ids = fitting(later[middle])
        if ids is None:
            low = middle + 1
        else:
            high, best = middle, ids
    dropped = later[low] if later else 0
    if best is None:
        best = prompt(head, dropped)  # the last turn may need the room that answers get
        check_length(engine, best)
    return dropped, best
