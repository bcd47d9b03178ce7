"""Test that `/api/plan` returns what `moeinf plan` prints with the same options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from moeinf.cli.main import answer
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from tests.hub_server import Hub
from tests.hub_server import serve as serve_hub
from tests.server.conftest import serving

VARYING = ("machine", "provenance", "problems", "verdict", "runs", "try")  # they show free memory


def asked(address: str, model: str) -> httpx.Response:
    return httpx.get(f"{address}/api/plan", params={"model": model}, timeout=60)


def fixed(document: dict[str, Any]) -> dict[str, Any]:
    """Return the parts that do not depend on the moment or on a measurement."""
    kept = {name: value for name, value in document.items() if name not in VARYING}
    kept["prefill"] = kept["prefill"] | {"bound_s": None}
    speeds = ("bound_tokens_per_s", "most_tokens_per_s")
    kept["ladder"] = [
        {n: v for n, v in rung.items() if n not in (*speeds, "prefill_bound_s", "fits")}
        for rung in kept["ladder"]
    ]
    return {name: value for name, value in kept.items() if name not in speeds}


def test_it_is_that_of_the_command(
    demo_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOEINF_HOME", str(demo_home))
    assert answer(["plan", "demo", "--memory", "30%", "--no-prefix-cache", "--json"]) == 0
    want = json.loads(capsys.readouterr().out)
    with serving(demo_home, memory="30%") as address:
        found = asked(address, "demo").json()
    assert set(found) == set(want)
    assert fixed(found) == fixed(want)
    assert found["verdict"].startswith("demo:bf16 runs here: ")
    whole = found["tiers"][-1]["bytes"]
    shares = [round(rung["memory_bytes"] / whole, 2) for rung in found["ladder"]]
    assert shares == [0.25, 0.5, 0.75, 1]


def test_only_a_post_asks_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOEINF_HOME", str(tmp_path))
    with serve_hub(Hub("Org/Demo-MoE", DEMO_CHECKPOINT)) as hub, serving(tmp_path) as address:
        files = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
        told = asked(address, "Org/Demo-MoE")
        assert (told.status_code, told.json()["code"]) == (404, "model_not_found")
        assert not hub.requests
        body = {"model": "Org/Demo-MoE"}
        found = httpx.post(f"{address}/api/plan", json=body, timeout=60).json()
        assert hub.requests
        assert answer(["plan", "Org/Demo-MoE", "--memory", "100%", "--json"]) == 0
    want = json.loads(capsys.readouterr().out)
    assert [row["tag"] for row in found["tags"]] == [row["tag"] for row in want["tags"]]
    assert found["download_bytes"] == want["download_bytes"] > 0


@pytest.mark.parametrize(
    ("model", "status", "code"),
    [
        ("/etc", 400, "bad_request"),
        ("./here", 400, "bad_request"),
        ("unheard-of", 404, "model_not_found"),
        ("no such", 400, "bad_name"),
    ],
)
def test_what_it_refuses(model: str, status: int, code: str, address: str) -> None:
    told = asked(address, model)
    assert (told.status_code, told.json()["code"]) == (status, code)
