"""Who answers `run`: an engine of this process, or a server. What a conversation needs of either.

Does not know how answers are made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from moeinf.runtime.asking import Form, Limits, Message, SamplingOptions
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.names import ModelName

Pieces = Iterator[tuple[Literal["thinking", "answer"], str]]
Fields = list[tuple[str, str]]


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
    """`json`, a JSON schema as it is, or a file with one. Raises InvalidValue or OSError."""
    if text == "json":
        return "json"
    try:
        said = text if text.lstrip().startswith("{") else Path(text).expanduser().read_text("utf-8")
        schema = json.loads(said)
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"format: this is no JSON schema: {error}") from error
    if not isinstance(schema, dict):
        raise InvalidValue("format: a JSON schema is an object")
    return schema
