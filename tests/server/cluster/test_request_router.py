"""Test Ray's own routing with our router in it: the ranks, a full replica, the counts."""

from __future__ import annotations

import asyncio
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from moeinf.offload.replicas.names import RouterName
from moeinf.offload.replicas.route_keys import RouteKeys, route_keys
from moeinf.offload.replicas.router import Observed, Published

pytest.importorskip("ray", reason="needs pip install 'moeinf[cluster]'")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    from ray.serve._private.common import (
        DeploymentHandleSource,
        DeploymentID,
        ReplicaID,
        RequestMetadata,
    )
    from ray.serve.request_router import PendingRequest

    from moeinf.server.cluster.request_router import ExpertRouter
    from moeinf.server.cluster.routing_counts import ROUTERS, RoutingCounts

DEPLOYMENT = DeploymentID("replica", "moeinf")
NAMES = ("a", "b", "c")


@dataclass
class Fake:
    """A running replica, in place of Ray's wrapper of one."""

    name: str
    running: int = 0
    models: dict[str, Published] = field(default_factory=dict)
    max_ongoing_requests: int = 2

    @property
    def replica_id(self) -> ReplicaID:
        return ReplicaID(self.name, DEPLOYMENT)

    @property
    def routing_stats(self) -> dict[str, Any]:
        return {"models": self.models}

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.running


class Routed:
    """A router of three replicas. `route` tells which one takes a request."""

    def __init__(self, kind: RouterName) -> None:
        self.router = ExpertRouter(
            deployment_id=DEPLOYMENT,
            handle_source=DeploymentHandleSource.REPLICA,
            use_replica_queue_len_cache=False,
        )
        ROUTERS.clear()  # of earlier tests
        self.router.initialize_state(kind=kind)
        self.replicas = {name: Fake(name) for name in NAMES}
        self.router.update_replicas(list(self.replicas.values()))

    async def route(self, keys: RouteKeys) -> str:
        about = RequestMetadata(str(keys.number), str(keys.number))
        pending = PendingRequest([], {"keys": keys}, about)
        async with asyncio.timeout(10):
            replica = await self.router._choose_replica_for_request(pending)
        self.router.on_request_routed(pending, replica.replica_id, None)
        return str(replica.replica_id.unique_id)

    def counts(self) -> dict[str, float]:
        """Return the counts of /metrics for the model `demo`, by rank."""
        registry = CollectorRegistry()
        registry.register(RoutingCounts())
        lead = 'moeinf:router_decisions_total{model_name="demo",rank="'
        lines = generate_latest(registry).decode().splitlines()
        found = [line.removeprefix(lead) for line in lines if line.startswith(lead)]
        return {line.partition('"')[0]: float(line.split()[-1]) for line in found}

    def publish(self, **residents: list[bool]) -> None:
        """Let replicas publish which of four experts of one layer they have, and no prefix."""
        for name, resident in residents.items():
            self.replicas[name].models["demo"] = Published(1, np.array(resident))


def request(number: int, *pieces: str, session: str = "") -> RouteKeys:
    return route_keys(number, pieces, session, "demo")


def test_prefix_stays_and_a_full_replica_passes_a_request_on() -> None:
    async def run() -> None:
        routed = Routed("prefix")
        routed.publish(a=[True] * 4, b=[True] * 4, c=[True] * 4)
        first = await routed.route(request(1, "one", "two"))
        assert await routed.route(request(2, "one", "two", "three")) == first
        assert routed.counts() == {"load": 1, "prefix": 1}
        routed.replicas[first].running = 2  # as many as it may have
        other = await routed.route(request(3, "one", "two", "three", "four"))
        assert other != first
        assert routed.counts() == {"load": 2, "prefix": 1}
        # The one that took it has the longest prefix now.
        routed.replicas[first].running = 0
        assert await routed.route(request(4, "one", "two", "three", "four", "five")) == other
        assert routed.counts() == {"load": 2, "prefix": 2}
        # Sent again after a failure: it counts once.
        await routed.route(request(4, "one", "two", "three", "four", "five"))
        assert routed.counts() == {"load": 2, "prefix": 2}

    asyncio.run(run())


def test_experts_find_the_replica_that_has_them() -> None:
    async def run() -> None:
        routed = Routed("experts")
        routed.publish(a=[True, True, False, False], b=[False] * 4, c=[False, False, True, True])
        await routed.route(request(1, "green apples"))
        eam = np.array([[0, 0, 3, 1]], np.uint32)
        about = Published(2, np.array([True, True, False, False]), frozenset(), (Observed(1, eam),))
        routed.replicas["a"].models["demo"] = about
        assert await routed.route(request(2, "green apples again")) == "c"
        assert routed.counts() == {"load": 1, "experts": 1}

    asyncio.run(run())


def test_a_session_stays_and_random_does_not() -> None:
    async def run() -> None:
        routed = Routed("session")
        keys = [request(number, "hello", session=f"s{number % 2}") for number in range(12)]
        found = [await routed.route(one) for one in keys]
        assert len(set(found[::2])) == len(set(found[1::2])) == 1
        full = found[0]
        routed.replicas[full].running = 2
        assert await routed.route(request(20, "hello", session="s0")) != full
        assert routed.counts() == {"session": 13}
        drawn = Routed("random")
        keys = [request(number, "hello", session="s") for number in range(30)]
        assert {await drawn.route(one) for one in keys} == set(NAMES)
        assert drawn.counts()["random"] == 30

    asyncio.run(run())


def test_the_load_counts_requests_that_run() -> None:
    async def run() -> None:
        routed = Routed("prefix")
        for name in ("a", "b"):
            for _ in range(3):
                routed.router.on_send_request(ReplicaID(name, DEPLOYMENT))
        for number in range(4):
            assert await routed.route(request(number, f"text {number}")) == "c"
        routed.router.on_request_completed(ReplicaID("a", DEPLOYMENT), "1")
        assert routed.router._candidate("demo", routed.replicas["a"]).load == 2

    asyncio.run(run())
