"""Render chat templates. A template comes with a download, so it is untrusted.

Jinja's sandbox alone does not stop `'a' * 10**9`. So a limited process renders the template.
"""

from __future__ import annotations

from typing import Any

from moeinf.errors import UnusableInput
from moeinf.runtime.limited_process import LimitedProcess, LimitExceeded, Refused

RENDER_SECONDS = 1.0


class TemplateError(UnusableInput, ValueError):
    """A model's chat template cannot be rendered."""

    code = "bad_template"
    hint = "--raw, which sends the prompt without the template"


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
