"""The worker behind template.py: reads requests as JSON lines, answers with rendered text.

Does not import torch or anything else of moeinf: it has 512 MB of address space for everything.
"""

from __future__ import annotations

import datetime
import json
import resource
import signal
import sys
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, LoopControlExtension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_ADDRESS_SPACE_BYTES = 512 << 20
_SECONDS = 5  # far above the limit that the parent keeps


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, without HTML escapes: what transformers offers to templates."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what is trained on; its body is what counts."""

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


def main() -> None:
    """Serves until standard input ends. The first request brings the template."""
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE_BYTES, _ADDRESS_SPACE_BYTES))
    source = ""
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "template" in request:
                source, text = request["template"], ""
            else:
                signal.alarm(_SECONDS)  # ends this process, should nobody be left to do it
                environment = _environment(request.pop("now", None))
                try:
                    text = environment.from_string(source).render(**request)
                finally:
                    signal.alarm(0)
            answer = {"text": text}
        except MemoryError:
            answer = {"error": "it needs too much memory"}
        except Exception as error:  # a template can raise anything
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
