"""Test requests generated from the OpenAPI document: none may cause an internal error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

schemathesis = pytest.importorskip("schemathesis")

# They remove, add or fetch models; tests/server/api/test_pull.py tests them.
APART = ("/api/delete", "/api/copy", "/api/pull")


def test_no_request_is_answered_with_a_fault_of_ours(address: str) -> None:
    schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
    faults, asked = [], set()
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path in APART:
            continue

        @seed(1)
        @settings(
            max_examples=15,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            answer = case.call(base_url=address, timeout=20)
            asked.add(case.path)
            if answer.status_code >= 500 and answer.status_code != 503:
                faults.append((case.method, case.path, answer.status_code, answer.text[:200]))

        ask()
    assert faults == []
    assert {"/api/chat", "/v1/chat/completions", "/v1/embeddings"} <= asked
    assert {"/v1/messages", "/v1/messages/count_tokens", "/v1/responses"} <= asked
