"""Answers that must follow a grammar: JSON, JSON of a schema, or a call of a tool.

Does not know APIs. llguidance compiles the grammar and says which tokens may come next. Thinking is
free: the grammar begins where the answer does, and an answer cannot end before it has begun.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from moeinf.runtime.thinking import CLOSE, OPEN, parser_for, thinks
from moeinf.runtime.tools import Tool, format_of, names_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from moeinf.runtime.engine import Engine

_ANY_JSON = {"type": "object"}
Logits: TypeAlias = "NDArray[np.float32]"


class BadFormat(ValueError):
    """A schema that is none, or a form that this model cannot be held to."""


class Constraint(Protocol):
    """A grammar that an answer must follow. Raises BadFormat when it is lost within the answer."""

    def mask(self, logits: Logits) -> Logits:
        """logits [vocab] with -inf for what may not come now."""
        ...

    def took(self, token: int) -> None:
        """The token that was chosen."""
        ...


Constrain: TypeAlias = "Callable[[Engine, Sequence[int]], Constraint]"  # after a prompt's tokens


def json_of(form: str | dict[str, Any] | None, tools: Sequence[Tool] = ()) -> Constrain | None:
    """An answer in JSON: "json" for any object, or a schema; {} for any value. None and "" are no
    constraint.

    With tools the answer may be a call instead, where a single token begins one.
    """
    if form is None or form == "":
        return None
    schema = _ANY_JSON if isinstance(form, str) else form

    def constrain(engine: Engine, prompt: Sequence[int]) -> Constraint:
        from llguidance import LLMatcher

        mark = format_of(engine.tokenizer.chat_template) if tools else None
        call = engine.tokenizer.token_id(mark.open) if mark is not None else None
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        return _Grammar(engine, prompt, grammar, call)

    return constrain


def call_of_one(tools: Sequence[Tool]) -> Constrain:
    """An answer that calls one of `tools`, with arguments that its schema allows."""

    def constrain(engine: Engine, prompt: Sequence[int]) -> Constraint:
        from llguidance import LLMatcher

        template = engine.tokenizer.chat_template or ""
        form = format_of(template)
        if form is None or form.write is None or any(mark in template for mark in form.unless):
            raise BadFormat(
                "tool_choice: calls of this model cannot be forced; auto and none are possible"
            )
        lines = [f"start: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
        for number, (tool, name) in enumerate(zip(tools, names_of(tools), strict=True)):
            before, after = form.write(name)
            schema = tool["function"].get("parameters") or _ANY_JSON
            lines.append(f"call_{number}: {_quoted(before)} arguments_{number} {_quoted(after)}")
            lines.append(f"arguments_{number}: %json {json.dumps(schema)}")
        return _Grammar(engine, prompt, LLMatcher.grammar_from_lark("\n".join(lines)))

    return constrain


class _Grammar:
    """One answer's way through a grammar. Raises BadFormat for a grammar that is none.

    call: a token that may come in the answer's place, and after which nothing is held to anything.
    """

    def __init__(
        self, engine: Engine, prompt: Sequence[int], grammar: str, call: int | None = None
    ) -> None:
        from llguidance import LLMatcher
        from llguidance.numpy import allocate_token_bitmask

        llguidance = _tokenizer_of(engine)
        self._matcher = LLMatcher(llguidance, grammar)
        self._check()
        self._bits = allocate_token_bitmask(1, llguidance.vocab_size)
        tokenizer = engine.tokenizer
        before = tokenizer.tail(list(prompt))
        self._ends = sorted(engine.ends)
        self._stream = tokenizer.stream(list(prompt))
        self._parser = parser_for(tokenizer.chat_template, before)
        self._call = call
        self._called = False
        self._begun = False  # the grammar has taken a token
        may_think = thinks(tokenizer.chat_template) and not before.rstrip().endswith(CLOSE)
        self._think = tokenizer.token_id(OPEN) if may_think else None

    def mask(self, logits: Logits) -> Logits:
        import numpy as np
        from llguidance.numpy import fill_next_token_bitmask

        if self._called:
            return logits
        if not self._parser.answering:
            free = logits.copy()
            free[self._ends] = -np.inf
            return free
        fill_next_token_bitmask(self._matcher, self._bits, 0)
        self._check()  # it may be too much to go on with, and then only an end would be allowed
        allowed = np.unpackbits(self._bits[0].view(np.uint8), bitorder="little").astype(bool)
        masked = np.full_like(logits, -np.inf)
        count = min(len(allowed), len(logits))
        masked[:count] = np.where(allowed[:count], logits[:count], -np.inf)
        if not self._begun:
            doors = [token for token in (self._think, self._call) if token is not None]
            masked[doors] = logits[doors]
        return masked

    def took(self, token: int) -> None:
        if self._called:
            return
        if not self._begun and token in (self._think, self._call):
            self._called = token == self._call
            self._think = None
        elif self._parser.answering:
            self._begun = True
            self._matcher.consume_token(token)
            self._check()
            return
        for _ in self._parser.add(self._stream.add(token)):
            pass

    def _check(self) -> None:
        if self._matcher.is_error():
            raise BadFormat(f"format: {self._matcher.get_error()}"[:500])


def _quoted(text: str) -> str:
    """A string of a grammar."""
    return json.dumps(text)


_TOKENIZERS: dict[str, Any] = {}  # by model: building one takes as long as reading a vocabulary


def _tokenizer_of(engine: Engine) -> Any:
    from llguidance import LLTokenizer

    key = f"{engine.manifest.model}@{engine.manifest.created_at}"
    if key not in _TOKENIZERS:
        text = (engine.folder / "tokenizer.json").read_text(encoding="utf-8")
        _TOKENIZERS[key] = LLTokenizer(text, eos_token=min(engine.ends) if engine.ends else None)
    return _TOKENIZERS[key]
