"""Test a prompt with the prefix of an earlier one: whole chunks are not computed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from moeinf.runtime.config import PREFILL_CHUNK, PrefixBudget
from tests.server.conftest import serving

COMMON = " ".join(f"{number} plus {number}" for number in range(40))
ENDS = ["; sort owl, fig", "; reverse planet and then some more", "", "; 17+25="]


def ask(address: str, prompt: str) -> dict[str, Any]:
    """Return text, exact log-probabilities, and the number of cached prompt tokens."""
    body = {"model": "demo", "prompt": prompt, "temperature": 1, "seed": 3, "max_tokens": 12}
    answer = httpx.post(f"{address}/v1/completions", json={**body, "logprobs": 5}, timeout=60)
    answer.raise_for_status()
    return dict(answer.json())


@pytest.mark.parametrize("memory", ["100%", "35%"])
def test_reused_chunks_change_no_bit(demo_home: Path, memory: str) -> None:
    fresh = []
    for end in ENDS:
        with serving(demo_home, memory, parallel=1) as address:
            fresh.append(ask(address, COMMON + end))
    with serving(demo_home, memory, parallel=1) as address:
        again = [ask(address, COMMON + end) for end in ENDS]
        other = ask(address, "nothing in common: " + COMMON)
    assert [one["choices"] for one in again] == [one["choices"] for one in fresh]
    known = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in [*again, other]]
    assert known[0] == known[-1] == 0
    assert all(count > 0 and count % PREFILL_CHUNK == 0 for count in known[1:-1])
    assert all(one["usage"]["prompt_tokens_details"]["cached_tokens"] == 0 for one in fresh)


def test_an_embedding_between_takes_nothing_over(demo_home: Path) -> None:
    """It leaves whole chunks for the next prompt, and reuses no chunk itself."""
    with serving(demo_home, parallel=1) as address:
        fresh = ask(address, COMMON)
    with serving(demo_home, parallel=1) as address:
        body = {"model": "demo", "input": COMMON}
        first, second = (
            httpx.post(f"{address}/api/embed", json=body, timeout=60).json()["embeddings"]
            for _ in range(2)
        )
        after = ask(address, COMMON)
    assert first == second
    assert after["choices"] == fresh["choices"]
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_prompt_that_may_not_be_kept_is_not_found(demo_home: Path) -> None:
    with serving(demo_home, parallel=1, prefix=PrefixBudget()) as address:
        for start, kept in (("first: ", False), ("second: ", True)):
            body = {"model": "demo", "prompt": start + COMMON, "raw": True, "stream": False}
            asked = {**body, "options": {"num_predict": 2}, "keep_prefix": kept}
            httpx.post(f"{address}/api/generate", json=asked, timeout=60).raise_for_status()
            ask(address, "nothing in common")
            found = ask(address, f"{start}{COMMON}; 1+1=")["usage"]["prompt_tokens_details"]
            assert (found["cached_tokens"] > 0) == kept
