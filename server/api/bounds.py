"""How many items the lists of a request have.

Does not know endpoints. The first wrong item is the only one that an error names: an error for each
would take a hundred times the body's memory.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import Field

Item = TypeVar("Item")
MOST_FIELDS = 256  # of an object, unknown ones among them
MOST_STOPS = 256
MOST_STOP = 1024  # characters: each token's text is compared with the beginnings of all of them

# Messages, calls, tools and parts of texts; stop texts; what is embedded, as OpenAI has it.
Listed = Annotated[list[Item], Field(fail_fast=True, max_length=4096)]
StopText = Annotated[str, Field(max_length=MOST_STOP)]
Few = Annotated[list[Item], Field(fail_fast=True, max_length=MOST_STOPS)]
Inputs = Annotated[list[Item], Field(fail_fast=True, max_length=2048)]
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True, max_length=1 << 20)]
