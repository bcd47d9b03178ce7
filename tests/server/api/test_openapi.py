"""Test requests generated from the OpenAPI document.

None may cause an error of the server, and each answer has a status and a form of the document.
For more requests to each operation, and others:

    MOEINF_REQUESTS=300 MOEINF_SEED=2 pytest -m full tests/server/api/test_openapi.py
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

schemathesis = pytest.importorskip("schemathesis")
checks = pytest.importorskip("schemathesis.specs.openapi.checks")

FORMS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]

MANY = int(os.environ.get("MOEINF_REQUESTS", "24"))
SEED = int(os.environ.get("MOEINF_SEED", "1"))

# They remove, add or fetch models: fewer requests, none of which names a model that exists.
APART = ("/api/delete", "/api/copy", "/api/pull", "/api/plan", "/api/create", "/api/blobs/{digest}")


@pytest.mark.parametrize("most", [6, pytest.param(MANY, marks=pytest.mark.full)])
def test_no_request_is_answered_with_a_fault_of_ours(
    address: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # random names must not reach the hub
    schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
    faults, asked, paths, statuses = [], set(), set(), set()
    for found in schema.get_all_operations():
        operation = found.ok()
        paths.add(operation.path)
        count = most // 3 if operation.path in APART else most

        @seed(SEED)
        @settings(
            max_examples=count,  # drawing a body takes longer than its request
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            if isinstance(case.body, dict) and case.path not in APART and len(case.body) % 2:
                case.body["model"] = "demo"  # a drawn name is that of no model
            if case.path == "/api/experts":
                case.query.pop("stream", None)  # its stream has no end
            answer = case.call(base_url=address, timeout=20)
            statuses.add(answer.status_code)
            asked.add(case.path)
            if answer.status_code >= 500:
                faults.append((case.method, case.path, answer.status_code, answer.text[:200]))
            case.validate_response(answer, checks=FORMS)

        ask()
    assert faults == []
    assert asked == paths
    assert {200, 400, 404} <= statuses
    assert {"/api/chat", "/api/blobs/{digest}", "/v1/messages", "/v1/responses"} <= paths
