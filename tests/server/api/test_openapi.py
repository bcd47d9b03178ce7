"""Test requests generated from the OpenAPI document: none may cause an internal error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

schemathesis = pytest.importorskip("schemathesis")

# They remove, add or fetch models: fewer requests, none of which names a model that exists.
APART = ("/api/delete", "/api/copy", "/api/pull", "/api/plan", "/api/create", "/api/blobs/{digest}")


@pytest.mark.parametrize("most", [6, pytest.param(24, marks=pytest.mark.full)])
def test_no_request_is_answered_with_a_fault_of_ours(
    address: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # random names must not reach the hub
    schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
    faults, asked, paths = [], set(), set()
    for found in schema.get_all_operations():
        operation = found.ok()
        paths.add(operation.path)
        count = most // 3 if operation.path in APART else most

        @seed(1)
        @settings(
            max_examples=count,  # drawing a body takes longer than its request
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
    assert asked == paths
    assert {"/api/chat", "/api/blobs/{digest}", "/v1/messages", "/v1/responses"} <= paths
