"""Render chat templates in Jinja's sandbox: the child process of chat_template.py.

It does not import torch, since it has 512 MB of address space.
"""

from __future__ import annotations

import datetime
import json
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, LoopControlExtension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moeinf.runtime.limited_process import serve

_ADDRESS_SPACE_BYTES = 512 << 20


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Format JSON as transformers does for templates: without Jinja's HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Generation(Extension):
    """The tag `{% generation %}…{% endgeneration %}` around trained text. It gives its body."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        body: list[Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def _environment(now: str | None) -> ImmutableSandboxedEnvironment:
    def strftime_now(pattern: str) -> str:
        moment = datetime.datetime.fromisoformat(now) if now else datetime.datetime.now()
        return moment.strftime(pattern)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = strftime_now
    return environment


class _Renderer:
    """The handler. The first request sets the template; each later request is rendered."""

    def __init__(self) -> None:
        self._source = ""

    def __call__(self, request: dict[str, Any]) -> str:
        if "template" in request:
            self._source = request["template"]
            return ""
        environment = _environment(request.pop("now", None))
        return environment.from_string(self._source).render(**request)


def main() -> None:
    serve(_Renderer(), _ADDRESS_SPACE_BYTES)


if __name__ == "__main__":
    main()
