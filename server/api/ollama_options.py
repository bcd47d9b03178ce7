"""Read the `options` of Ollama's requests."""

from __future__ import annotations

from typing import Any

from moeinf.runtime import ollama_options
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.ollama_options import OF_OTHER_ENGINES as OF_OTHER_ENGINES
from moeinf.runtime.ollama_options import READ, Options
from moeinf.runtime.ollama_options import SAMPLING as SAMPLING
from moeinf.server.api.answers import BadRequest


def read_options(options: dict[str, Any]) -> Options:
    """Parse Ollama's options; ignore unknown ones, as Ollama does. Raises BadRequest."""
    try:
        return ollama_options.read_options(options)
    except InvalidValue as error:
        raise BadRequest(str(error)) from error


def without_effect(options: dict[str, Any]) -> list[str]:
    """Return the names of the options that have no effect."""
    return [name for name, value in options.items() if value is not None and name not in READ]
