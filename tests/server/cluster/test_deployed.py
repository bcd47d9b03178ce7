"""Test `serve deploy` of docs/cluster/serve.yaml: behind Ray Serve's own proxy, in one cluster.

Streams of all APIs, cancellation, a killed replica, an update, and replicas that do not fit. The
tests run in this order: the last one leaves replicas that wait.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs pip install 'moeinf[cluster]'")
from tests.server.cluster.clients import killed, leave, streamed, whole
from tests.server.cluster.deployed import Deployed

pytestmark = [pytest.mark.full, pytest.mark.timeout(240), pytest.mark.linux("reads /proc")]

SUM = [{"role": "user", "content": "17+25="}]
HUGE = "900GiB"


@pytest.fixture(scope="module")
def deployed(demo_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with closing(Deployed(demo_home, tmp_path_factory.mktemp("deployed"))) as found:
        found.deploy()
        found.wait()
        yield found


def lines_of(deployed: Deployed, path: str, **body: Any) -> list[str]:
    """Return the lines of a stream, without empty ones."""
    body = {"model": "demo", "temperature": 0, "stream": True, **body}
    with deployed.client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        return [line for line in answer.iter_lines() if line]


def events(lines: list[str]) -> list[Any]:
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_every_api_streams(deployed: Deployed) -> None:
    options = {"options": {"temperature": 0}}
    ollama = [json.loads(line) for line in lines_of(deployed, "/api/chat", messages=SUM, **options)]
    assert "".join(line["message"]["content"] for line in ollama) == "42"
    assert [line["done"] for line in ollama] == [False] * (len(ollama) - 1) + [True]

    chat = lines_of(deployed, "/v1/chat/completions", messages=SUM)
    assert chat.count("data: [DONE]") == 1
    assert chat[-1] == "data: [DONE]"
    deltas = [one["choices"][0]["delta"] for one in events(chat)]
    assert "".join(delta.get("content") or "" for delta in deltas) == "42"

    anthropic = lines_of(deployed, "/v1/messages", messages=SUM, max_tokens=8)
    names = [name for name, _ in groupby(one["type"] for one in events(anthropic))]
    assert [name for name in names if name != "ping"] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert "".join(one.get("delta", {}).get("text", "") for one in events(anthropic)) == "42"

    responses = events(lines_of(deployed, "/v1/responses", input="17+25="))
    assert responses[0]["type"] == "response.created"
    assert responses[-1]["type"] == "response.completed"
    texts = [one["delta"] for one in responses if one["type"] == "response.output_text.delta"]
    assert "".join(texts) == "42"


def test_leaving_a_stream_stops_the_engine(deployed: Deployed) -> None:
    leave(deployed.client)


def test_a_killed_replica_costs_no_token_also_of_a_sampled_answer(deployed: Deployed) -> None:
    """serve.yaml has `retry: true`. A seed gives the same tokens on each replica.

    A prompt of one token has no prefix, whose bits in a cache may be others than computed ones.
    """
    drawn: dict[str, Any] = {"prompt": "a", "temperature": 1}
    found = {seed: streamed(deployed.client, **drawn, seed=seed) for seed in range(7, 12)}
    assert len({text for text, _ in found.values()}) > 1
    seed, (text, lines) = max(found.items(), key=lambda item: len(item[1][1]))
    assert whole(lines)
    assert len(lines) > 60
    again, repeated = killed(deployed.client, deployed.replicas, after=40, **drawn, seed=seed)
    assert (again, len(repeated), whole(repeated)) == (text, len(lines), True)
    deployed.wait()


def test_an_update_cuts_no_answer_off(deployed: Deployed) -> None:
    """It replaces all replicas and the ingress, while a client asks all the time."""
    expected = streamed(deployed.client)[0]
    assert len(expected) == 400
    before, over = set(deployed.replicas()), threading.Event()

    def ask() -> list[str]:
        found = []
        while not over.is_set():
            text, lines = streamed(deployed.client)
            found.append(text if whole(lines) else str(lines[-3:]))
            over.wait(0.2)  # a processor for the new replicas
        return found

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            deployed.deploy(ctx=500)
            deployed.wait(before)
        finally:
            over.set()
        answers = asking.result()
    assert set(answers) == {expected}
    assert len(answers) >= 4
    assert streamed(deployed.client)[0] == expected


def test_a_replica_that_does_not_fit_waits_and_is_told(deployed: Deployed) -> None:
    """The other replica goes on."""
    deployed.deploy(memory=HUGE)
    until = time.monotonic() + 60
    while True:
        status = deployed.status()
        replica = status["deployments"].get("replica", {"message": ""})
        if str(900 << 30) in replica["message"]:
            break
        assert time.monotonic() < until, status
        time.sleep(0.5)
    assert status["status"] == "DEPLOYING"
    assert replica["replica_states"]["STARTING"] == 1
    assert "memory" in replica["message"]
    assert replica["replica_states"]["RUNNING"] == 1
    assert whole(streamed(deployed.client)[1])
