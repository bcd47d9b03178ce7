"""Render chat templates. A template comes with a download, so it is untrusted.

Jinja's sandbox alone does not stop `'a' * 10**9`. So a limited process renders the template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeinf.errors import UnusableInput
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.limited_process import LimitedProcess, LimitExceeded, Refused

RENDER_SECONDS = 1.0
MOST_VARIABLES, MOST_NAME = 64, 64  # variables from a client, and characters of a name
MOST_VARIABLES_BYTES = 64 << 10  # of all of them as JSON
MOST_VARIABLES_DEPTH = 16
# Their releases have a Python file in place of a chat template. It is not executed.
_OWN_TEMPLATES = frozenset({"deepseek_v32", "deepseek_v4"})
# The names of the values that the server sets. Special tokens are bos_token and the like.
_OURS = frozenset(
    """self messages tools template chat_template now add_generation_prompt continue_final_message
    raise_exception strftime_now""".split()
)


class TemplateError(UnusableInput, ValueError):
    """A model's chat template cannot be rendered."""

    code = "bad_template"
    hint = "--raw, which sends the prompt without the template"


def family_template(model_type: object) -> str | None:
    """Return our chat template of a family whose releases have none, or None."""
    if not isinstance(model_type, str) or model_type not in _OWN_TEMPLATES:
        return None
    folder = Path(__file__).with_name("family_templates")
    return (folder / f"{model_type}.jinja").read_text(encoding="utf-8")


def check_variables(variables: Mapping[str, Any]) -> None:
    """Check the variables that a client gives to a template (chat_template_kwargs).

    Raises InvalidValue for the names of values that the server sets, and beyond the limits.
    """
    if len(variables) > MOST_VARIABLES:
        raise InvalidValue(f"chat_template_kwargs: at most {MOST_VARIABLES} values are possible")
    for name in variables:
        if not name.isidentifier() or len(name) > MOST_NAME:
            shown = name[:MOST_NAME]
            raise InvalidValue(f"chat_template_kwargs: {shown!r} is not the name of a variable")
        if name in _OURS or name.endswith(("_token", "_tokens")):
            raise InvalidValue(f"chat_template_kwargs: {name!r} is set by the server")
    if _depth(variables) > MOST_VARIABLES_DEPTH:
        raise InvalidValue(f"chat_template_kwargs: more than {MOST_VARIABLES_DEPTH} levels")
    if len(json.dumps(dict(variables))) > MOST_VARIABLES_BYTES:
        raise InvalidValue(f"chat_template_kwargs: more than {MOST_VARIABLES_BYTES} bytes")


def _depth(value: Any) -> int:
    """Return the levels of objects and lists; requests have 100 at most."""
    if not isinstance(value, Mapping | list):
        return 0
    inner = value.values() if isinstance(value, Mapping) else value
    return 1 + max(map(_depth, inner), default=0)


class TemplateWorker:
    """A limited process with one template."""

    def __init__(self, template: str) -> None:
        self._process = LimitedProcess(
            "moeinf.runtime.text.template_worker", {"template": template}
        )

    def render(self, messages: list[dict[str, str]], **variables: Any) -> str:
        """Return the prompt text. Raises TemplateError if the template fails or hits a limit."""
        try:
            request = {"messages": messages, **variables}
            return str(self._process.ask(request, RENDER_SECONDS))
        except Refused as error:
            raise TemplateError(f"the chat template cannot be rendered: {error}") from None
        except LimitExceeded as error:
            raise TemplateError(f"the chat template took {error}") from None

    def close(self) -> None:
        self._process.close()
