"""Who answers `run`: an engine of this process, or a server. What a conversation needs of either.

Does not know how answers are made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from moeinf.runtime.names import ModelName
from moeinf.runtime.requests import Form, Limits, Message, SamplingOptions
from moeinf.runtime.sampling.schema_limits import MOST_BYTES, BadFormat, check_schema

Pieces = Iterator[tuple[Literal["thinking", "answer"], str]]
Fields = list[tuple[str, str]]
_MOST_CHARACTERS = 8 * MOST_BYTES  # of a schema, with the white space in it


class Partner(Protocol):
    """One conversation with one model."""

    model: ModelName
    system: str
    think: bool | None
    form: Form
    messages: list[Message]

    @property
    def dropped(self) -> int:
        """Messages that no longer fit the context, since the last clear."""
        ...

    @property
    def finish_reason(self) -> str:
        """Of the last answer: stop, length or interrupted."""
        ...

    @property
    def choices(self) -> Sequence[str]:
        """What was chosen for this model and why; known before the first answer."""
        ...

    def say(
        self,
        text: str,
        options: SamplingOptions,
        limits: Limits,
        stopped: Callable[[], bool],
        raw: bool = False,
    ) -> Pieces:
        """The answer to a message; raw: what continues `text`, which is no turn then."""
        ...

    def clear(self) -> None:
        """Forgets every turn; the system message stays."""
        ...

    def verbose(self) -> Fields:
        """What the last answer took."""
        ...

    def document(self) -> dict[str, Any]:
        """The same for scripts: `run --json` without the text."""
        ...

    def notes(self) -> list[str]:
        """What went wrong since the last call and stopped nothing."""
        ...

    def info(self) -> Fields: ...

    def parameters(self, options: SamplingOptions) -> list[tuple[str, Any]]: ...

    def template(self) -> str | None: ...

    def cache(self) -> Fields: ...


def parse_form(text: str) -> Form:
    """`json`, a JSON schema as it is, or a file with one. Raises BadFormat or OSError."""
    if text == "json":
        return "json"
    try:
        if text.lstrip().startswith("{"):
            said = text
        else:
            with Path(text).expanduser().open(encoding="utf-8") as file:
                said = file.read(_MOST_CHARACTERS + 1)
        if len(said) > _MOST_CHARACTERS:
            raise BadFormat(f"format: the schema has more than {_MOST_CHARACTERS} characters")
        schema = json.loads(said)
    except BadFormat:
        raise
    except (ValueError, RecursionError) as error:
        raise BadFormat(f"format: this is not a JSON schema: {error}") from error
    if not isinstance(schema, dict):
        raise BadFormat("format: a JSON schema is an object")
    check_schema(schema)
    return schema
