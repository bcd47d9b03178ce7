"""Treat a null field of a request as absent, as Ollama and OpenAI do."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, model_validator

from moeinf.server.api.fields.bounds import MOST_FIELDS


class RequestObject(BaseModel):
    """An object of a request; a null field counts as absent."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, said: Any) -> Any:
        if not isinstance(said, dict):
            return said
        if len(said) > MOST_FIELDS:
            raise ValueError(f"an object has at most {MOST_FIELDS} fields")
        return {name: value for name, value in said.items() if value is not None}
