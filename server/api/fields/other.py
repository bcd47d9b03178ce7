"""Handle the fields of requests that no endpoint reads.

A field that would change the answer is refused. Any other is ignored, because clients send fields
of services and engines that they know. docs/server.md lists both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fastapi import Request
from pydantic import ConfigDict

from moeinf.server.api.answers import BadRequest
from moeinf.server.api.fields.optional import RequestObject
from moeinf.server.http.request_log import notes_of

_SCHEMA = "use response_format"
_NEVER = "it would change how the answer is chosen"

# Each refused field with the values that change nothing, and the reason or an alternative.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "modalities": (([], ["text"]), "answers are text"),
    "audio": ((), "answers are text"),
    "n": ((1,), "an answer has one choice"),
    "best_of": ((0, 1), "an answer has one choice"),
    "use_beam_search": ((False,), _NEVER),
    "echo": ((False,), "join the prompt and the answer yourself"),
    "suffix": (("",), "models here do not fill in the middle"),
    "functions": (([],), "use tools"),
    "function_call": (("none", "auto"), "use tool_choice"),
    "web_search_options": ((), "the server does not search"),
    "mcp_servers": (([],), "the server calls no tools"),
    "container": ((), "the server runs no code"),
    "documents": (([],), "use chat_template_kwargs"),
    "moderation": ((), "answers are not checked"),
    "prompt_logprobs": ((False,), "only tokens of the answer have log-probabilities"),
    "guided_json": ((), _SCHEMA),
    "guided_regex": ((), _SCHEMA),
    "guided_choice": ((), _SCHEMA),
    "guided_grammar": ((), _SCHEMA),
    "structured_outputs": ((), _SCHEMA),
    "grammar": (("",), _SCHEMA),
    "json_schema": (({},), _SCHEMA),
    "logit_bias": (({}, []), _NEVER),
    "bad_words": (([],), _NEVER),
    "allowed_token_ids": ((), _NEVER),
    "logits_processors": (([],), _NEVER),
    "include_stop_str_in_output": ((False,), "the answer ends before a stop text"),
    "stop_token_ids": (([],), "use stop"),
    "ignore_eos": ((False,), _NEVER),
    "min_tokens": ((0,), _NEVER),
    "typical_p": ((0, 1), _NEVER),
    "mirostat": ((0,), _NEVER),
    "dynatemp_range": ((0,), _NEVER),
    "xtc_probability": ((0,), _NEVER),
    "dry_multiplier": ((0,), _NEVER),
    "chat_template": ((), "the model has its own"),
    "add_generation_prompt": ((True,), "use /v1/completions"),
    "continue_final_message": ((False,), "use /v1/completions"),
    "truncate_prompt_tokens": ((), "shorten the prompt"),
}


class Lenient(RequestObject):
    """A request that may have fields of other services and engines."""

    model_config = ConfigDict(extra="allow")
    refused: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = REFUSED

    def check_others(self, request: Request) -> None:
        """Note the fields without an effect. Raises BadRequest for one that must not be ignored."""
        others = self.model_extra or {}
        for name, (harmless, why) in self.refused.items():
            if name in others and others[name] not in harmless:
                raise BadRequest(f"{name}: the value is not supported ({why})", name)
        notes_of(request).ignore(name for name in others if name not in self.refused)
