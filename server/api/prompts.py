"""Read messages as both APIs send them, and refuse what has no prompt.

Does not know endpoints. Never takes a template from a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from moeinf.runtime.generation.prompts import cut_text, text_prompt
from moeinf.server.api.answers import BadRequest
from moeinf.server.api.bounds import Listed
from moeinf.server.api.optional_fields import Said

if TYPE_CHECKING:
    from moeinf.runtime.engine.engine import Engine


class _FunctionSaid(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str
    arguments: dict[str, Any] | str | None = None


class CallSaid(Said):
    """A call of an earlier turn, as either API sends it back."""

    model_config = ConfigDict(extra="allow")
    id: str | None = None
    function: _FunctionSaid


class MessageExtras(Said):
    """What a message has beside role and content; templates may look at more."""

    model_config = ConfigDict(extra="allow")
    thinking: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Listed[CallSaid] | None = None
    tool_call_id: str | None = None
    tool_name: str | None = None
    name: str | None = None

    def dump(self) -> dict[str, Any]:
        """What was said; a None says nothing, but in the arguments of a call."""
        return self.model_dump(exclude_unset=True)


def refuse_sources(engine: Engine) -> None:
    """Raises BadRequest for an encoder-decoder: it has a source, which no API has a field for."""
    if engine.info.reads_sources:
        raise BadRequest("the API does not serve encoder-decoders; `moeinf run` does")


def embedding_prompt(engine: Engine, given: str | Sequence[int], truncate: bool) -> list[int]:
    """Return token ids of a text that is embedded; special tokens in it are text. Or ids as given.

    truncate: what is longer than the context is cut at its end. Raises BadRequest for ids that the
    model lacks, PromptTooLong.
    """
    refuse_sources(engine)
    if isinstance(given, str):
        ids = text_prompt(engine, cut_text(engine, given) if truncate else given, plain=True)
    else:
        ids = list(given)
        if any(not 0 <= token < engine.info.vocab_size for token in ids):
            raise BadRequest("input has ids that are no tokens of this model")
    return ids[: engine.info.context - 1] if truncate else ids
