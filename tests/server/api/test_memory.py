"""Test `/api/memory`: a loaded model gets another amount of memory while it answers."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from moeinf.cli.chat.client import Client
from moeinf.cli.chat.remote import RemotePartner
from moeinf.runtime.config import Settings
from tests.server.conftest import serving

WILD = {"temperature": 50, "top_k": 0, "top_p": 1, "seed": 7, "num_predict": 200}
ASK: dict[str, Any] = {"model": "demo", "prompt": "hi", "options": WILD, "stream": False}


def test_answers_go_on(demo_home: Path) -> None:
    with serving(demo_home, "50%") as address:
        url = f"{address}/api/generate"
        want = httpx.post(url, json=ASK, timeout=60).json()["response"]
        found: list[str] = []
        asking = threading.Thread(
            target=lambda: found.append(httpx.post(url, json=ASK, timeout=60).json()["response"])
        )
        asking.start()
        slots = []
        for size in ("20%", "100%", "35%", "1MiB", "35%"):
            body = {"model": "demo", "memory": size}
            said = httpx.post(f"{address}/api/memory", json=body, timeout=60).json()
            slots.append(said["slots"])
            assert said["auto"] is False
            assert said["slots"] <= said["experts"]
        asking.join(60)
        assert found == [want]
        assert slots[2] == slots[4] < slots[1]
        metrics = httpx.get(f"{address}/metrics", timeout=60).text
        assert f'moeinf:expert_slots{{model_name="demo:bf16"}} {float(slots[-1])}' in metrics
        assert 'moeinf:memory_moves_total{direction="down",model_name="demo:bf16"}' in metrics
        (model,) = httpx.get(f"{address}/api/ps", timeout=60).json()["models"]
        body = {"model": "demo", "memory": "100%"}
        httpx.post(f"{address}/api/memory", json=body, timeout=60).raise_for_status()
        (grown,) = httpx.get(f"{address}/api/ps", timeout=60).json()["models"]
        assert grown["size"] > model["size"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"model": "demo", "memory": "10%"}, 400, "bad_request"),  # not loaded
        ({"model": "none", "memory": "10%"}, 404, "model_not_found"),
        ({"model": "demo"}, 400, "bad_request"),
    ],
)
def test_what_it_refuses(demo_home: Path, body: dict[str, str], status: int, code: str) -> None:
    with serving(demo_home) as address:
        refused = httpx.post(f"{address}/api/memory", json=body, timeout=60)
        assert (refused.status_code, refused.json()["code"]) == (status, code)


def test_sizes_that_it_refuses(demo_home: Path) -> None:
    with serving(demo_home) as address:
        httpx.post(f"{address}/api/generate", json=ASK, timeout=60).raise_for_status()
        for size, code in (
            ("1", "does_not_fit"),
            ("many", "invalid"),
            ("101%", "invalid"),
        ):
            body = {"model": "demo", "memory": size}
            refused = httpx.post(f"{address}/api/memory", json=body, timeout=60)
            assert (refused.status_code, refused.json()["code"]) == (400, code)
        host, port = address.removeprefix("http://").split(":")
        about = httpx.post(f"{address}/api/show", json={"model": "demo"}, timeout=60).json()
        partner = RemotePartner(lambda: Client(host, int(port)), about, Settings(demo_home))
        assert "experts: " in partner.set_memory("30%")
        assert json.dumps(httpx.get(f"{address}/api/ps", timeout=60).json())
