"""The environment variables and arguments with which coding agents use a server.

The names are those of each client's own documentation, in November 2026.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

KEY = "MOEINF_API_KEY"
NO_KEY = "moeinf"  # for a server without a key: clients send none that is empty
_PATIENCE_MS = 3_600_000  # to load a model and read a long prompt; clients wait 5 to 10 minutes
_ANSWERS = 4  # of a context, an answer has at most one part in so many


@dataclass(frozen=True)
class Needs:
    """The environment, the arguments and, where it has one, the settings file of a client.

    without: variables that would be stronger. A value that is KEY stands for the key itself.
    """

    environment: Mapping[str, str]
    arguments: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    file: str = ""
    content: str = ""


@dataclass(frozen=True)
class CodingClient:
    """A client: its program, how it is installed, and what it needs of (server, model, context).

    A context is the tokens that the server has for a conversation; None: not known. Without it a
    client takes that of its vendor's models, and its prompts become too long.
    """

    program: str
    install: str
    needs: Callable[[str, str, int | None], Needs]


def _claude(server: str, model: str, context: int | None) -> Needs:
    # https://code.claude.com/docs/en/env-vars
    models = {f"ANTHROPIC_DEFAULT_{size}_MODEL": model for size in ("OPUS", "SONNET", "HAIKU")}
    about = {"ANTHROPIC_BASE_URL": server, "ANTHROPIC_AUTH_TOKEN": KEY, "ANTHROPIC_MODEL": model}
    about["API_TIMEOUT_MS"] = str(_PATIENCE_MS)
    if context is not None:
        about["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(context)
    return Needs({**about, **models}, without=("ANTHROPIC_API_KEY",))


def _codex(server: str, model: str, context: int | None) -> Needs:
    # https://developers.openai.com/codex/config-reference: -c takes TOML, and is the strongest
    base, wire = json.dumps(f"{server}/v1"), '"responses"'
    idle = f"stream_idle_timeout_ms = {_PATIENCE_MS}"  # comments of a stream do not count for it
    provider = f'{{name="moeinf", base_url={base}, env_key="{KEY}", wire_api={wire}, {idle}}}'
    options = ['model_provider="moeinf"', f"model_providers.moeinf={provider}"]
    window = [] if context is None else [f"model_context_window={context}"]
    lines = [
        f"model = {json.dumps(model)}",
        'model_provider = "moeinf"',
        *window,
        "",
        "[model_providers.moeinf]",
        'name = "moeinf"',
        f"base_url = {base}",
        f'env_key = "{KEY}"',
        f"wire_api = {wire}",
        idle,
    ]
    arguments = tuple(word for option in (*options, *window) for word in ("-c", option))
    return Needs(
        {KEY: KEY}, (*arguments, "--model", model), (), "~/.codex/config.toml", "\n".join(lines)
    )


def _opencode(server: str, model: str, context: int | None) -> Needs:
    # https://opencode.ai/docs/config: the inline configuration is merged last
    options = {"baseURL": f"{server}/v1", "apiKey": f"{{env:{KEY}}}"}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "moeinf", "options": options}
    about: dict[str, Any] = {"name": model}
    if context is not None:
        about["limit"] = {"context": context, "output": context // _ANSWERS}
    document = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"moeinf/{model}",
        "provider": {"moeinf": {**provider, "models": {model: about}}},
    }
    inline = {"OPENCODE_CONFIG_CONTENT": json.dumps(document), KEY: KEY}
    return Needs(inline, (), (), "opencode.json", json.dumps(document, indent=2))


def _aider(server: str, model: str, context: int | None) -> Needs:
    # https://aider.chat/docs/llms/openai-compat.html
    about = {"OPENAI_API_BASE": f"{server}/v1", "OPENAI_API_KEY": KEY}
    return Needs(about, ("--model", f"openai/{model}"))


CLIENTS = {
    "claude": CodingClient("claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": CodingClient("codex", "npm install -g @openai/codex", _codex),
    "opencode": CodingClient("opencode", "npm install -g opencode-ai", _opencode),
    "aider": CodingClient("aider", "python -m pip install aider-install; aider-install", _aider),
}
