"""Answers that must follow a grammar: JSON, JSON of a schema, or a call of a tool.

Does not know APIs. Grammars are compiled and matched in processes of their own
(grammar_processes.py). Thinking is free: the grammar begins where the answer does, and an answer
cannot end before it has
begun.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from moeinf.runtime.sampling.grammar_processes import Matching
from moeinf.runtime.sampling.schema_limits import MOST_BYTES, check_schema
from moeinf.runtime.sampling.schema_limits import BadFormat as BadFormat
from moeinf.runtime.text.reasoning import CLOSE, OPEN, parser_for, thinks
from moeinf.runtime.text.tool_calls import Tool, format_of, names_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from moeinf.runtime.sampling.grammar_processes import Grammars
    from moeinf.runtime.text.tokenizer import Tokenizer

_ANY_JSON = {"type": "object"}
# One space at most, after a comma or a colon: models write "a": 1 as well as "a":1, and one that is
# free to write spaces may never stop.
_SPACES = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_MOST_GRAMMAR_BYTES = 2 * MOST_BYTES  # of all tools' schemas, escapes included
Logits: TypeAlias = "NDArray[np.float32]"


class Ends(Protocol):
    """The facts of an engine that matter here."""

    @property
    def ends(self) -> Collection[int]: ...


class Answering(Protocol):
    """The parts of an engine that hold its answers to a grammar."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def grammars(self) -> Grammars: ...

    @property
    def info(self) -> Ends: ...


class Constraint(Protocol):
    """A grammar that an answer must follow. Every method raises BadFormat when it cannot."""

    def ready(self, seconds: float = 0.0) -> bool:
        """Wait, `seconds` at most, until `mask` does not block. False: it would."""
        ...

    def mask(self, logits: Logits) -> Logits:
        """logits [vocab] with -inf for what may not come now."""
        ...

    def took(self, token: int) -> None:
        """Go on behind the token that was chosen."""
        ...

    def close(self) -> None:
        """Give back what the answer has used."""
        ...


Constrain: TypeAlias = "Callable[[Answering, Sequence[int]], Constraint]"  # after a prompt's tokens


def json_of(form: str | dict[str, Any] | None, tools: Sequence[Tool] = ()) -> Constrain | None:
    """An answer in JSON: "json" for any object, or a schema; {} for any value. None and "" are no
    constraint.

    With tools the answer may be a call instead, where a single token begins one. Raises BadFormat
    for a schema beyond the limits.
    """
    if form is None or form == "":
        return None
    grammar = grammar_of(_ANY_JSON if isinstance(form, str) else form)

    def constrain(engine: Answering, prompt: Sequence[int]) -> Constraint:
        mark = format_of(engine.tokenizer.chat_template) if tools else None
        call = engine.tokenizer.token_id(mark.open) if mark is not None else None
        return _Grammar(engine, prompt, grammar, call)

    return constrain


def call_of_one(tools: Sequence[Tool]) -> Constrain:
    """An answer that calls one of `tools`, with arguments that its schema allows.

    Raises BadFormat for schemas beyond the limits.
    """
    arguments = [
        f"arguments_{number}: {_json(tool['function'].get('parameters') or _ANY_JSON)}"
        for number, tool in enumerate(tools)
    ]
    _checked(arguments)

    def constrain(engine: Answering, prompt: Sequence[int]) -> Constraint:
        template = engine.tokenizer.chat_template or ""
        form = format_of(template)
        if form is None or form.write is None or any(mark in template for mark in form.unless):
            raise BadFormat(
                "tool_choice: calls of this model cannot be forced; auto and none are possible"
            )
        lines = [f"start: {' | '.join(f'call_{i}' for i in range(len(tools)))}", *arguments]
        for number, name in enumerate(names_of(tools)):
            before, after = form.write(name)
            lines.append(f"call_{number}: {_quoted(before)} arguments_{number} {_quoted(after)}")
        return _Grammar(engine, prompt, _checked(lines))

    return constrain


class _Grammar:
    """One answer's way through a grammar, its thinking left out.

    call: a token that may come in the answer's place, and after which nothing is held to anything.
    """

    def __init__(
        self, engine: Answering, prompt: Sequence[int], grammar: str, call: int | None = None
    ) -> None:
        self._matching = Matching(engine.grammars, grammar)
        tokenizer = engine.tokenizer
        before = tokenizer.tail(list(prompt))
        self._ends = sorted(engine.info.ends)
        self._stream = tokenizer.stream(list(prompt))
        self._parser = parser_for(tokenizer.chat_template, before)
        self._call = call
        self._called = False
        self._begun = False  # the grammar has taken a token
        may_think = thinks(tokenizer.chat_template) and not before.rstrip().endswith(CLOSE)
        self._think = tokenizer.token_id(OPEN) if may_think else None

    def ready(self, seconds: float = 0.0) -> bool:
        return self._called or self._matching.ready(seconds)

    def mask(self, logits: Logits) -> Logits:
        import numpy as np

        if self._called:
            return logits
        if not self._parser.answering:
            free = logits.copy()
            free[self._ends] = -np.inf
            return free
        allowed = self._matching.allowed()
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
            self._matching.took(token)
            return
        for _ in self._parser.add(self._stream.add(token)):
            pass

    def close(self) -> None:
        self._matching.close()


def grammar_of(schema: Mapping[str, Any]) -> str:
    """The grammar of a schema's values. Raises BadFormat for a schema beyond the limits."""
    return _checked([f"start: {_json(schema)}"])


def _json(schema: Mapping[str, Any]) -> str:
    """The part of a grammar that stands for a schema's values. Raises BadFormat."""
    check_schema(schema)
    return f"%json {json.dumps({**schema, 'x-guidance': _SPACES})}"


def _checked(lines: Sequence[str]) -> str:
    """A grammar. Raises BadFormat when it is too long."""
    grammar = "\n".join(lines)
    if len(grammar) > _MOST_GRAMMAR_BYTES:
        raise BadFormat(
            f"format: the schemas have {len(grammar)} bytes (at most {_MOST_GRAMMAR_BYTES})"
        )
    return grammar


def _quoted(text: str) -> str:
    """A string of a grammar."""
    return json.dumps(text)
