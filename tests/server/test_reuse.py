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


REQUESTS: dict[str, dict[str, Any]] = {
    "/api/generate": {"raw": True, "stream": False, "options": {"num_predict": 2}},
    "/v1/completions": {"max_tokens": 2},
    "/v1/chat/completions": {"max_tokens": 2},
    "/v1/messages": {"max_tokens": 2},
    "/v1/responses": {"max_output_tokens": 2},
}


def cached(address: str, path: str, text: str, **more: object) -> int:
    """Return the number of reused tokens of an answer; of Ollama's, by /api/ps."""
    message = [{"role": "user", "content": text}]
    prompts = {"/v1/responses": {"input": text}, "/api/generate": {"prompt": text}}
    prompts |= {"/v1/completions": {"prompt": text}}
    body = {"model": "demo", **prompts.get(path, {"messages": message}), **REQUESTS[path], **more}
    before = reused(address)
    answer = httpx.post(f"{address}{path}", json=body, timeout=60)
    answer.raise_for_status()
    told = answer.json().get("usage", {})
    details = told.get("prompt_tokens_details") or told.get("input_tokens_details") or {}
    count = reused(address) - before
    found = details.get("cached_tokens", told.get("cache_read_input_tokens", count))
    assert found == count
    return int(found)


def reused(address: str) -> int:
    models = httpx.get(f"{address}/api/ps", timeout=60).json()["models"]
    return int(models[0]["prefix_cache"]["tokens_reused"]) if models else 0


@pytest.mark.parametrize("path", REQUESTS)
def test_reused_tokens_are_told_in_blocks(demo_home: Path, path: str) -> None:
    """Guessing another client's next letter changes no number."""
    with serving(demo_home, parallel=1, reproducible=False, prefix=PrefixBudget()) as address:
        secret = "s3cret " * 20 + "the code is 4711"
        cached(address, path, secret)
        shared = len("s3cret ") * 20
        counts = {cached(address, path, secret[:at] + "~ and more") for at in range(shared, 156)}
        assert len(counts) == 1
        assert {count % 64 for count in counts} == {0}
        assert max(counts) > 0


@pytest.mark.parametrize("path", REQUESTS)
def test_each_api_takes_keep_prefix(demo_home: Path, path: str) -> None:
    with serving(demo_home, parallel=1, prefix=PrefixBudget()) as address:
        for start, kept in (("first: ", False), ("second: ", True)):
            cached(address, path, start + COMMON, keep_prefix=kept)
            cached(address, path, "nothing in common")
            assert (cached(address, path, f"{start}{COMMON}; 1+1=") > 0) == kept
