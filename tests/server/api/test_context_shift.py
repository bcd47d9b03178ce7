"""Test MOEINF_CONTEXT_SHIFT: the oldest turns are dropped, and the client is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import serving

SYSTEM = {"role": "system", "content": "You are small."}
TURNS = [
    turn
    for number in range(30)
    for turn in (
        {"role": "user", "content": f"{number} plus {number} plus {number} is what?"},
        {"role": "assistant", "content": f"{3 * number}"},
    )
]
QUESTION = {"role": "user", "content": "17+25="}


@pytest.fixture(scope="module")
def shifting(demo_home: Path) -> Iterator[str]:
    with serving(demo_home, context_shift=True) as address:
        yield address


def ollama(address: str, messages: list[dict[str, str]], **more: Any) -> httpx.Response:
    options = {"temperature": 0, **more.pop("options", {})}
    body = {"model": "demo", "messages": messages, "stream": False, "options": options, **more}
    return httpx.post(f"{address}/api/chat", json=body, timeout=60)


def test_the_oldest_turns_go(shifting: str) -> None:
    answer = ollama(shifting, [SYSTEM, *TURNS, QUESTION]).json()
    dropped = answer["dropped_messages"]
    assert dropped > 0
    assert dropped % 2 == 0
    kept = ollama(shifting, [SYSTEM, *TURNS[dropped:], QUESTION]).json()
    assert "dropped_messages" not in kept
    for name in ("message", "prompt_eval_count"):
        assert kept[name] == answer[name]
    one_more = ollama(shifting, [SYSTEM, *TURNS[dropped - 2 :], QUESTION]).json()
    assert one_more["dropped_messages"] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_openai(shifting: str, stream: bool) -> None:
    messages = [SYSTEM, *TURNS, QUESTION]
    body = {"model": "demo", "messages": messages, "temperature": 0, "stream": stream}
    answer = httpx.post(f"{shifting}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200
    assert answer.text.count('"dropped_messages"') == 1


def test_a_last_turn_that_is_too_long(shifting: str) -> None:
    alone = [SYSTEM, *TURNS, {"role": "user", "content": "1+" * 2000}]
    assert ollama(shifting, alone).json()["code"] == "prompt_too_long"


def test_never_without_the_variable(address: str) -> None:
    refused = ollama(address, [SYSTEM, *TURNS, QUESTION])
    assert refused.status_code == 400
    assert refused.json()["code"] == "prompt_too_long"
    assert any(character.isdigit() for character in refused.json()["error"])
