"""Run the Python blocks of the README and docs/server.md against a server with the demo."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest

ROOT = Path(__file__).parents[3]
DOCUMENTED = "127.0.0.1:11435"
TEXTS: dict[type, Callable[[Any], str]] = {  # of the answer of each client
    ollama.ChatResponse: lambda answer: answer.message.content,
    openai.types.chat.ChatCompletion: lambda answer: answer.choices[0].message.content,
    anthropic.types.Message: lambda answer: answer.content[0].text,
}


def block(page: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return str(code)


def answers(code: str) -> Iterator[Any]:
    """Run a block and yield the value of each expression that stands alone."""
    names: dict[str, Any] = {}
    try:
        for node in ast.parse(code).body:
            if isinstance(node, ast.Expr):
                yield eval(ast.unparse(node), names)
            else:
                exec(ast.unparse(node), names)
    finally:
        for client in names.values():
            if isinstance(client, openai.OpenAI | anthropic.Anthropic):
                client.close()


@pytest.mark.parametrize(
    ("page", "clients"),
    [
        ("README.md", [openai.types.chat.ChatCompletion]),
        ("docs/server.md", list(TEXTS)),
    ],
)
def test_a_block(
    page: str, clients: list[type], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[ollama.Client] = []

    class Client(ollama.Client):
        def __init__(self, host: str) -> None:
            super().__init__(host)
            opened.append(self)

    monkeypatch.setattr(ollama, "Client", Client)
    code = block(page)
    assert code.count(DOCUMENTED) == len(clients)
    found = list(answers(code.replace(DOCUMENTED, address.removeprefix("http://"))))
    for client in opened:
        client._client.close()
    assert [type(answer) for answer in found] == clients
    assert [TEXTS[type(answer)](answer) for answer in found] == ["42"] * len(clients)
