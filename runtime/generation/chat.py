"""A conversation: messages in, answers out, the KV cache of earlier turns reused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.events import Request
from moeinf.runtime.generation.generate import Generation
from moeinf.runtime.generation.prompts import chat_prompt, check_length, text_prompt
from moeinf.runtime.generation.scheduler import Scheduler
from moeinf.runtime.generation.turns import latest_turns
from moeinf.runtime.requests import Form, Limits, SamplingOptions
from moeinf.runtime.requests import Message as Message
from moeinf.runtime.requests import PromptTooLong as PromptTooLong
from moeinf.runtime.sampling.grammar import json_of
from moeinf.runtime.text.reasoning import Kind, Parser, parser_for


class Conversation:
    """A conversation with one model, and its KV cache."""

    def __init__(self, engine: Engine, system: str = "", now: str | None = None) -> None:
        self._engine = engine
        self._now = now
        self._scheduler: Scheduler | None = None  # with one place, used by this conversation alone
        self._parser: Parser | None = None  # of the answer in progress; None: it is raw
        self.system = system
        self.think: bool | None = None  # for templates with a thinking switch; None: their default
        self.form: Form = None  # the required form of answers
        self.messages: list[Message] = []
        self.dropped = 0  # messages that no longer fit the context, since the last clear
        self.kept = False  # see Request
        self.reading: Callable[[int, int], None] = lambda _read, _all: None  # see Request

    @property
    def cached_tokens(self) -> int:
        return 0 if self._scheduler is None else self._scheduler.cached_tokens

    def clear(self) -> None:
        """Forget every turn; the system message stays."""
        self.messages.clear()
        self.dropped = 0

    def release(self) -> None:
        """Free the KV cache; the next answer computes its whole prompt."""
        self._scheduler = None

    def ask(
        self,
        text: str,
        options: SamplingOptions,
        limits: Limits,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Generation:
        """Prepare the answer to a user message; iterate it for the text.

        The oldest turns are dropped (and counted in `dropped`) when the context would overflow.
        Raises PromptTooLong when even this message alone does not fit, TemplateError.
        """
        asked, ids = self._fit([*self.messages, Message("user", text)])
        self._parser = self._new_parser(ids)
        self.dropped += len(self.messages) + 1 - len(asked)
        self.messages = asked[:-1]
        return self._answer(ids, options, limits, stopped, asked[-1])

    def complete(
        self,
        text: str,
        options: SamplingOptions,
        limits: Limits,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Generation:
        """Continue `text` itself, without template and turns."""
        ids = text_prompt(self._engine, text)
        check_length(ids, self._engine.info.context)
        self._parser = None
        return self._answer(ids, options, limits, stopped)

    def pieces(self, answer: Generation) -> Iterator[tuple[Kind, str]]:
        """Yield the answer that `ask` or `complete` has prepared, with its thinking separate."""
        parser = self._parser
        if parser is None:
            yield from (("answer", piece) for piece in answer if piece)
            return
        for piece in answer:
            yield from parser.add(piece)
        yield from parser.rest()

    def prompt(self, messages: list[Message]) -> list[int]:
        """Return token ids of a whole conversation, ending where the answer begins."""
        turns = [Message("system", self.system), *messages] if self.system else messages
        said = [{"role": turn.role, "content": turn.content} for turn in turns]
        return chat_prompt(self._engine, said, think=self.think, now=self._now)

    def _fit(self, messages: list[Message]) -> tuple[list[Message], list[int]]:
        """Drop the oldest turns until there is room for an answer."""
        kept, ids = latest_turns(
            [{"role": message.role} for message in messages],
            self._engine.info.context,
            lambda kept: self.prompt([messages[place] for place in kept]),
        )
        return [messages[place] for place in kept], ids

    def _answer(
        self,
        ids: list[int],
        options: SamplingOptions,
        limits: Limits,
        stopped: Callable[[], bool],
        question: Message | None = None,
    ) -> Generation:
        def settle(generation: Generation) -> None:
            """Append question and answer to the conversation together, or not at all."""
            if question is not None and not generation.failed:
                said = self._said(ids, generation.text)
                self.messages += [question, Message("assistant", said)]

        constrain = json_of(self.form)
        request = Request(
            lambda _: ids,
            options,
            limits,
            constrain=constrain,
            stopped=stopped,
            kept=self.kept,
            reading=self.reading,
        )
        return self._generation(request, settle)

    def _generation(self, request: Request, settle: Callable[[Generation], None]) -> Generation:
        if self._scheduler is None:
            self._scheduler = Scheduler(self._engine)
        return Generation(self._engine, self._scheduler, request, settle)

    def _new_parser(self, prompt: list[int]) -> Parser:
        tokenizer = self._engine.tokenizer
        return parser_for(tokenizer.chat_template, tokenizer.tail(prompt))

    def _said(self, prompt: list[int], text: str) -> str:
        """Return an answer without its thinking, which templates do not take from earlier turns."""
        parser = self._new_parser(prompt)
        parts = [*parser.add(text), *parser.rest()]
        return "".join(part for kind, part in parts if kind == "answer")
