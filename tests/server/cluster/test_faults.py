"""Test a cluster of two nodes: Ray's client, a slow network, a full disk, a hang, a dead head.

No token may be lost or sent twice. The tests share one cluster, and run in this order: the last one
ends it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import httpx
import pytest

pytest.importorskip("ray", reason="needs pip install 'moeinf[cluster]'")

from tests.server.cluster.clients import LONG, killed, leave, streamed, text_of, whole
from tests.server.cluster.two_nodes import GCS_S, HEALTH_S, TwoNodes, ticks, usable

pytestmark = [pytest.mark.full, pytest.mark.timeout(240), pytest.mark.linux("reads /proc")]
CLIENTS = 6


@pytest.fixture(scope="module")
def nodes(demo_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    if why := usable():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("nodes")
    with closing(TwoNodes(demo_home, folder)) as found:
        yield found


def test_a_client_of_ray_deploys_what_the_head_serves(nodes: TwoNodes) -> None:
    with nodes.remote("--memory", "50%", "--retry") as client:
        text, lines = streamed(client)
        assert whole(lines)
        assert len(text) == 400
        leave(client)
        rest, again = killed(client, nodes.spent, after=40)
        assert (rest, len(again), whole(again)) == (text, len(lines), True)
        assert client.post("/api/show", json={"model": "none"}).json()["code"] == "model_not_found"
    until = time.monotonic() + 20
    while nodes.replicas():
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.fixture(scope="module")
def expected(nodes: TwoNodes) -> tuple[str, int]:
    """Start the server; return the text and the number of lines of an undisturbed stream."""
    nodes.serve("--retry", "--memory", "50%")
    assert sorted(nodes.replicas().values()) == ["here", "there"]
    text, lines = streamed(nodes.client)
    assert whole(lines)
    assert len(text) == 400
    return text, len(lines)


def ask(
    nodes: TwoNodes, expected: tuple[str, int], each: Callable[[int], object] = lambda _: None
) -> None:
    """Read a stream, which must be the undisturbed one."""
    text, lines = streamed(nodes.client, each)
    assert whole(lines), lines[-3:]
    assert (text, len(lines)) == expected


def all_ask(nodes: TwoNodes, expected: tuple[str, int]) -> dict[str, int]:
    """Let all clients ask at once; return the clock ticks that each node's replica has spent."""
    before = nodes.spent()
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(lambda _: ask(nodes, expected), range(CLIENTS)))
    return {node: ticks(pid) - before[pid] for pid, node in nodes.replicas().items()}


def test_a_slow_network_loses_no_token(nodes: TwoNodes, expected: tuple[str, int]) -> None:
    nodes.slow(delay_s=0.03, loss=0.02)
    spent = all_ask(nodes, expected)
    assert min(spent.values()) > 0, "a node had nothing to do"
    cut = threading.Timer(0.2, nodes.slow, (0.03, 1.0))
    heal = threading.Timer(2.0, nodes.slow, (0.0, 0.0))
    cut.start()
    heal.start()
    all_ask(nodes, expected)
    heal.join()


def test_a_full_disk_costs_no_answer(nodes: TwoNodes, expected: tuple[str, int]) -> None:
    fills = nodes.disk / "fills"
    with suppress(OSError), fills.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    assert os.statvfs(nodes.disk).f_bavail == 0
    try:
        spent = all_ask(nodes, expected)
        assert spent["there"] > 0
        assert nodes.client.get("/health").status_code == 200
    finally:
        fills.unlink()


def test_a_hung_replica_is_replaced(nodes: TwoNodes, expected: tuple[str, int]) -> None:
    before = nodes.replicas()
    hung = next(pid for pid, node in before.items() if node == "there")
    with ThreadPoolExecutor(CLIENTS) as pool:
        asking = [pool.submit(ask, nodes, expected) for _ in range(CLIENTS)]
        time.sleep(0.1)
        os.kill(hung, signal.SIGSTOP)
        begin = time.monotonic()
        for one in asking:
            one.result()
    ask(nodes, expected)
    until = begin + 10 * HEALTH_S + 10
    while hung in nodes.replicas() or len(nodes.replicas()) < 2:
        assert time.monotonic() < until
        time.sleep(0.1)
    ask(nodes, expected)


def test_without_its_head_streams_are_whole_or_visibly_cut(
    nodes: TwoNodes, expected: tuple[str, int]
) -> None:
    lines = list[str]()
    try:
        with nodes.client.stream("POST", "/v1/completions", json=LONG) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                if len(lines) == 40:
                    os.kill(nodes.gcs(), signal.SIGKILL)
    except httpx.HTTPError:
        assert "data: [DONE]" not in lines
    text = text_of(lines)
    assert expected[0].startswith(text)
    assert whole(lines) == (text == expected[0])
    assert nodes.server.wait(GCS_S + 20) != 0
