"""Test a model that computes NaN: an error with status 500, and the server stays up."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from tests.runtime.checkpoints.test_finite import added, demo, one
from tests.server.conftest import serving


@pytest.mark.parametrize("temperature", [0, 1])
def test_nan_is_an_error_and_never_a_token(temperature: int, tmp_path: Path) -> None:
    demo(tmp_path / "spoilt", one("model.norm.weight", float("nan"), 5))
    added(tmp_path / "spoilt", "x:q8", allow_nan=True)
    options = {"temperature": temperature, "num_predict": 4}
    with serving(tmp_path / "home") as address, httpx.Client(timeout=60) as client:
        asked = {"model": "x:q8", "prompt": "17+25=", "options": options}
        whole = client.post(f"{address}/api/generate", json={**asked, "stream": False})
        assert whole.status_code == 500
        assert whole.json()["code"] == "not_finite"
        streamed = client.post(f"{address}/api/generate", json=asked)
        assert json.loads(streamed.text.splitlines()[-1])["code"] == "not_finite"
        told = client.post(
            f"{address}/v1/completions",
            json={"model": "x:q8", "prompt": "17+25=", "temperature": temperature},
        )
        assert told.status_code == 500
        embedded = client.post(f"{address}/v1/embeddings", json={"model": "x:q8", "input": "a"})
        assert embedded.status_code == 500
        assert embedded.json()["error"]["code"] == "not_finite"
        assert client.get(f"{address}/health").status_code == 200
