"""Drop the oldest turns of a conversation that does not fit its context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from moeinf.runtime.generation.prompts import check_length
from moeinf.runtime.requests import PromptTooLong

_ANSWER_SHARE = 8  # an eighth of the context is kept for the answer when turns are dropped
_ALWAYS = ("system", "developer")  # roles of messages that are kept at the beginning


def latest_turns(
    messages: Sequence[Mapping[str, Any]],
    context: int,
    prompt: Callable[[Sequence[int]], list[int]],
) -> tuple[list[int], list[int]]:
    """Return the indices of the messages that stay, as few as needed dropped, and their prompt.

    context: in tokens. prompt(kept) returns the token ids of some messages. The system messages at
    the beginning stay, and so do the newest message of the user and the last round: an answer or
    calls with their results. The oldest messages go first: the rounds of a turn, then the rest of
    it. Raises PromptTooLong if what must stay does not fit, and what prompt raises.
    """
    head = _head(messages)
    cuts = [((), head), *_cuts(messages, head)]
    most = context - context // _ANSWER_SHARE

    def kept(number: int) -> list[int]:
        asked, first = cuts[number]
        return [*range(head), *asked, *range(first, len(messages))]

    def fitting(number: int) -> list[int] | None:
        try:
            ids = prompt(kept(number))
        except PromptTooLong:
            return None
        return ids if len(ids) <= most else None

    if (best := fitting(0)) is not None:
        return kept(0), best
    low, high = min(1, len(cuts) - 1), len(cuts) - 1  # the first cut that fits is between them
    while low < high:
        middle = (low + high) // 2
        ids = fitting(middle)
        if ids is None:
            low = middle + 1
        else:
            high, best = middle, ids
    if best is None:
        best = prompt(kept(low))  # the last round may need the room that answers get
        check_length(best, context)
    return kept(low), best


def _head(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of system messages at the beginning."""
    roles = (message["role"] for message in messages)
    return next((i for i, role in enumerate(roles) if role not in _ALWAYS), len(messages))


def _cuts(
    messages: Sequence[Mapping[str, Any]], head: int
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield each place from which on messages may stay, with the earlier ones that stay too.

    A later cut drops more. No cut is between a call and its result.
    """
    roles = [message["role"] for message in messages]
    open_calls = _open_calls(messages)
    newest = max((i for i, role in enumerate(roles) if role == "user"), default=-1)
    question: tuple[int, ...] = ()  # the message of the user that began the turn
    dropped = 0
    for place in range(head, len(messages)):
        if open_calls[place] or roles[place] not in ("user", "assistant"):
            continue
        if roles[place] == "user":
            asked: tuple[int, ...] = ()
            question = (place,)
        else:
            late = max(question, default=head - 1) < newest < place  # between a call and its result
            asked = (*question, newest) if late else question
        if place - head - len(asked) > dropped:
            dropped = place - head - len(asked)
            yield asked, place


def _open_calls(messages: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Return for each message whether it, or a later one, is the result of an earlier call."""
    callers, caller = list[int](), None
    for place, message in enumerate(messages):
        if message.get("tool_calls"):
            caller = place
        result = message["role"] == "tool" and caller is not None
        callers.append(caller if result and caller is not None else place)
    oldest = len(messages)  # the oldest call whose result is at `place` or later
    found = list[bool]()
    for place in reversed(range(len(messages))):
        oldest = min(oldest, callers[place])
        found.append(oldest < place)
    return found[::-1]
