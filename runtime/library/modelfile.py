"""Read and write Modelfiles, in Ollama's grammar.

A line is a comment (#) or COMMAND VALUE. A value that begins with three quotation marks, or with
one, ends at the next line that ends with them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from moeinf.errors import UnusableInput
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.library.defaults import DefaultMessage, Defaults
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.ollama_options import OF_OTHER_ENGINES, OTHER_NAMES, READ, SAMPLING

MOST_BYTES = 2 << 20  # of a Modelfile
_MARKS = ('"""', '"')
_WORD = re.compile(r"\S+")
_GO = re.compile(r"\{\{-?\s*(?:\.|\$|(?:if|range|with|else|end|block|template|define)\b)")
_ROLES = ("system", "user", "assistant")
_WHOLE = ("num_ctx", "num_predict", "draft_num_predict", "top_k", "seed", "repeat_last_n")
_REFUSED = {
    "adapter": "adapters (LoRA) are not supported; merge it into the checkpoint first",
    "renderer": "a model's chat template writes its prompts; leave the line out, or use TEMPLATE",
    "parser": "answers are parsed by the model's chat template; leave the line out",
}
GO_WORDS = (
    "it is a Go template, as Ollama has them; write it in Jinja, with {{ messages[-1].content }} "
    "for {{ .Prompt }} and {% for message in messages %} for {{ range .Messages }}, or leave it "
    "out: the model has its own"
)


class BadModelfile(UnusableInput, ValueError):
    """A Modelfile cannot be used."""

    code = "bad_modelfile"
    hint = "a corrected file; `moeinf show MODEL --modelfile` prints one"


@dataclass
class Modelfile:
    """The commands of a Modelfile. without_effect: parameters of Ollama's engine, left out."""

    base: str = ""
    system: str | None = None
    template: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    messages: list[DefaultMessage] = field(default_factory=list)
    licences: list[str] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)

    def defaults(self) -> Defaults:
        return Defaults(
            self.base,
            self.system,
            self.template,
            self.parameters,
            tuple(self.messages),
            tuple(self.licences),
        )


def parse_modelfile(text: str, file: str) -> Modelfile:
    """Parse the text of `file`. Raises BadModelfile, with the file and the line."""
    found = Modelfile()
    takes: dict[str, Callable[[str], None]] = {
        "from": lambda value: _from(found, value),
        "system": lambda value: setattr(found, "system", value),
        "template": lambda value: setattr(found, "template", jinja(value)),
        "parameter": lambda value: _parameter(found, value),
        "message": lambda value: _message(found, value),
        "license": found.licences.append,
    }
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    at = 0
    while at < len(lines):
        begin, line = at, lines[at].lstrip()
        at += 1
        if not line or line.startswith("#"):
            continue
        word = line.split(None, 1)[0]
        try:
            take = takes.get(word.lower())
            if take is None:
                why = _REFUSED.get(word.lower(), f"expected {', '.join(takes).upper()}")
                raise InvalidValue(f"{word[:40]} is not supported ({why})")
            before, rest = _split(word.lower(), line[len(word) :].lstrip())
            value, at = _value(rest, lines, at)
            if not (value or rest):
                raise InvalidValue(f"{word.upper()} has no value")
            take(f"{before} {value}" if before else value)
        except InvalidValue as error:
            raise BadModelfile(f"{file}, line {begin + 1}: {error}") from error
    if not found.base:
        raise BadModelfile(f"{file}: it has no FROM, which names a model or a GGUF file")
    return found


def _split(command: str, rest: str) -> tuple[str, str]:
    """Return the first word of a PARAMETER or MESSAGE, and the text of the value."""
    if command not in ("parameter", "message"):
        return "", rest
    word = _WORD.match(rest)
    if word is None or not rest[word.end() :].strip():
        example = "PARAMETER temperature 0.7" if command == "parameter" else "MESSAGE user Hello"
        raise InvalidValue(f"{command.upper()} needs a name and a value, as in {example}")
    return word[0], rest[word.end() :].lstrip()


def _value(first: str, lines: list[str], at: int) -> tuple[str, int]:
    """Return the value that begins with `first`, and the number of the line behind it."""
    mark = next((mark for mark in _MARKS if first.startswith(mark)), None)
    if mark is None:
        return first.strip(), at
    begin, end = first.rstrip(), at
    if len(begin) < 2 * len(mark) or not begin.endswith(mark):
        while end < len(lines) and not lines[end].rstrip().endswith(mark):
            end += 1
        if end == len(lines):
            raise InvalidValue(f"the closing {mark} is missing")
        end += 1
    whole = "\n".join([first, *lines[at:end]]).rstrip()
    return whole[len(mark) : -len(mark)], end


def jinja(template: str) -> str:
    """Return a template that is not one of Go's. Raises InvalidValue."""
    if _GO.search(template):
        raise InvalidValue(f"TEMPLATE is not supported ({GO_WORDS})")
    return template


def _from(found: Modelfile, value: str) -> None:
    if found.base:
        raise InvalidValue("FROM is there a second time")
    found.base = value


def _message(found: Modelfile, value: str) -> None:
    role, _, content = value.partition(" ")
    if role.lower() not in _ROLES:
        raise InvalidValue(f"MESSAGE {role[:40]}: expected one of {', '.join(_ROLES)}")
    said = cast(Literal["system", "user", "assistant"], role.lower())
    found.messages.append(DefaultMessage(said, content))


def _parameter(found: Modelfile, value: str) -> None:
    name, _, text = value.partition(" ")
    if name.lower() == "stop":
        found.parameters.setdefault("stop", []).append(text)
        return
    set_parameter(found, name, text)


def set_parameter(found: Modelfile, name: str, value: Any) -> None:
    """Set a parameter from a value or its text. Raises InvalidValue, by the parameter's name."""
    name = name.lower()
    if name in OF_OTHER_ENGINES:
        found.without_effect.append(name)
        return
    if name not in READ:
        known = ", ".join((*SAMPLING, "num_ctx", "num_predict", "stop", "draft_num_predict"))
        raise InvalidValue(f"parameter {name[:40]!r} is not supported (expected {known})")
    name = OTHER_NAMES.get(name, name)
    if name == "stop":
        texts = [value] if isinstance(value, str) else value
        found.parameters[name] = list(texts) if isinstance(texts, list | tuple) else texts
    else:
        try:
            number = float(value)
            found.parameters[name] = int(value) if name in _WHOLE else number
        except (OverflowError, TypeError, ValueError):
            expected = "an integer" if name in _WHOLE else "a number"
            words = f"{name}: {str(value)[:80]} is invalid (expected {expected})"
            raise InvalidValue(words) from None
    _ = Defaults("", parameters={name: found.parameters[name]}).options


def modelfile_of(manifest: Manifest) -> tuple[str, list[str]]:
    """Return a model's Modelfile, and the commands that its grammar cannot hold, which it lacks.

    A value cannot hold a line that ends with three quotation marks, except its last one.
    """
    given = manifest.defaults or Defaults(str(manifest.model))
    title = f"# `moeinf create NAME -f FILE` makes a model like {manifest.model} of this file."
    lines, lost = [title, f"FROM {given.base}"], list[str]()

    def add(command: str, text: str) -> None:
        value = quoted(text)
        lines.append(f"# {command} is left out: no Modelfile can hold it")
        if value is None:
            lost.append(command)
        else:
            lines[-1] = f"{command} {value}"

    for name, value in parameter_lines(given):
        add(f"PARAMETER {name}", value)
    for command, text in (("TEMPLATE", given.template), ("SYSTEM", given.system)):
        if text is not None:
            add(command, text)
    for message in given.messages:
        add(f"MESSAGE {message.role}", message.content)
    for licence in given.licences:
        add("LICENSE", licence)
    return "\n".join(lines) + "\n", lost


def parameter_lines(defaults: Defaults) -> list[tuple[str, str]]:
    """Return each parameter and its value as text; `stop` once for each of its texts."""
    found = []
    for name, value in sorted(defaults.parameters.items()):
        values = value if isinstance(value, list) else [value]
        found += [(name, str(one)) for one in values]
    return found


def parameters_text(defaults: Defaults) -> str:
    """Return the parameters as Ollama's /api/show has them, a line each."""
    pairs = parameter_lines(defaults)
    return "\n".join(f"{n:<30} {quoted(v) if n == 'stop' else v}" for n, v in pairs)


def quoted(text: str) -> str | None:
    """Return a text as a value, or None if no value gives it back."""
    plain = text and "\n" not in text and text == text.strip() and not text.startswith('"')
    for value in (text if plain else None, f'"""{text}"""', f'"{text}"'):
        if value is None or "\r" in value:
            continue
        lines = value.split("\n")
        try:
            if _value(lines[0], lines, 1) == (text, len(lines)):
                return value
        except InvalidValue:
            continue
    return None
