"""Limit the number of items in the lists of a request.

An error names only the first invalid item. An error for each item would take a hundred times the
body's memory.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BeforeValidator, Field

from moeinf.runtime.ollama_options import MOST_STOP, MOST_STOPS

Item = TypeVar("Item")
MOST_FIELDS = 256  # of an object, unknown ones included


def _of_few_fields(value: object) -> object:
    """Refuse an object of many fields before each is checked: pydantic keeps every error."""
    if isinstance(value, dict) and len(value) > MOST_FIELDS:
        raise ValueError(f"at most {MOST_FIELDS} fields are taken")
    return value


# Listed: messages, calls, tools, parts of texts. Named: files by name. Few: stop texts. Inputs:
# texts to embed, with OpenAI's limit.
Listed = Annotated[list[Item], Field(fail_fast=True, max_length=4096)]
StopText = Annotated[str, Field(max_length=MOST_STOP)]
Named = Annotated[dict[str, Item], BeforeValidator(_of_few_fields)]
Few = Annotated[list[Item], Field(fail_fast=True, max_length=MOST_STOPS)]
Inputs = Annotated[list[Item], Field(fail_fast=True, max_length=2048)]
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True, max_length=1 << 20)]
