"""One turn of a chat: its prompt, and the parts of the answer as it arrives.

`prepare` runs on the engine's thread, before any part of the answer.
"""

from __future__ import annotations

import secrets
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from fastapi import Request as HttpRequest

from moeinf.runtime.generation.events import (
    Ended,
    Event,
    Failed,
    Piece,
    Reading,
    TokenInfo,
    in_blocks,
)
from moeinf.runtime.generation.prompts import Message, chat_prompt, text_prompt
from moeinf.runtime.generation.turns import latest_turns
from moeinf.runtime.requests import Limits
from moeinf.runtime.text.answer_parser import AnswerParser, AnswerPart
from moeinf.runtime.text.offered_tools import Call, Tool
from moeinf.runtime.text.reasoning import thinks
from moeinf.runtime.text.tool_calls import format_of, knows_tools
from moeinf.server.api.answers import BadRequest, events
from moeinf.server.api.prompts import refuse_sources
from moeinf.server.engines.jobs import Job
from moeinf.server.engines.model_manager import Loaded, ModelManager
from moeinf.server.http.bodies import FREE_BYTES, in_thread

if TYPE_CHECKING:
    from moeinf.runtime.engine.engine import Engine

_ID = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class ToolCall:
    """A tool call of an answer, as in the APIs. index: its number in the answer, from 0."""

    id: str
    index: int
    call: Call


Part = tuple[Literal["thinking", "answer"], str] | ToolCall


@dataclass
class Reply:
    """The parts of an answer so far."""

    calls: list[ToolCall] = field(default_factory=list)
    _thinking: list[str] = field(default_factory=list)
    _answer: list[str] = field(default_factory=list)

    @property
    def thinking(self) -> str:
        return "".join(self._thinking)

    @property
    def answer(self) -> str:
        return "".join(self._answer)

    @classmethod
    def of(cls, part: Part) -> Reply:
        reply = cls()
        reply.add(part)
        return reply

    def add(self, part: Part) -> None:
        if isinstance(part, ToolCall):
            self.calls.append(part)
        elif part[0] == "thinking":
            self._thinking.append(part[1])
        else:
            self._answer.append(part[1])


@dataclass(frozen=True)
class AnswerPiece:
    """A piece of an answer in parts; empty while nothing is certain.

    tokens: of the answer so far; 0 for what remains at its end.
    """

    parts: list[Part]
    info: TokenInfo | None = None
    tokens: int = 0


class Text:
    """A prompt that is continued unchanged: no part of the answer has a meaning."""

    dropped = 0  # messages that did not fit
    context: int | None = None  # see Limits

    def __init__(self, text: str) -> None:
        self._text = text

    def about(self) -> dict[str, int]:
        """Return our field of an answer for messages that did not fit the context."""
        return {"dropped_messages": self.dropped} if self.dropped else {}

    def prepare(self, engine: Engine) -> list[int]:
        refuse_sources(engine)
        return text_prompt(engine, self._text)

    @property
    def held(self) -> int:
        """The number of characters of a call that has not ended."""
        return 0

    def parts(self, text: str) -> list[Part]:
        return list(self.parse(text))

    def last_parts(self) -> list[Part]:
        return list(self.end())

    def parse(self, text: str) -> Iterator[Part]:
        if text:
            yield "answer", text

    def end(self) -> Iterator[Part]:
        yield from ()


class Chat(Text):
    """Messages that a model's template renders.

    think: False, True, or a level (templates call it reasoning_effort); None: their default.
    strict: whether to refuse `think` for a model that cannot think.
    variables: more values for the template, from the client.
    shift: whether the oldest turns are dropped when they do not fit the context.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        think: bool | str | None = None,
        strict: bool = False,
        parallel_calls: bool = True,
        variables: Mapping[str, Any] = MappingProxyType({}),
        shift: bool = False,
    ) -> None:
        self.dropped = 0  # messages
        self.shift = shift
        self._messages = messages
        self._tools = tools
        self._think = think
        self._strict = strict
        self._variables = variables
        self._most_calls = None if parallel_calls else 1
        self._speech: AnswerParser | None = None
        self._id_length = 0
        self._calls = 0

    def prepare(self, engine: Engine) -> list[int]:
        """Return the prompt. Raises TemplateError, BadRequest for a feature it lacks."""
        template = engine.tokenizer.chat_template
        if self._tools and not knows_tools(template):
            raise BadRequest(f"{engine.info.name} does not support tools")
        if self._strict and self._think and not thinks(template):
            raise BadRequest(f"{engine.info.name} does not support thinking")
        refuse_sources(engine)
        ids = self._shifted(engine) if self.shift else self._ids(engine, self._messages)
        if template is not None:
            self._speech = AnswerParser(template, engine.tokenizer.tail(ids), self._tools)
            form = format_of(template)
            self._id_length = form.id_length if form is not None else 0
        return ids

    def _ids(self, engine: Engine, messages: Sequence[Message]) -> list[int]:
        return chat_prompt(engine, messages, self._tools, self._think, variables=self._variables)

    def _shifted(self, engine: Engine) -> list[int]:
        said = self._messages
        kept, ids = latest_turns(
            said,
            Limits(context=self.context).context_in(engine.info.context),
            lambda kept: self._ids(engine, [said[place] for place in kept]),
        )
        self.dropped = len(said) - len(kept)
        return ids

    @property
    def held(self) -> int:
        return 0 if self._speech is None else self._speech.held

    def parse(self, text: str) -> Iterator[Part]:
        if self._speech is None:
            yield from super().parse(text)
        else:
            yield from self._numbered(self._speech.add(text))

    def end(self) -> Iterator[Part]:
        if self._speech is not None:
            yield from self._numbered(self._speech.rest())

    def _numbered(self, said: Iterator[AnswerPart]) -> Iterator[Part]:
        for part in said:
            if not isinstance(part, Call):
                yield part
            elif self._most_calls is None or self._calls < self._most_calls:
                name = "".join(secrets.choice(_ID) for _ in range(self._id_length or 24))
                yield ToolCall(name if self._id_length else f"call_{name}", self._calls, part)
                self._calls += 1


async def begun(
    request: HttpRequest, model: str, job: Job, turn: Text
) -> tuple[Loaded, AsyncIterator[AnswerPiece | Reading | Ended | Failed]]:
    """Load the model and submit the job; return the answer's events once the first has come.

    Raises what ModelManager.model and events raise. If the first event is Failed, raises its error:
    the HTTP status can still report it.
    """
    host: ModelManager = request.app.state.host
    loaded = await host.model(model)
    answer = events(loaded, job, request)
    first = await anext(answer)
    if isinstance(first, Failed):
        raise first.error
    return loaded, parsed(first, answer, turn)


async def parsed(
    first: Event, answer: AsyncGenerator[Event], turn: Text
) -> AsyncIterator[AnswerPiece | Reading | Ended | Failed]:
    """Yield an answer's events with its text in parts; the last is Ended or Failed."""
    event = first
    while isinstance(event, Piece | Reading):
        if isinstance(event, Reading):
            yield event
        else:
            long = turn.held + len(event.text) > FREE_BYTES
            parts = await in_thread(turn.parts, event.text) if long else turn.parts(event.text)
            yield AnswerPiece(parts, event.info, event.tokens)
        event = await anext(answer)
    assert isinstance(event, Ended | Failed)  # vectors are of jobs that embed
    rest = await in_thread(turn.last_parts) if turn.held > FREE_BYTES else turn.last_parts()
    if rest:
        yield AnswerPiece(rest)
    yield event


def experts_since(loaded: Loaded) -> Callable[[], dict[str, int]]:
    """Return a function that counts the uses of experts from now on, by all requests."""
    engine = loaded.worker.engine
    if engine is None:
        return dict
    before = engine.store.stats.copy()

    def told() -> dict[str, int]:
        since = engine.store.stats.since(before)
        return {
            "expert_uses": since.decode_events + since.prefill_events,
            "expert_hits": since.decode_hits + since.prefill_hits,
            "expert_bytes_read": since.bytes_read,
        }

    return told


def progress_of(event: Reading) -> dict[str, int]:
    """Return the progress of a prompt with the names of llama.cpp's server."""
    return {
        "total": event.tokens,
        "cache": in_blocks(event.cached),
        "processed": event.read if event.read == event.tokens else in_blocks(event.read),
        "time_ms": round(event.seconds * 1e3),
    }


def called_ollama(called: ToolCall) -> dict[str, Any]:
    """Return a call in Ollama's form: arguments are values."""
    call = called.call
    function = {"index": called.index, "name": call.name, "arguments": call.arguments}
    return {"id": called.id, "function": function}
