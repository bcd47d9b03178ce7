"""Limit the number of items in the lists of a request.

An error names only the first invalid item. An error for each item would take a hundred times the
body's memory.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import Field

Item = TypeVar("Item")
MOST_FIELDS = 256  # of an object, unknown ones included
MOST_STOPS = 256
MOST_STOP = 1024  # characters; each token's text is compared with the prefixes of all stop texts

# Listed: messages, calls, tools, parts of texts. Few: stop texts. Inputs: texts to embed, with
# OpenAI's limit.
Listed = Annotated[list[Item], Field(fail_fast=True, max_length=4096)]
StopText = Annotated[str, Field(max_length=MOST_STOP)]
Few = Annotated[list[Item], Field(fail_fast=True, max_length=MOST_STOPS)]
Inputs = Annotated[list[Item], Field(fail_fast=True, max_length=2048)]
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True, max_length=1 << 20)]
