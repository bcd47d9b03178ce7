"""Test how replicas are made, without a cluster: their home, and whether their memory fits."""

from __future__ import annotations

import asyncio
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moeinf.offload.replicas.names import RouterName
from moeinf.runtime.config import EngineConfig, ServerSettings
from moeinf.runtime.machine import network_home
from moeinf.runtime.machine.network_home import SharedHome
from moeinf.runtime.sizes import MemorySize

pytest.importorskip("ray", reason="needs pip install 'moeinf[cluster]'")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    import ray

    from moeinf.server.cluster import launch
    from moeinf.server.cluster.launch import ClusterSettings, waiting_for_memory

pytestmark = [
    pytest.mark.full,  # the import of Ray takes seconds
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments"),  # in Ray
]
CONFIG = EngineConfig(memory=MemorySize(share=0.5))
GIB = 1 << 30


class Actor(launch._Actor):
    """An actor that is not in Ray: nothing awaits its end."""

    def __del__(self) -> None:  # type: ignore[override]
        """Do nothing."""


@pytest.fixture
def network(demo_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the home be on a network file system that can be written."""
    monkeypatch.setenv("MOEINF_HOME", str(demo_home))
    monkeypatch.setattr(network_home, "network_type", lambda *_: "nfs4")


async def opened(alone: bool) -> Actor:
    """Return an actor that Ray would have made."""
    actor = Actor.__new__(Actor)
    await actor.__init__(CONFIG, ServerSettings(), alone, False)  # type: ignore[misc]
    return actor


@pytest.mark.usefixtures("network")
def test_a_network_home_is_refused_where_other_machines_have_replicas() -> None:
    with pytest.raises(SharedHome):
        asyncio.run(opened(alone=False))


@pytest.mark.usefixtures("network")
def test_a_network_home_serves_the_replicas_of_one_machine() -> None:
    async def run() -> None:
        actor = await opened(alone=True)
        assert actor.record_routing_stats()["models"] == {}
        await actor.close()

    asyncio.run(run())


def test_serve_deploy_takes_replicas_to_be_on_several_machines() -> None:
    ingress = launch.build({})._bound_deployment
    _, _, alone, _ = ingress.init_args[0]._bound_deployment.init_args
    assert alone is False


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Put a cluster of two nodes, one of them dead, in the place of Ray; return what it deploys."""
    found = list[Any]()

    def run(_: str, application: Any, __: str | None) -> Any:
        found.append(application._bound_deployment)
        return SimpleNamespace(options=lambda **_: None)

    nodes = [{"Alive": alive, "Resources": {"memory": 16.0 * GIB}} for alive in (True, False)]
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS", "1")
    monkeypatch.setattr(launch, "_connected", lambda *_, **__: nullcontext())
    monkeypatch.setattr(launch, "_run", run)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"moeinf_drive": 2.0})
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    return found


@pytest.mark.parametrize(("address", "alone"), [("local", True), ("auto", False)])
def test_only_a_local_cluster_is_alone(address: str, alone: bool, made: list[Any]) -> None:
    with launch.running(address, CONFIG, ServerSettings(), ClusterSettings()):
        (replicas,) = made
    assert replicas.init_args == (CONFIG, ServerSettings(), alone, False)
    resources = replicas.ray_actor_options.get("resources", {})
    assert resources == ({} if alone else {"moeinf_drive": 1.0})


@pytest.mark.parametrize("router", ["random", "session", "prefix", "experts"])
def test_only_the_router_that_reads_eams_gets_them(router: RouterName) -> None:
    made = launch.deployment(CONFIG, ServerSettings(), ClusterSettings(router))._bound_deployment
    assert made.init_args[-1] is (router == "experts")


@pytest.mark.parametrize(("memory", "told"), [(12 * GIB, ["2 of 3"]), (5 * GIB, []), (0, [])])
def test_replicas_that_wait_for_memory_are_told(
    memory: int, told: list[str], made: list[Any]
) -> None:
    notes = list[str]()
    settings = ClusterSettings(min_replicas=3, max_replicas=3, memory_bytes=memory)
    with launch.running("auto", CONFIG, ServerSettings(), settings, notes.append):
        assert len(made) == 1  # they are deployed all the same: a node may come
    assert [note.partition(" replicas")[0] for note in notes] == told


def test_replicas_fit_a_node_each() -> None:
    settings = ClusterSettings(min_replicas=4, max_replicas=8, memory_bytes=10)
    assert waiting_for_memory(settings, [29, 9, 15]) == 1
    assert waiting_for_memory(settings, [29, 29]) == 0
    assert waiting_for_memory(settings, []) == 4
