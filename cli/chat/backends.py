"""Define the interface that a conversation needs: an engine of this process, or a server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from moeinf.runtime.files.regular import NotRegular, read_regular
from moeinf.runtime.names import ModelName, in_home
from moeinf.runtime.requests import Form, Limits, Message, SamplingOptions
from moeinf.runtime.sampling.schema_limits import MOST_BYTES, BadFormat, check_schema
from moeinf.runtime.sizes import format_bytes

Pieces = Iterator[tuple[Literal["thinking", "answer"], str]]
Fields = list[tuple[str, str]]
_MOST_CHARACTERS = 8 * MOST_BYTES  # of a schema, white space included


class Partner(Protocol):
    """One conversation with one model."""

    model: ModelName
    system: str
    think: bool | None
    form: Form
    messages: list[Message]
    kept: bool  # may the KV of later texts be kept for other requests
    reading: Callable[[int, int], None]  # takes the read and all tokens of a prompt, if known

    @property
    def dropped(self) -> int:
        """Number of messages dropped since the last clear, because the context was full."""
        ...

    @property
    def finish_reason(self) -> str:
        """Finish reason of the last answer: stop, length or interrupted."""
        ...

    @property
    def summary(self) -> str:
        """One line: the model, where it runs, its context."""
        ...

    @property
    def choices(self) -> Sequence[str]:
        """Settings chosen for this model, with reasons; known before the first answer."""
        ...

    def say(
        self,
        text: str,
        options: SamplingOptions,
        limits: Limits,
        stopped: Callable[[], bool],
        raw: bool = False,
    ) -> Pieces:
        """Yield the answer to a message. raw: continue `text`, and add no turn."""
        ...

    def clear(self) -> None:
        """Remove every turn; the system message stays."""
        ...

    def load(self, model: str) -> None:
        """Change to another installed model, and remove every turn.

        If that fails, the model stays. Raises NoSuchModel, or ServerError with its code.
        """
        ...

    def resize(self, context: int) -> None:
        """Change the context to that many tokens; the turns stay. Raises InvalidValue."""
        ...

    def set_memory(self, text: str) -> str:
        """Change the memory of the experts; return a line about it.

        text: a size, a share of all experts, or auto. Raises InvalidValue, DoesNotFit, ServerError.
        """
        ...

    @property
    def ready(self) -> bool:
        """False after a change of models that has left none: no answer is possible."""
        ...

    def verbose(self) -> Fields:
        """Return the timings and counters of the last answer."""
        ...

    def document(self) -> dict[str, Any]:
        """Return the same for scripts: the document of `run --json` without the text."""
        ...

    def notes(self) -> list[str]:
        """Return the problems since the last call that did not stop an answer."""
        ...

    def info(self) -> Fields: ...

    def parameters(self, options: SamplingOptions) -> list[tuple[str, Any]]: ...

    def template(self) -> str | None: ...

    def default_system(self) -> str:
        """Return the model's own system message, of `moeinf create`; empty without one."""
        ...

    def cache(self) -> Fields: ...


def memory_words(said: Mapping[str, Any]) -> str:
    """Return a line about the memory of experts: the fields of an answer of /api/memory."""
    size, slots, experts = (int(said.get(key) or 0) for key in ("memory", "slots", "experts"))
    return f"{format_bytes(size)} for experts: {slots:,} of {experts:,} in RAM"


def cut_off(partner: Partner, limit: str) -> list[str]:
    """Return a note if a limit has cut off the last answer. limit: the name of the user's limit."""
    if partner.finish_reason != "length":
        return []
    note = f"the answer ends here because of {limit} or the context's length"
    return [note if partner.form is None else f"{note}: its JSON is incomplete"]


def _schema_of(path: Path) -> str:
    try:
        return read_regular(path, _MOST_CHARACTERS).decode("utf-8")
    except NotRegular as error:
        raise BadFormat(f"format: {path}: {error.strerror}") from error


def parse_form(text: str) -> Form:
    """Return the form for `json`, a JSON schema, or the path of a file with a schema.

    Raises BadFormat, OSError.
    """
    if text == "json":
        return "json"
    try:
        said = text if text.lstrip().startswith("{") else _schema_of(in_home(text))
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
