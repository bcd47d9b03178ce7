"""The line before Claude Code's system prompt is not part of the prompt."""

from __future__ import annotations

import pytest

from moeinf.runtime.generation.prompts import chat_prompt
from tests.conftest import Open

LINE = "x-anthropic-billing-header: cc_version=2.1.{}; cc_entrypoint=sdk-cli; cch={};"


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("between", ["\n", "", " \n"])
def test_two_requests_have_the_same_prompt(role: str, between: str, open_engine: Open) -> None:
    engine = open_engine()

    def prompt(system: str, of: str = role) -> list[int]:
        said = [{"role": of, "content": system}, {"role": "user", "content": "17+25="}]
        return chat_prompt(engine, said, now="2026-01-01")

    text = "You sort words."
    first = prompt(LINE.format("177.01c", "36ee5") + between + text)
    assert first == prompt(LINE.format("178.0d9", "0aaa9") + between + text) == prompt(text)
    assert prompt(LINE, "user") != prompt("", "user")  # only a system prompt has it
    assert prompt(text + LINE) != prompt(text)
