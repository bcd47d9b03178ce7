"""Answers that must follow a grammar: JSON, or JSON of a schema.

Does not know APIs. llguidance compiles the grammar and says which tokens may come next.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.runtime.engine import Engine
from moeinf.server.answers import BadRequest
from moeinf.server.jobs import Constraint

_ANY_JSON = {"type": "object"}


def constraint_of(form: str | dict[str, Any] | None) -> Callable[[Engine], Constraint] | None:
    """What a job takes as `constrain`: for "json" or a schema. None and "" are no constraint."""
    if not form:
        return None
    schema = _ANY_JSON if isinstance(form, str) else form
    return lambda engine: JsonConstraint(engine, schema)


class JsonConstraint:
    """One answer's way through the grammar. Raises BadRequest for a schema that is none."""

    def __init__(self, engine: Engine, schema: dict[str, Any]) -> None:
        from llguidance import LLMatcher
        from llguidance.numpy import allocate_token_bitmask

        self._tokenizer = _tokenizer_of(engine)
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        self._matcher = LLMatcher(self._tokenizer, grammar)
        if self._matcher.is_error():
            raise BadRequest(f"format: {self._matcher.get_error()}")
        self._bits = allocate_token_bitmask(1, self._tokenizer.vocab_size)

    def mask(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._bits, 0)
        allowed = np.unpackbits(self._bits[0].view(np.uint8), bitorder="little").astype(bool)
        masked = np.full_like(logits, -np.inf)
        count = min(len(allowed), len(logits))
        masked[:count] = np.where(allowed[:count], logits[:count], -np.inf)
        return masked

    def took(self, token: int) -> None:
        self._matcher.consume_token(token)


_TOKENIZERS: dict[str, Any] = {}  # by model: building one takes as long as reading a vocabulary


def _tokenizer_of(engine: Engine) -> Any:
    from llguidance import LLTokenizer

    key = f"{engine.manifest.model}@{engine.manifest.created_at}"
    if key not in _TOKENIZERS:
        text = (engine.folder / "tokenizer.json").read_text(encoding="utf-8")
        _TOKENIZERS[key] = LLTokenizer(text, eos_token=min(engine.ends) if engine.ends else None)
    return _TOKENIZERS[key]
