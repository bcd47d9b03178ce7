"""Constrain answers to a grammar: JSON, JSON of a schema, or a tool call.

Separate processes compile and match grammars (grammar_processes.py). Thinking is not constrained.
The grammar starts with the answer, and the answer cannot end before it has started.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from moeinf.runtime.sampling.grammar_processes import Matching
from moeinf.runtime.sampling.schema_limits import MOST_BYTES, check_schema
from moeinf.runtime.sampling.schema_limits import BadFormat as BadFormat
from moeinf.runtime.text.offered_tools import Tool, names_of
from moeinf.runtime.text.reasoning import marks_of, parser_for, thinks
from moeinf.runtime.text.tool_calls import format_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moeinf.runtime.sampling.grammar_processes import Grammars
    from moeinf.runtime.text.tokenizer import Tokenizer

_ANY_JSON = {"type": "object"}
# Allow at most one space after a comma or a colon. Models write "a": 1 as well as "a":1. A model
# that may write any number of spaces may never stop.
_SPACES = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_MOST_GRAMMAR_BYTES = 2 * MOST_BYTES  # of all tools' schemas together, escapes included
Logits: TypeAlias = "NDArray[np.float32]"


class Ends(Protocol):
    """The engine facts that a grammar needs."""

    @property
    def ends(self) -> Collection[int]: ...


class Answering(Protocol):
    """The parts of an engine that a grammar needs."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def grammars(self) -> Grammars: ...

    @property
    def info(self) -> Ends: ...


class Constraint(Protocol):
    """A grammar for one answer. Every method raises BadFormat if the grammar fails."""

    def ready(self, seconds: float = 0.0) -> bool:
        """Wait at most `seconds` until `mask` does not block; return False if it would."""
        ...

    def mask(self, logits: Logits) -> Logits:
        """Return logits [vocab] with -inf for every token that the grammar forbids now."""
        ...

    def took(self, token: int) -> None:
        """Advance the grammar past the chosen token."""
        ...

    def close(self) -> None:
        """Release the resources of the answer."""
        ...


Constrain: TypeAlias = "Callable[[Answering, Sequence[int]], Constraint]"  # after a prompt's tokens


def json_of(form: str | dict[str, Any] | None, tools: Sequence[Tool] = ()) -> Constrain | None:
    """Return a constraint to JSON: "json" for any object, a schema, or {} for any value.

    Return None, no constraint, for None and "". With tools the answer may also be a call, if
    a single token begins a call. Raises BadFormat for another text, and for a schema beyond the
    limits.
    """
    if form is None or form == "":
        return None
    if isinstance(form, str) and form != "json":
        raise BadFormat(f"format: {form[:80]!r} is invalid (expected json or a JSON schema)")
    grammar = grammar_of(_ANY_JSON if isinstance(form, str) else form)

    def constrain(engine: Answering, prompt: Sequence[int]) -> Constraint:
        mark = format_of(engine.tokenizer.chat_template) if tools else None
        call = engine.tokenizer.token_id(mark.open) if mark is not None else None
        return _Grammar(engine, prompt, grammar, call)

    return constrain


def call_of_one(tools: Sequence[Tool]) -> Constrain:
    """Return a constraint to one call of `tools`, with arguments that the schema allows.

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
            end = _quoted(after) if after else ""
            lines.append(f"call_{number}: {_quoted(before)} arguments_{number} {end}")
        return _Grammar(engine, prompt, _checked(lines))

    return constrain


class _Grammar:
    """The state of one answer in a grammar. Thinking is skipped.

    call: a token that may begin the answer instead; after it, nothing is constrained.
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
        opening, closing = marks_of(tokenizer.chat_template)
        may_think = thinks(tokenizer.chat_template) and not before.rstrip().endswith(closing)
        self._think = tokenizer.token_id(opening) if may_think else None

    def ready(self, seconds: float = 0.0) -> bool:
        return self._called or self._matching.ready(seconds)

    def mask(self, logits: Logits) -> Logits:
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
    """Return the grammar of a schema's values. Raises BadFormat for a schema beyond the limits."""
    return _checked([f"start: {_json(schema)}"])


def _json(schema: Mapping[str, Any]) -> str:
    """Return the grammar fragment for a schema's values. Raises BadFormat."""
    check_schema(schema)
    return f"%json {json.dumps({**schema, 'x-guidance': _SPACES})}"


def _checked(lines: Sequence[str]) -> str:
    """Join lines into a grammar. Raises BadFormat if it is too long."""
    grammar = "\n".join(lines)
    if len(grammar) > _MOST_GRAMMAR_BYTES:
        raise BadFormat(
            f"format: the schemas have {len(grammar)} bytes (at most {_MOST_GRAMMAR_BYTES})"
        )
    return grammar


def _quoted(text: str) -> str:
    """Quote a string for a grammar."""
    return json.dumps(text)
