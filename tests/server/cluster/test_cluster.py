"""Test replicas in a Ray cluster of this machine: the APIs, cancellation, faults."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs pip install 'moeinf[cluster]'")
from tests.server.cluster.clients import leave, streamed
from tests.server.cluster.local_cluster import Cluster

pytestmark = [pytest.mark.full, pytest.mark.timeout(240), pytest.mark.linux("reads /proc")]

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "17+25="}], "max_tokens": 4}
SOON = (
    "import functools\n"
    "import moeinf.server.cluster.launch as launch\n"
    "soon = {'upscale_delay_s': 1, 'downscale_delay_s': 1, 'look_back_period_s': 1}\n"
    "launch.AutoscalingConfig = functools.partial(\n"
    "    launch.AutoscalingConfig, metrics_interval_s=0.2, **soon)\n"
)


@pytest.fixture(scope="module")
def cluster(demo_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    found = Cluster(demo_home, tmp_path_factory.mktemp("cluster") / "log", "--retry")
    try:
        yield found
    finally:
        code = found.close()
    assert code in (0, 130)


def test_every_api_answers_through_the_ingress(cluster: Cluster) -> None:
    ollama = cluster.post("/api/chat", {**CHAT, "stream": False, "options": {"temperature": 0}})
    assert ollama.json()["message"]["content"] == "42"
    openai = cluster.post("/v1/chat/completions", {**CHAT, "temperature": 0})
    assert openai.json()["choices"][0]["message"]["content"] == "42"
    anthropic = cluster.post("/v1/messages", {**CHAT, "temperature": 0})
    assert anthropic.json()["content"] == [{"type": "text", "text": "42"}]
    responses = cluster.post(
        "/v1/responses", {"model": "demo", "input": "17+25=", "temperature": 0}
    )
    assert responses.json()["status"] == "completed"
    text, lines = cluster.long_answer()
    assert len(text) > 100
    assert lines.count("data: [DONE]") == 1


def test_several_models_at_a_time(cluster: Cluster) -> None:
    for model in ("demo", "demo:f32") * 2:
        found = cluster.post("/v1/chat/completions", {**CHAT, "model": model, "temperature": 0})
        assert found.json()["choices"][0]["message"]["content"] == "42"
        assert cluster.metric(rf'moeinf:router_decisions_total\{{.*model_name="{model}"') >= 1


def test_errors_have_the_form_of_their_api(cluster: Cluster) -> None:
    assert (
        cluster.post("/api/chat", {"model": "none", "messages": []}).json()["code"]
        == "model_not_found"
    )
    found = cluster.post("/v1/chat/completions", {**CHAT, "model": "none"})
    assert (found.status_code, found.json()["error"]["code"]) == (404, "model_not_found")
    assert cluster.client.get("/", headers={"host": "evil.example"}).status_code == 403


def test_a_conversation_stays_where_its_prefix_is(cluster: Cluster) -> None:
    before = cluster.metric(r'moeinf:router_decisions_total\{.*rank="prefix"')
    talk = [{"role": "user", "content": "1+1="}]
    for turn in range(4):
        body = {**CHAT, "messages": talk, "temperature": 0}
        answer = cluster.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        talk += [answer, {"role": "user", "content": f"{turn}+1="}]
    assert cluster.metric(r'moeinf:router_decisions_total\{.*rank="prefix"') >= before + 3


def test_leaving_a_stream_stops_the_engine(cluster: Cluster) -> None:
    leave(cluster.client)


def test_a_killed_replica_costs_no_token_with_retry(cluster: Cluster) -> None:
    whole, lines = cluster.long_answer()
    text, again = cluster.long_answer(kill_after=40)
    assert text == whole
    assert len(again) == len(lines)
    assert again.count("data: [DONE]") == 1


def test_the_number_of_replicas_follows_the_load(demo_home: Path, tmp_path: Path) -> None:
    """From 1 to 2 and back, with shorter delays than Ray's 30 and 600 s. No answer is cut off."""
    scaled = Cluster(demo_home, tmp_path / "log", "--replicas", "1-2", before=SOON)
    try:
        assert len(scaled.replicas()) == 1
        whole, _ = scaled.long_answer()
        with ThreadPoolExecutor(6) as pool:
            until = time.monotonic() + 100
            while len(scaled.replicas()) < 2:
                assert time.monotonic() < until
                for text, _ in pool.map(lambda _: streamed(scaled.client), range(6)):
                    assert text == whole
        until = time.monotonic() + 100
        while len(scaled.replicas()) > 1:
            assert time.monotonic() < until
            time.sleep(0.2)
        assert scaled.long_answer()[0] == whole
    finally:
        assert scaled.close() in (0, 130)


def test_a_killed_replica_ends_its_stream_by_an_error(demo_home: Path, tmp_path: Path) -> None:
    alone = Cluster(demo_home, tmp_path / "log", "--replicas", "1", "--router", "prefix")
    try:
        whole, _ = alone.long_answer()
        text, lines = alone.long_answer(kill_after=40)
        assert whole.startswith(text)
        assert len(text) < len(whole)
        last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "replica_lost"
        assert alone.long_answer()[0] == whole  # by a new replica
    finally:
        assert alone.close() in (0, 130)


def test_replicas_end_with_the_doors(demo_home: Path, tmp_path: Path) -> None:
    """Also where the process of the doors could not end them."""
    alone = Cluster(demo_home, tmp_path / "log")
    replicas = alone.replicas()
    assert replicas
    alone.process.kill()
    alone.process.wait(20)
    alone.client.close()
    until = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in replicas):
        assert time.monotonic() < until
        time.sleep(0.2)
