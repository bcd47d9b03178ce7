"""Start replicas in a Ray cluster, for `moeinf serve --cluster` and for `serve deploy`.

`build` is the import path of a serve.yaml (docs/cluster.md):

    applications:
      - name: moeinf
        import_path: moeinf.server.cluster.launch:build
        args: {router: prefix, min_replicas: 2, max_replicas: 4, memory: 8GiB}
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from moeinf.errors import problem
from moeinf.offload.policy.names import DEFAULT_POLICY
from moeinf.offload.replicas.names import DEFAULT_ROUTER, RouterName
from moeinf.runtime.config import (
    EngineConfig,
    ServerSettings,
    read_environment,
    read_server_environment,
)
from moeinf.runtime.machine.network_home import check_replica_home
from moeinf.runtime.sizes import MemorySize, format_bytes, parse_memory_or_auto
from moeinf.server.cluster.failures import NoCluster
from moeinf.server.cluster.ingress import Ingress
from moeinf.server.cluster.replica import Replica
from moeinf.server.cluster.request_router import ExpertRouter
from moeinf.server.serve import MOST_CONNECTIONS

APP, REPLICA = "moeinf", "replica"
DRIVE = "moeinf_drive"  # the custom resource of nodes: how many replicas their drives serve
_OBJECT_STORE_BYTES = 80 << 20  # Ray's least: answers are small
_PUBLISH_S = 2.0
_DRAIN_LOOK_S = 0.5
_TRIES = 3  # to connect
_TRY_AGAIN_S = 2.0
HEALTH_S = 10.0  # a replica that has not answered for so long, three times in a row, is replaced


@dataclass(frozen=True)
class ClusterSettings:
    """How many replicas there are, and how requests reach them.

    memory_bytes, drives: what a replica takes of its node's `memory` and `moeinf_drive`; 0: not
    counted. drain_s: a replica that is to end has so long for its running answers.
    """

    router: RouterName = DEFAULT_ROUTER
    min_replicas: int = 1
    max_replicas: int = 1
    cpus: float = 0.0
    memory_bytes: int = 0
    drives: float = 0.0
    retry: bool = False
    drain_s: float = 60.0


class Arguments(BaseModel):
    """The `args` of a serve.yaml."""

    model_config = ConfigDict(extra="forbid")

    router: RouterName = DEFAULT_ROUTER
    min_replicas: int = Field(1, ge=0)
    max_replicas: int = Field(1, ge=1)
    cpus: float = Field(1.0, ge=0)
    memory: str | None = None
    ctx: int | None = Field(None, ge=1)
    policy: str = DEFAULT_POLICY
    drives: float = Field(0.0, ge=0)
    retry: bool = False
    drain_s: float = Field(60.0, ge=0)


def build(args: Mapping[str, Any]) -> Application:
    """Return the application of a serve.yaml: HTTP by Ray's proxies, settings by environment.

    args: the fields of Arguments. (Serve reads no annotation that is a string.)

    Raises InvalidValue, and ValidationError for fields that Arguments does not have.
    """
    arguments = Arguments.model_validate(args)
    memory = None if arguments.memory is None else parse_memory_or_auto(arguments.memory)
    config = EngineConfig(memory=memory, context=arguments.ctx, policy=arguments.policy)
    settings = ClusterSettings(
        arguments.router,
        arguments.min_replicas,
        arguments.max_replicas,
        arguments.cpus,
        bytes_of(memory),
        arguments.drives,
        arguments.retry,
        arguments.drain_s,
    )
    return application(config, read_server_environment(), settings)


def application(
    config: EngineConfig, server: ServerSettings, settings: ClusterSettings
) -> Application:
    """Return the ingress in an actor, behind Serve's HTTP proxy, and their replicas."""
    retry = settings.retry

    def ingress() -> Ingress:  # called in the actor that runs it
        app = serve.get_replica_context().app_name
        return Ingress(serve.get_deployment_handle(REPLICA, app), server, retry)

    entry = serve.deployment(serve.ingress(ingress)()).options(
        name="ingress",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=MOST_CONNECTIONS,
        graceful_shutdown_timeout_s=settings.drain_s,  # an update replaces it, too
        graceful_shutdown_wait_loop_s=_DRAIN_LOOK_S,
    )
    return entry.bind(deployment(config, server, settings))


class _Actor(Replica):
    """A Replica as Ray Serve makes and ends it."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, config: EngineConfig, server: ServerSettings, alone: bool, eams: bool
    ) -> None:
        """Open the application. alone: no other machine has replicas. eams: see Replica."""
        if not alone:
            check_replica_home(read_environment().home)
        super().__init__(config, server, eams=eams)
        await self.open()

    async def __del__(self) -> None:
        """End the engines, after the answers of a replica that is to end."""
        await self.close()


def deployment(
    config: EngineConfig, server: ServerSettings, settings: ClusterSettings, alone: bool = False
) -> Application:
    """Return the replicas: their number, their resources and their router. alone: see _Actor."""
    options: dict[str, Any] = {"num_cpus": settings.cpus}
    if settings.memory_bytes:
        options["memory"] = settings.memory_bytes
    if settings.drives:
        options["resources"] = {DRIVE: settings.drives}
    scale: dict[str, Any] = {"num_replicas": settings.min_replicas}
    places = server.parallel
    if settings.max_replicas > settings.min_replicas:
        scale = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=settings.min_replicas,
                max_replicas=settings.max_replicas,
                target_ongoing_requests=places,
            )
        }
    return (
        serve.deployment(_Actor)
        .options(
            name=REPLICA,
            ray_actor_options=options,
            max_ongoing_requests=places + server.max_queue,
            graceful_shutdown_timeout_s=settings.drain_s,
            graceful_shutdown_wait_loop_s=_DRAIN_LOOK_S,
            health_check_period_s=HEALTH_S / 2,
            health_check_timeout_s=HEALTH_S,
            request_router_config=RequestRouterConfig(
                request_router_class=ExpertRouter,
                request_router_kwargs={"kind": settings.router},
                request_routing_stats_period_s=_PUBLISH_S,
            ),
            **scale,
        )
        .bind(config, server, alone, settings.router == "experts")
    )


@contextmanager
def running(
    address: str,
    config: EngineConfig,
    server: ServerSettings,
    settings: ClusterSettings,
    note: Callable[[str], None] = lambda _: None,
) -> Iterator[Ingress]:
    """Run replicas while the context lasts, in a new cluster (`local`) or in one that runs.

    note: takes what the user should know meanwhile. Raises NoCluster.
    """
    local = address == "local"
    more: dict[str, Any] = {}
    if local:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # A replica that hangs would not end within drain_s, and its clients would wait as long.
        os.environ.setdefault("RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS", "1")
        more = {"object_store_memory": _OBJECT_STORE_BYTES, "include_dashboard": False}
        more["resources"] = {DRIVE: 1.0}
    with _connected(address, **more):
        if not local:
            settings = _placed(settings, note)
        replicas = deployment(config, server, settings, alone=local)
        yield Ingress(_run(address, replicas, None), server, settings.retry)


@contextmanager
def deployed(
    address: str,
    config: EngineConfig,
    server: ServerSettings,
    settings: ClusterSettings,
    note: Callable[[str], None] = lambda _: None,
) -> Iterator[Callable[[], None]]:
    """Run the whole application in the cluster of `address` (ray://HOST:PORT) while this lasts.

    Ray's client cannot stream, so Serve's own proxy on the head has the socket, at server.host and
    server.port. Yields what raises NoCluster once the cluster has gone. Raises NoCluster.
    """
    with _connected(address):
        settings = _placed(settings, note)
        serve.start(
            proxy_location="HeadOnly", http_options={"host": server.host, "port": server.port}
        )
        _run(address, application(config, server, settings), "/")

        def check() -> None:
            try:
                serve.status()
            except Exception as error:  # Ray's client raises many kinds
                raise NoCluster(f"--cluster {address}: the connection was lost") from error

        yield check


@contextmanager
def _connected(address: str, **more: Any) -> Iterator[None]:
    """Connect to Ray, and afterwards end the application and the connection. Raises NoCluster."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    for left in reversed(range(_TRIES)):
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **more)
            break
        except ConnectionAbortedError as error:  # the process that a busy head starts for a client
            if not left:
                raise _no_cluster(address, error) from error
            time.sleep(_TRY_AGAIN_S)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise _no_cluster(address, error) from error
    try:
        yield
    finally:
        with suppress(Exception):  # the head may have gone
            serve.delete(APP)
        with suppress(Exception):
            ray.shutdown()


def _no_cluster(address: str, error: Exception) -> NoCluster:
    words = problem(error) if isinstance(error, OSError) and error.errno else str(error)
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return NoCluster(f"--cluster {address}: {' '.join(lines[:2])[:200]}")


def _run(address: str, made: Application, route: str | None) -> DeploymentHandle:
    """Deploy the application and wait until it runs. Raises NoCluster."""
    try:
        return serve.run(made, name=APP, route_prefix=route)
    except RuntimeError as error:
        raise NoCluster(f"--cluster {address}: {_why(error)[:200]}") from error


def _why(error: RuntimeError) -> str:
    """Return why replicas do not start: Serve's own error names only the deployment."""
    with suppress(Exception):
        told: str = serve.status().applications[APP].deployments[REPLICA].message
        # The traceback of the replica's error, whose last line at its left edge names it.
        lines = [line for line in told.splitlines() if re.match(r"[\w.]+: ", line)]
        name, _, words = lines[-1].strip().partition(": ")
        return words if name.startswith("moeinf.") else f"{name}: {words}"
    return str(error)


def _placed(settings: ClusterSettings, note: Callable[[str], None]) -> ClusterSettings:
    """Return the settings with each replica's part of a drive. Note replicas that have to wait."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if waiting := waiting_for_memory(settings, [node.get("memory", 0.0) for node in nodes]):
        size = format_bytes(settings.memory_bytes)
        note(f"{waiting} of {settings.min_replicas} replicas wait for a node with {size} of memory")
    return replace(settings, drives=drives_of(settings, ray.cluster_resources()))


def waiting_for_memory(settings: ClusterSettings, nodes: Iterable[float]) -> int:
    """Return how many of the least number of replicas the nodes' `memory` (bytes) cannot hold."""
    if not settings.memory_bytes:
        return 0
    fit = sum(int(memory // settings.memory_bytes) for memory in nodes)
    return max(0, settings.min_replicas - fit)


def drives_of(settings: ClusterSettings, resources: dict[str, float]) -> float:
    """Return each replica's part of a node's `moeinf_drive`, so that all drives get as many.

    Ray counts nothing else of a replica without a --memory in bytes, and may place all on one node.
    """
    drives = resources.get(DRIVE, 0.0)
    return 1 / math.ceil(settings.max_replicas / drives) if drives >= 1 else settings.drives


def bytes_of(memory: MemorySize | None) -> int:
    """Return what Ray counts of a node's `memory` for a replica; 0 for a share of a model."""
    return 0 if memory is None or memory.bytes is None else memory.bytes
