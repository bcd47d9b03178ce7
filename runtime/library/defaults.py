"""The defaults that `moeinf create` gives to a name: texts, parameters, template, messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.ollama_options import Options, read_options

MOST_TEXT_BYTES = 1 << 20  # of all texts together
MOST_ONE_BYTES = 64 << 10  # of a system text, a template, a licence
MOST_MESSAGES = 1024
_SYSTEM = ("system", "developer")  # roles at the beginning of a request's messages


class DefaultMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """A message that stands before those of every chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class Defaults(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The values of each request to the model that does not name others.

    base: the model that it was made FROM, or the path of its GGUF file. system, template None: the
    model's own. parameters: Ollama's options, as their values. licences: texts.
    """

    base: str
    system: str | None = None
    template: str | None = None
    parameters: dict[str, float | int | str | list[str]] = {}
    messages: tuple[DefaultMessage, ...] = ()
    licences: tuple[str, ...] = ()

    @property
    def options(self) -> Options:
        """The parameters as options. Raises InvalidValue."""
        return read_options(self.parameters)

    def over(self, other: Defaults | None) -> Defaults:
        """Return these defaults; those of `other`, a model that they build on, fill the rest.

        Parameters are filled one by one, and licences are added.
        """
        if other is None:
            return self
        more = tuple(text for text in self.licences if text not in other.licences)
        return Defaults(
            self.base,
            other.system if self.system is None else self.system,
            other.template if self.template is None else self.template,
            {**other.parameters, **self.parameters},
            self.messages or other.messages,
            other.licences + more,
        )

    def check(self) -> None:
        """Raise InvalidValue for a parameter, or for texts that are too long."""
        _ = self.options
        named = [("system", self.system), ("template", self.template)]
        size = sum(_bytes_of(message.content) for message in self.messages)
        for name, text in (*named, *(("license", text) for text in self.licences)):
            size += (count := _bytes_of(text or ""))
            if count > MOST_ONE_BYTES:
                words = f"{name}: {count} bytes are invalid (expected at most {MOST_ONE_BYTES})"
                raise InvalidValue(words)
        if size > MOST_TEXT_BYTES:
            raise InvalidValue(f"the texts have {size} bytes (at most {MOST_TEXT_BYTES})")
        if len(self.messages) > MOST_MESSAGES:
            raise InvalidValue(f"messages: at most {MOST_MESSAGES} are possible")


def _bytes_of(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def with_defaults(
    defaults: Defaults | None, messages: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Return a chat's messages behind those of the defaults.

    The system messages at the beginning stay there, and replace the system text of the defaults.
    """
    if defaults is None:
        return messages
    head = next((i for i, m in enumerate(messages) if m.get("role") not in _SYSTEM), len(messages))
    first = list(messages[:head])
    if not head and defaults.system:
        first = [{"role": "system", "content": defaults.system}]
    said = [{"role": one.role, "content": one.content} for one in defaults.messages]
    return [*first, *said, *messages[head:]]
