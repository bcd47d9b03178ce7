"""Hostile JSON schemas, for the fuzzer: limited, compiled, and followed for some tokens.

targets.py lists this one.
"""

from __future__ import annotations

import atexit
import json
import random
import re
from contextlib import closing
from functools import cache
from pathlib import Path
from zlib import crc32

import numpy as np

from moeinf.cli.chat.backends import parse_form
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.runtime.sampling.grammar import grammar_of
from moeinf.runtime.sampling.grammar_processes import Grammars, Matching
from moeinf.runtime.sampling.schema_limits import BadFormat
from moeinf.runtime.text.tokenizer import Tokenizer

_END = 4
_STEPS = 24
_SCHEMAS = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 9.5}, "maxItems": 3},
    {"type": "string", "pattern": "^[a-z]{2,5}$"},
    {"type": "string", "minLength": 2, "maxLength": 9, "format": "date-time"},
    {"enum": [1, "b", None, [2], {"c": 3}], "x-guidance": {"whitespace_flexible": True}},
    {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}},
    {"anyOf": [{"const": "x"}, {"type": ["null", "boolean"]}], "not": {"const": "y"}},
    {"oneOf": [{"type": "object", "additionalProperties": {"type": "integer"}}, {"$ref": "#"}]},
    {"allOf": [{"type": "string", "pattern": f".*{x}.{{1}}y.*"} for x in "abc"]},
    {"type": "object", "patternProperties": {"^x": {"type": "integer", "multipleOf": 7}}},
    {"type": "array", "prefixItems": [{"type": "integer"}, {}], "minItems": 2, "uniqueItems": True},
    {"allOf": [{"type": "string", "pattern": f".*{x}.{{1}}y.*"} for x in "abcdef"]},
)


def seeds() -> list[bytes]:
    return [json.dumps(schema).encode() for schema in _SCHEMAS]


@cache
def _demo() -> tuple[Grammars, Tokenizer]:
    found = Grammars(DEMO_CHECKPOINT / "tokenizer.json", _END)
    atexit.register(found.close)
    return found, Tokenizer(DEMO_CHECKPOINT)


def follow(data: bytes, folder: Path) -> None:
    """Follow a random path through the grammar.

    White space must be single spaces, and the end must be JSON. Raises BadFormat for a schema that
    is refused before, during or after compilation.
    """
    text = data.decode(errors="replace")
    if not text.lstrip().startswith("{"):
        raise BadFormat("format: a JSON schema is an object")
    schema = parse_form(text)
    assert isinstance(schema, dict)
    grammars, tokenizer = _demo()
    choose, ids, ended = random.Random(crc32(data)), list[int](), False
    with closing(Matching(grammars, grammar_of(schema))) as answer:
        while len(ids) < _STEPS:
            allowed = np.flatnonzero(answer.allowed())
            if not len(allowed) or (ended := _END in allowed):
                break
            ids.append(int(choose.choice(allowed)))
            answer.took(ids[-1])
    said = tokenizer.decode(ids)
    if ended and "\ufffd" not in said:
        json.loads(said)
    outside = re.sub(r'"(\\.|[^"\\])*("|$)', '""', said)
    assert not re.search(r"\s\s|[^,:]\s|^\s", outside), said


TARGET = (follow, (BadFormat,), seeds)
