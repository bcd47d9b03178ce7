"""Read messages in the APIs' forms, and refuse inputs without a prompt.

It never takes a template from a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from moeinf.runtime.generation.prompts import cut_text, text_prompt
from moeinf.runtime.requests import Limits
from moeinf.server.api.answers import BadRequest
from moeinf.server.api.fields.bounds import Listed
from moeinf.server.api.fields.optional import RequestObject

if TYPE_CHECKING:
    from moeinf.runtime.engine.engine import Engine


class _PastFunction(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str
    arguments: dict[str, Any] | str | None = None


class PastToolCall(RequestObject):
    """A tool call of an earlier turn, as a client sends it back in either API."""

    model_config = ConfigDict(extra="allow")
    id: str | None = None
    function: _PastFunction


class MessageExtras(RequestObject):
    """The keys of a message beside role and content; templates may read more."""

    model_config = ConfigDict(extra="allow")
    thinking: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Listed[PastToolCall] | None = None
    tool_call_id: str | None = None
    tool_name: str | None = None
    name: str | None = None

    def dump(self) -> dict[str, Any]:
        """Return the given fields; a None is left out, except in the arguments of a call."""
        return self.model_dump(exclude_unset=True)


def joined(texts: Iterable[str]) -> str:
    """Return texts that follow each other as one, without the empty ones."""
    return "\n\n".join(text for text in texts if text)


def unread(kind: str) -> str:
    """Return the words for a part of a tool's result that is not text.

    A refusal would end an agent's conversation, because each later request repeats the result.
    """
    return f"[{kind}: left out, this model reads text only]"


def joined_turns(turns: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages for a template, in which those of one role that follow each other are one.

    Templates refuse two turns of one role. A tool's result always stays apart.
    """
    found: list[dict[str, Any]] = []
    groups = groupby(enumerate(turns), lambda one: (one[1]["role"], _apart(*one)))
    for _, group in groups:
        said = [turn for _, turn in group]
        whole = said[0]
        for name in ("content", "reasoning_content") if len(said) > 1 else ():
            text = joined(turn.get(name) or "" for turn in said)
            if text or name in whole:
                whole[name] = text
        calls = [call for turn in said for call in turn.get("tool_calls", ())]
        found.append({**whole, "tool_calls": calls} if calls else whole)
    return found


def _apart(place: int, turn: dict[str, Any]) -> int | None:
    """Return a number of its own for a turn that is never joined."""
    return place if turn["role"] == "tool" else None


def refuse_sources(engine: Engine) -> None:
    """Raise BadRequest for an encoder-decoder: no API has a field for its source."""
    if engine.info.reads_sources:
        raise BadRequest("the API does not serve encoder-decoders; `moeinf run` does")


def embedding_prompt(
    engine: Engine, given: str | Sequence[int], truncate: bool, limits: Limits
) -> list[int]:
    """Return token ids of a text to embed, or the ids as given; special tokens in a text are text.

    truncate: a longer text is cut at the end of the context. Raises BadRequest for ids that the
    model lacks, PromptTooLong.
    """
    refuse_sources(engine)
    if isinstance(given, str):
        ids = text_prompt(engine, cut_text(engine, given) if truncate else given, plain=True)
    else:
        ids = list(given)
        if any(not 0 <= token < engine.info.vocab_size for token in ids):
            raise BadRequest("input has ids that are not tokens of this model")
    return ids[: limits.context_in(engine.info.context) - 1] if truncate else ids
