"""A conversation: messages in, answers out, the KV cache of earlier turns reused.

Does not know terminals or HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moeinf.models.base import State
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.engine.generate import Generation, Limits
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.requests import Form
from moeinf.runtime.requests import Message as Message
from moeinf.runtime.requests import PromptTooLong as PromptTooLong
from moeinf.runtime.sampling.grammar import json_of
from moeinf.runtime.sampling.sampler import Sampler, SamplingOptions
from moeinf.runtime.text.reasoning import Kind, Parser, parser_for, thinking_variables

_ANSWER_SHARE = 8  # an eighth of the context is kept for the answer when turns are dropped


class Conversation:
    """Messages with one model and the KV cache behind them."""

    def __init__(self, engine: Engine, system: str = "", now: str | None = None) -> None:
        self._engine = engine
        self._now = now
        self._state: State | None = None
        self._parser: Parser | None = None  # of the answer that is under way; None: it is raw
        self._cached: list[int] = []  # the tokens that the state holds
        self.system = system
        self.think: bool | None = None  # what templates that ask are told; None: their default
        self.form: Form = None  # what answers must be
        self.messages: list[Message] = []
        self.dropped = 0  # messages that no longer fit the context, since the last clear

    @property
    def cached_tokens(self) -> int:
        return len(self._cached)

    def clear(self) -> None:
        """Forgets every turn; the system message stays."""
        self.messages.clear()
        self.dropped = 0

    def ask(
        self,
        text: str,
        options: SamplingOptions,
        limits: Limits,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Generation:
        """Prepares the answer to a user message; iterate it for the text.

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
        """Continues `text` itself, without template and turns."""
        ids = self._engine.tokenizer.encode_text(text)
        self._check_length(ids)
        self._parser = None
        return self._answer(ids, options, limits, stopped)

    def pieces(self, answer: Generation) -> Iterator[tuple[Kind, str]]:
        """The answer that `ask` or `complete` has prepared, with what is only thought apart."""
        parser = self._parser
        if parser is None:
            yield from (("answer", piece) for piece in answer if piece)
            return
        for piece in answer:
            yield from parser.add(piece)
        yield from parser.rest()

    def prompt(self, messages: list[Message]) -> list[int]:
        """Token ids of a whole conversation, ending where the answer begins."""
        engine = self._engine
        tokenizer = engine.tokenizer
        turns = [Message("system", self.system), *messages] if self.system else messages
        if engine.template is None:  # a base model: it continues the text
            text = "\n\n".join(turn.content for turn in turns)
            return tokenizer.encode_text(text, plain=True)
        rendered = engine.template.render(
            [{"role": turn.role, "content": tokenizer.guard(turn.content)} for turn in turns],
            add_generation_prompt=True,
            bos_token=tokenizer.bos or "",
            eos_token=tokenizer.eos or "",
            **({"now": self._now} if self._now else {}),
            **thinking_variables(self.think),
        )
        return tokenizer.encode_rendered(rendered)

    def _fit(self, messages: list[Message]) -> tuple[list[Message], list[int]]:
        """Drops the oldest turns until there is room for an answer."""
        context = self._engine.info.context
        ids = self.prompt(messages)
        while len(ids) > context - context // _ANSWER_SHARE and len(messages) > 1:
            later = [i for i, m in enumerate(messages) if m.role == "user" and i > 0]
            messages = messages[later[0] :]
            ids = self.prompt(messages)
        self._check_length(ids)
        return messages, ids

    def _check_length(self, ids: list[int]) -> None:
        context = self._engine.info.context
        if not ids:
            raise InvalidValue("there is nothing to answer: the prompt has no tokens")
        if len(ids) >= context:
            raise PromptTooLong(f"the prompt has {len(ids)} tokens, the context {context}")

    def _answer(
        self,
        ids: list[int],
        options: SamplingOptions,
        limits: Limits,
        stopped: Callable[[], bool],
        question: Message | None = None,
    ) -> Generation:
        if self._state is None:
            self._state = self._engine.new_state()
        # At least one token is computed anew: its logits are what the answer starts from.
        known = min(_common_prefix(self._cached, ids), len(ids) - 1)
        self._state.truncate(known)
        self._cached = ids[: self._state.length]
        sampler = Sampler(options, self._engine.info.sampling)
        constrain = json_of(self.form)
        constraint = None if constrain is None else constrain(self._engine, ids)

        def settle(generation: Generation) -> None:
            """Question and answer become part of the conversation together, or not at all."""
            self._cached = generation.cached
            if question is not None and not generation.failed:
                said = self._said(ids, generation.text)
                self.messages += [question, Message("assistant", said)]

        return Generation(
            self._engine, self._state, ids, sampler, limits, stopped, settle, constraint=constraint
        )

    def _new_parser(self, prompt: list[int]) -> Parser:
        tokenizer = self._engine.tokenizer
        return parser_for(tokenizer.chat_template, tokenizer.tail(prompt))

    def _said(self, prompt: list[int], text: str) -> str:
        """An answer without its thinking: no template wants that of an earlier turn back."""
        parser = self._new_parser(prompt)
        parts = [*parser.add(text), *parser.rest()]
        return "".join(part for kind, part in parts if kind == "answer")


def _common_prefix(a: list[int], b: list[int]) -> int:
    for place, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return place
    return min(len(a), len(b))
