"""Test the metrics of a cluster."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Counter as Counted

from moeinf.server.cluster.routing_counts import ROUTERS, RoutingCounts


class Fake:
    """A router with two replicas."""

    def __init__(self) -> None:
        one = SimpleNamespace(decisions=Counter({"prefix": 3, "load": 1}))
        self.by_model = {"demo": one, "other": SimpleNamespace(decisions=Counter({"load": 2}))}
        self.curr_replicas = {
            name: SimpleNamespace(
                replica_id=SimpleNamespace(unique_id=name),
                routing_stats={"metrics": exposition(count)} if count else {},
            )
            for name, count in (("r1", 5), ("r2", 7), ("new", 0))
        }


def exposition(count: int) -> str:
    registry = CollectorRegistry()
    Counted("moeinf:tokens", "Tokens.", ["model_name"], registry=registry).labels("demo").inc(count)
    return generate_latest(registry).decode()


def test_ranks_and_replicas_are_labels() -> None:
    fake, registry = Fake(), CollectorRegistry()
    registry.register(RoutingCounts())
    ROUTERS.add(fake)
    try:
        lines = generate_latest(registry).decode().splitlines()
    finally:
        ROUTERS.discard(fake)
    assert 'moeinf:router_decisions_total{model_name="demo",rank="prefix"} 3.0' in lines
    assert 'moeinf:router_decisions_total{model_name="other",rank="load"} 2.0' in lines
    assert 'moeinf:tokens_total{model_name="demo",replica="r1"} 5.0' in lines
    assert 'moeinf:tokens_total{model_name="demo",replica="r2"} 7.0' in lines
    assert lines.count("# TYPE moeinf:tokens_total counter") == 1
