"""Complete the requests of openai-python's tests for responses, as a plugin of their pytest.

Their mock server needs no model, no input, and knows every id of a response. Here a request gets
what it lacks, and a test's id becomes that of a response that is stored for this test.
openai_resource_tests.py loads it.
"""

from __future__ import annotations

import os
from typing import Any

import openai
import pytest
from openai._base_client import BaseClient

ASKED = {"model": "gpt-6-astra", "input": "17+25="}
IDS = ("resp_677efb5139a88190b512bc3fef8e535d", "/response_id/")  # of their tests
ENDPOINTS = ("/responses", "/responses/input_tokens")


@pytest.fixture(autouse=True)
def _complete(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.node.cls.__name__.endswith(("Responses", "InputItems", "InputTokens")):
        return
    with openai.OpenAI(base_url=os.environ["TEST_API_BASE_URL"], api_key="any") as client:
        stored = client.responses.create(model=ASKED["model"], input=ASKED["input"]).id
    build = BaseClient._build_request

    def built(client: Any, options: Any, **about: Any) -> Any:
        if options.method == "post" and options.url in ENDPOINTS:
            options.json_data = {**ASKED, **(options.json_data or {})}
        options.url = options.url.replace(IDS[0], stored).replace(IDS[1], f"/{stored}/")
        return build(client, options, **about)

    monkeypatch.setattr(BaseClient, "_build_request", built)
